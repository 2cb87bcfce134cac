"""Operator: matrix product of partial operands, reduced onto every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from syncopate_jax.ops.operands import matmul_like
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Launch, Options
from syncopate_jax.registry import operators

_SPEC = Contraction("bmk", "kn", "bmn", "all_reduce", "out")
operators.register("matmul_all_reduce")(_SPEC)


def matmul_all_reduce(
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
    """``all_reduce(x @ w)``, the reduction overlapped by the product (paper section 6, GEMM-AR).

    Args:
      x: [..., M, K/W].
      w: [K/W, N].
      axis_name: mesh axis, or tuple of mesh axes, whose W ranks take part.
      preferred_element_type: dtype of the result; default that of the promoted operands.
      backend, target, plan, split, tiles, launch: as in ``syncopate_jax.options.Options``.

    Returns:
      [..., M, N], the sum over the ranks, the same on every rank; float32 sums if fused.

    Raises:
      InputError: when shapes, dtypes or options do not fit; the message has the numbers.
      MeshError: when ``axis_name`` is not bound by a surrounding ``jax.shard_map``.
    """
    spec = _SPEC
    options = Options(
        backend=backend, target=target, plan=plan, split=split, tiles=tiles, launch=launch
    )
    return matmul_like("matmul_all_reduce", x, w, spec, axis_name, preferred_element_type, options)
