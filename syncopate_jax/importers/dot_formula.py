"""The formula of an HLO contraction, once its dimension numbers are seen to fit its operands."""

from __future__ import annotations

from collections.abc import Sequence

from syncopate_jax.errors import InputError
from syncopate_jax.importers.hlo_ops import HloOp
from syncopate_jax.importers.shardings import formula_of

MAX_NDIM = 8  # of an operand: letters must not run out


def dot_formula(dot: HloOp, shapes: Sequence[Sequence[int]]) -> str:
    """The formula, as in ``jnp.einsum``, of a contraction of arrays with ``shapes``.

    Raises InputError when the dimension numbers and the shapes do not fit each other.
    """
    if len(shapes) != 2 or not all(0 < len(shape) <= MAX_NDIM for shape in shapes):
        raise InputError(
            f"contraction {dot.name}: needs two operands of 1 to {MAX_NDIM} dimensions, found "
            f"{[list(shape) for shape in shapes]}"
        )
    keys = ("lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims", "rhs_batch_dims")
    lc, rc, lb, rb = (dot.ints.get(key, ()) for key in keys)
    for (lhs, rhs), side in (((lc, rc), "contracting"), ((lb, rb), "batch")):
        fits = len(lhs) == len(rhs) and all(
            0 <= i < len(shapes[0]) and 0 <= j < len(shapes[1]) and shapes[0][i] == shapes[1][j]
            for i, j in zip(lhs, rhs, strict=True)
        )
        if not fits:
            raise InputError(
                f"contraction {dot.name}: {side} dimensions {list(lhs)} and {list(rhs)} do not fit "
                f"operands {[list(shape) for shape in shapes]}"
            )
    for own in ((*lc, *lb), (*rc, *rb)):
        if len(set(own)) != len(own):
            raise InputError(f"contraction {dot.name}: a dimension is named twice in {list(own)}")
    return formula_of(((lc, rc), (lb, rb)), len(shapes[0]), len(shapes[1]))
