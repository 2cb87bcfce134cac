"""A contraction and its moves on one rank's arrays, and what such a product is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from syncopate_jax.backends import xla
from syncopate_jax.importers.resharding import Move
from syncopate_jax.importers.shardings import Derived
from syncopate_jax.ops.contraction import contract, exchange
from syncopate_jax.ops.gradients import product_options
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options


@dataclass(frozen=True, slots=True)
class Product:
    """What a product of whole arrays is, but for their shardings.

    Attributes:
      formula: letters, as in ``jnp.einsum``.
      options: how it is realised.
      out_dtype: of the result.
    """

    formula: str
    options: Options
    out_dtype: jnp.dtype

    def gradients(self, lhs: jnp.dtype, rhs: jnp.dtype) -> tuple[Product, Product]:
        """The products (cotangent, rhs) -> lhs and (lhs, cotangent) -> rhs, of operands' dtypes."""
        operands, out = self.formula.split("->")
        letters = operands.split(",")
        for_lhs = product_options(self.options, self.out_dtype, rhs)
        for_rhs = product_options(self.options, lhs, self.out_dtype)
        return (
            Product(f"{out},{letters[1]}->{letters[0]}", for_lhs, lhs),
            Product(f"{letters[0]},{out}->{letters[1]}", for_rhs, rhs),
        )


def run(
    derived: Derived,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    options: Options,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """A sharded contraction on one rank's arrays, where its mesh axes are bound."""
    arrays = {"lhs": lhs, "rhs": rhs}
    for move in derived.before:
        if move is not derived.fused:
            arrays[move.place] = _move(arrays[move.place], move, derived)
    fused = derived.fused
    axis_names = fused.axis_names if fused else ()
    spec = contraction_of(derived)
    out = contract(spec, arrays["lhs"], arrays["rhs"], axis_names, options, out_dtype)
    for move in derived.after:
        if move is not fused:
            out = _move(out, move, derived)
    return out


def contraction_of(derived: Derived) -> Contraction:
    """The product with the move that is fused with it."""
    spec = Contraction(derived.lhs, derived.rhs, derived.out)
    if derived.fused is None:
        return spec
    kind, place = derived.fused.kind, derived.fused.place
    gather, scatter = derived.fused.gather, derived.fused.scatter
    return replace(spec, kind=kind, place=place, gather=gather, scatter=scatter)


def _move(x: jax.Array, move: Move, derived: Derived) -> jax.Array:
    """A move on its own."""
    letters = derived.letters(move.place)
    gather = letters.index(move.gather) if move.gather else -1
    scatter = letters.index(move.scatter) if move.scatter else -1
    if move.kind == "slice":
        size = x.shape[scatter] // lax.axis_size(move.axis_names)
        at = lax.axis_index(move.axis_names) * size
        return lax.dynamic_slice_in_dim(x, at, size, axis=scatter)
    return exchange(x, xla.Exchange(move.kind, gather, scatter), move.axis_names)
