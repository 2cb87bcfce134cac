"""Operators: reshard the left operand, then multiply; and multiply, then reshard the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from syncopate_jax.ops.operands import matmul_like
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Launch, Options
from syncopate_jax.registry import operators

_TO_ROWS = Contraction("bmk", "kn", "bmn", "all_to_all", "lhs", gather="k", scatter="m")
_TO_COLUMNS = Contraction("bmk", "kn", "bmn", "all_to_all", "out", gather="m", scatter="n")
operators.register("all_to_all_matmul")(_TO_ROWS)
operators.register("matmul_all_to_all")(_TO_COLUMNS)


def all_to_all_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    preferred_element_type: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
    target: str | None = None,
    plan: Any = None,
    split: int | None = None,
    tiles: Mapping[str, int] | None = None,
    launch: Launch | None = None,
) -> jax.Array:
    """``all_to_all(x) @ w``: column shards become row shards (paper section 6, A2A-GEMM).

    This is the projection after Ulysses-style attention: heads come in sharded, rows go out so.

    Args:
      x: [..., M, K/W].
      w: [K, N].
      axis_name: mesh axis, or tuple of mesh axes, whose W ranks take part.
      preferred_element_type: dtype of the result; default that of the promoted operands.
      backend, target, plan, split, tiles, launch: as in ``syncopate_jax.options.Options``.

    Returns:
      [..., M/W, N].

    Raises:
      InputError: when shapes, dtypes or options do not fit, or W does not divide M.
      MeshError: when ``axis_name`` is not bound by a surrounding ``jax.shard_map``.
    """
    spec = _TO_ROWS
    options = Options(
        backend=backend, target=target, plan=plan, split=split, tiles=tiles, launch=launch
    )
    return matmul_like("all_to_all_matmul", x, w, spec, axis_name, preferred_element_type, options)


def matmul_all_to_all(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    preferred_element_type: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
    target: str | None = None,
    plan: Any = None,
    split: int | None = None,
    tiles: Mapping[str, int] | None = None,
    launch: Launch | None = None,
) -> jax.Array:
    """``all_to_all(x @ w)``: row shards become column shards (the mirror of A2A-GEMM).

    This is the projection before Ulysses-style attention: rows come in sharded, heads go out so.

    Args:
      x: [..., M/W, K].
      w: [K, N].
      axis_name: mesh axis, or tuple of mesh axes, whose W ranks take part.
      preferred_element_type: dtype of the result; default that of the promoted operands.
      backend, target, plan, split, tiles, launch: as in ``syncopate_jax.options.Options``.

    Returns:
      [..., M, N/W].

    Raises:
      InputError: when shapes, dtypes or options do not fit, or W does not divide N.
      MeshError: when ``axis_name`` is not bound by a surrounding ``jax.shard_map``.
    """
    spec = _TO_COLUMNS
    options = Options(
        backend=backend, target=target, plan=plan, split=split, tiles=tiles, launch=launch
    )
    return matmul_like("matmul_all_to_all", x, w, spec, axis_name, preferred_element_type, options)
