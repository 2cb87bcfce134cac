"""Operator: all-gather one operand of a matrix product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

import jax

from syncopate_jax.errors import InputError
from syncopate_jax.ops.operands import matmul_and_keep, matmul_like
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Launch, Options
from syncopate_jax.registry import operators

_SPECS = {
    ("x", "m"): Contraction("bmk", "kn", "bmn", "all_gather", "lhs", gather="m"),
    ("x", "k"): Contraction("bmk", "kn", "bmn", "all_gather", "lhs", gather="k"),
    ("w", "k"): Contraction("bmk", "kn", "bmn", "all_gather", "rhs", gather="k"),
    ("w", "n"): Contraction("bmk", "kn", "bmn", "all_gather", "rhs", gather="n"),
}
operators.register("all_gather_matmul")(_SPECS["x", "m"])


@overload
def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    gathered: str = "x",
    dimension: str = "m",
    return_gathered: Literal[False] = False,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
    target: str | None = None,
    plan: Any = None,
    split: int | None = None,
    tiles: Mapping[str, int] | None = None,
    launch: Launch | None = None,
) -> jax.Array: ...


@overload
def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    gathered: str = "x",
    dimension: str = "m",
    return_gathered: Literal[True],
    preferred_element_type: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
    target: str | None = None,
    plan: Any = None,
    split: int | None = None,
    tiles: Mapping[str, int] | None = None,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    gathered: str = "x",
    dimension: str = "m",
    return_gathered: bool = False,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
    target: str | None = None,
    plan: Any = None,
    split: int | None = None,
    tiles: Mapping[str, int] | None = None,
    launch: Launch | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``all_gather(x) @ w`` with the gather overlapped by the product (paper section 6, AG-GEMM).

    By default the rows of ``x`` are gathered, as in tensor parallelism with sequence-sharded
    activations. ``gathered="x", dimension="k"`` gathers the contraction; ``gathered="w"`` with
    ``"k"`` or ``"n"`` gathers the weight, as in FSDP.

    Args:
      x: [..., M/W, K] (or [..., M, K/W] gathered along k, or [..., M, K] if ``w`` is gathered).
      w: [K, N] (or [K/W, N], [K, N/W] if ``w`` is gathered).
      axis_name: mesh axis, or tuple of mesh axes, whose W ranks take part.
      gathered: ``"x"`` or ``"w"``, the operand that is sharded over the axis.
      dimension: ``"m"``, ``"k"`` or ``"n"``, the dimension along which it is sharded.
      return_gathered: also return the gathered operand, for others to read: further products with
        it (of queries, keys and values one gathers for all three), a residual. The gradient adds
        what came back through both before it scatters them, once.
      preferred_element_type: dtype of the result; default that of the promoted operands.
      backend, target, plan, split, tiles, launch: as in ``syncopate_jax.options.Options``.

    Returns:
      [..., M, N] on every rank; with ``return_gathered`` a pair of it and the gathered operand,
      [..., M, K] or [K, N], in the promoted dtype of both operands.

    Raises:
      InputError: when shapes, dtypes or options do not fit; the message has the numbers.
      MeshError: when ``axis_name`` is not bound by a surrounding ``jax.shard_map``.
      UnsupportedError: ``return_gathered`` of a backend that gathers into no array of its own.
    """
    if not isinstance(return_gathered, bool):
        raise InputError(
            f"all_gather_matmul: return_gathered needs True or False, found {return_gathered!r}"
        )
    asked = (gathered, dimension)
    spec = _SPECS.get(asked) if all(isinstance(name, str) for name in asked) else None
    if spec is None:
        known = ", ".join(f"{o} along {d}" for o, d in _SPECS)
        raise InputError(
            f"all_gather_matmul: cannot gather {gathered!r} along {dimension!r}; known: {known}"
        )
    options = Options(
        backend=backend, target=target, plan=plan, split=split, tiles=tiles, launch=launch
    )
    multiply = matmul_and_keep if return_gathered else matmul_like
    return multiply("all_gather_matmul", x, w, spec, axis_name, preferred_element_type, options)
