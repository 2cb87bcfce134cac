"""Operator: matrix product of partial operands, reduced and scattered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from syncopate_jax.errors import InputError
from syncopate_jax.ops.operands import matmul_like
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Launch, Options
from syncopate_jax.registry import operators

_SPECS = {
    "m": Contraction("bmk", "kn", "bmn", "reduce_scatter", "out", scatter="m"),
    "n": Contraction("bmk", "kn", "bmn", "reduce_scatter", "out", scatter="n"),
}
operators.register("matmul_reduce_scatter")(_SPECS["m"])


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    scatter: str = "m",
    preferred_element_type: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
    target: str | None = None,
    plan: Any = None,
    split: int | None = None,
    tiles: Mapping[str, int] | None = None,
    launch: Launch | None = None,
) -> jax.Array:
    """``reduce_scatter(x @ w)``, the scatter overlapped by the product (paper section 6, GEMM-RS).

    Args:
      x: [..., M, K/W].
      w: [K/W, N].
      axis_name: mesh axis, or tuple of mesh axes, whose W ranks take part.
      scatter: ``"m"`` or ``"n"``, the dimension of the result that is scattered.
      preferred_element_type: dtype of the result; default that of the promoted operands.
      backend, target, plan, split, tiles, launch: as in ``syncopate_jax.options.Options``.

    Returns:
      [..., M/W, N] (or [..., M, N/W]), summed over the ranks; float32 sums if fused.

    Raises:
      InputError: when shapes, dtypes or options do not fit, or W does not divide what is scattered.
      MeshError: when ``axis_name`` is not bound by a surrounding ``jax.shard_map``.
    """
    asked: Any = scatter
    spec = _SPECS.get(asked) if isinstance(asked, str) else None
    if spec is None:
        raise InputError(f"matmul_reduce_scatter: scatter must be 'm' or 'n', found {scatter!r}")
    options = Options(
        backend=backend, target=target, plan=plan, split=split, tiles=tiles, launch=launch
    )
    return matmul_like(
        "matmul_reduce_scatter", x, w, spec, axis_name, preferred_element_type, options
    )
