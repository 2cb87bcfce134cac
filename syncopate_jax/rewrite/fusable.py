"""Asking a fused backend whether it can do an operator, before it is put into a program."""

from __future__ import annotations

import math

import jax.numpy as jnp

from syncopate_jax.errors import SyncopateError
from syncopate_jax.importers.resharding import ranks_of
from syncopate_jax.importers.shardings import Derived
from syncopate_jax.ops import fused
from syncopate_jax.ops.blocked import block
from syncopate_jax.ops.derived import contraction_of
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options

Shape = tuple[int, ...]


def refusal(
    spec: Contraction,
    shapes: tuple[Shape, Shape],
    ranks: int,
    dtypes: tuple[jnp.dtype, jnp.dtype],
    axis_names: tuple[str, ...],
    options: Options,
) -> str | None:
    """Why the backend that was asked for cannot do what ``xla`` could; None if it can.

    ``shapes`` are of the local operands, ``dtypes`` of operands and result. What is built to find
    out is kept for the program.
    """
    if options.backend in ("auto", "xla"):
        return None
    if jnp.float64 in dtypes:
        return "fused operators add in float32, which would lose half of float64's digits"
    names = (str(dtypes[0]), str(dtypes[1]))
    try:
        layout = block(spec, shapes[0], shapes[1], ranks)
        fused.build(spec.kind, layout, *names, axis_names, options)
    except SyncopateError as error:
        return f"backend {options.backend} does not take it: {error}"
    return None


def refusal_of(
    derived: Derived,
    shapes: tuple[Shape, Shape],
    dtypes: tuple[jnp.dtype, jnp.dtype],
    options: Options,
) -> str | None:
    """The same for a sharded contraction of whole ``shapes``."""
    move = derived.fused
    if move is None:
        return None
    mesh, cut = dict(derived.mesh), derived.computed
    local = []
    for place, letters, shape in zip(
        ("lhs", "rhs"), (derived.lhs, derived.rhs), shapes, strict=True
    ):
        own = tuple(
            size // math.prod(mesh[axis] for axis, by in cut if by == letter)
            for letter, size in zip(letters, shape, strict=True)
        )
        local.append(move.shape if move.place == place else own)
    ranks = ranks_of(move, mesh)
    spec = contraction_of(derived)
    return refusal(spec, (local[0], local[1]), ranks, dtypes, move.axis_names, options)
