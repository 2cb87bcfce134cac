"""How many stages of a Triton product's loads a Hopper block's shared memory holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp

SHARED_BYTES = 220 * 1024  # of the 227 KiB of a Hopper block
FLAT = 3
"""Stages of a flat loop, as timed on an H200; as many as the widest tiles leave room for."""
MOST = 4


def fitting(
    block: tuple[int, int, int], dtype: jax.typing.DTypeLike, out_dtype: jax.typing.DTypeLike
) -> tuple[int, bool]:
    """Stages, and whether the loop over tiles is flat, of tiles of ``block`` rows, columns, depth.

    A flat loop stores a tile, by shared memory, while operands of the next one arrive; it is one
    where ``FLAT`` stages have room beside that. Else the store has the stages' room, up to ``MOST``
    of them.
    """
    rows, columns, depth = block
    stage = (rows + columns) * depth * jnp.dtype(dtype).itemsize
    store = rows * columns * jnp.dtype(out_dtype).itemsize
    if FLAT * stage + store <= SHARED_BYTES:
        return FLAT, True
    return max(2, min(MOST, SHARED_BYTES // stage)), False
