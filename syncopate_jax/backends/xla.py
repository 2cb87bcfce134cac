"""Backend ``xla``: JAX's own collectives beside the local kernel; reference and fallback."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax

from syncopate_jax.errors import InputError


@dataclass(frozen=True, slots=True)
class Exchange:
    """What communication does to one array, whichever plan does it.

    Attributes:
      kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``none``.
      gather: the dimension that grows by the number of ranks, -1 if none does.
      scatter: the dimension that shrinks by it, -1 if none does.
    """

    kind: str
    gather: int = -1
    scatter: int = -1


def exchange(x: jax.Array, what: Exchange, axis_names: tuple[str, ...]) -> jax.Array:
    """``x`` after the exchange over ``axis_names``; reductions are sums, in ``x``'s dtype."""
    if what.kind == "all_gather":
        return lax.all_gather(x, axis_names, axis=what.gather, tiled=True)
    if what.kind == "reduce_scatter":
        return lax.psum_scatter(x, axis_names, scatter_dimension=what.scatter, tiled=True)
    if what.kind == "all_reduce":
        return lax.psum(x, axis_names)
    if what.kind == "all_to_all":
        return lax.all_to_all(
            x, axis_names, split_axis=what.scatter, concat_axis=what.gather, tiled=True
        )
    if what.kind == "none":
        return x
    raise InputError(f"exchange: {what.kind!r} is no kind of exchange")
