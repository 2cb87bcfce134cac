"""What the BlockSpecs of a kernel say: the block of an array at each grid point, and its faults."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl

from syncopate_jax.errors import InputError
from syncopate_jax.ir.chunk import Box

Array = np.ndarray

SUBLANES, LANES = 8, 128  # rows, and elements of a row, of a TPU's register of 32-bit values


def block_shape(spec: pl.BlockSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements of a block along each dimension of an operand of ``shape``; squeezed ones are 1.

    Raises InputError for a dimension whose blocks do not tile it, such as ``pl.Element``.
    """
    if spec.block_shape is None:
        return tuple(max(extent, 1) for extent in shape)
    return _sizes(spec.block_shape)


def kept_sizes(spec: pl.BlockSpec, shape: tuple[int, ...]) -> tuple[int | None, ...]:
    """``block_shape``, with None for the dimensions that the body does not see."""
    sizes = block_shape(spec, shape)
    given = sizes if spec.block_shape is None else spec.block_shape
    return tuple(
        None if dim is None or isinstance(dim, pl.Squeezed) else size
        for dim, size in zip(given, sizes, strict=True)
    )


def block_indices(spec: pl.BlockSpec, grid: tuple[int, ...], where: str, ndim: int = 0) -> Array:
    """Block index at every grid point: int64 [*grid, dims]; ``ndim`` dims if it has no map.

    ``where`` names kernel and array. Raises InputError for an index map that reads anything but the
    grid indices, or gives something else than integers.
    """
    if spec.index_map is None:
        return np.zeros((*grid, ndim), np.int64)
    try:
        with jax.ensure_compile_time_eval():
            index = spec.index_map(*np.indices(grid, np.int32))  # as Pallas has them
    except Exception as error:  # it is the user's function
        raise _unfit(where, f"raises {type(error).__name__}: {error}") from error
    try:
        parts = [np.broadcast_to(np.asarray(part), grid) for part in index]
        fits = all(np.issubdtype(part.dtype, np.integer) for part in parts)
    except (TypeError, ValueError, jax.errors.TracerArrayConversionError) as error:
        raise _unfit(where, f"gives {index!r}") from error
    if not fits:  # Pallas refuses fractions; cut to integers they would name other blocks
        raise _unfit(where, f"gives {index!r}")
    return np.stack(parts, axis=-1).astype(np.int64) if parts else np.zeros((*grid, 0), np.int64)


def _unfit(where: str, found: str) -> InputError:
    return InputError(
        f"{where}: an index map must be a function of the grid indices alone that gives integers "
        f"for arrays of them; this one {found}"
    )


def check_spec(where: str, spec: Any, grid: tuple[int, ...]) -> None:
    """Raises InputError unless ``spec`` is a BlockSpec with blocks and a map from this grid."""
    if not isinstance(spec, pl.BlockSpec):
        raise InputError(
            f"{where} needs a pl.BlockSpec, found {spec!r}; pl.BlockSpec() takes all of an array"
        )
    if spec.block_shape is not None:
        if not isinstance(spec.block_shape, Sequence):
            raise InputError(f"{where} needs a tuple as block shape, found {spec.block_shape!r}")
        try:
            sizes = _sizes(spec.block_shape)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        if not all(size > 0 for size in sizes):
            raise InputError(
                f"{where} needs blocks of at least 1 element, found {spec.block_shape}"
            )
    if spec.index_map is not None and not takes(spec.index_map, len(grid)):
        raise InputError(
            f"{where} has an index map that does not take the {len(grid)} indices of grid {grid}"
        )


def takes(function: Any, count: int, **named: Any) -> bool:
    """Whether ``function`` can be called with ``count`` arguments by position and ``named``."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True  # some of C's say nothing of themselves
    try:
        signature.bind(*range(count), **named)
    except TypeError:
        return False
    return True


def check_written(
    kernel: str,
    name: str,
    spec: pl.BlockSpec,
    shape: tuple[int, ...],
    grid: tuple[int, ...],
    reduction: Sequence[int],
) -> None:
    """Raises InputError unless each block of result ``name`` is written by one tile.

    Tiles run in any order and at the same time; one that walks ``reduction`` axes writes its block
    again and again.
    """
    block = block_shape(spec, shape)
    counts = [-(-extent // size) for extent, size in zip(shape, block, strict=True)]
    total = math.prod(counts)
    if not total:
        return
    steps = tuple(slice(0, 1) if a in reduction else slice(None) for a in range(len(grid)))
    tiles = block_indices(spec, grid, f"{kernel}: {name}", len(shape))[steps]
    strides = [math.prod(counts[d + 1 :]) for d in range(len(counts))]
    numbers = (tiles @ np.array(strides, np.int64)).reshape(-1)
    order = np.argsort(numbers, kind="stable")
    known = numbers[order]
    again = np.flatnonzero(known[1:] == known[:-1])
    if len(again):
        both = order[again[0] : again[0] + 2]
        points = [tuple(map(int, np.unravel_index(i, tiles.shape[:-1]))) for i in both]
        written = _covered(tiles[points[0]], 1, block, shape)
        raise InputError(
            f"kernel {kernel}: the tiles at grid points {points[0]} and {points[1]} both write "
            f"{name}{written}, and tiles run in any order; each block of a result needs one tile"
        )
    if len(known) < total:
        missing = int(np.append(np.flatnonzero(known != np.arange(len(known))), len(known))[0])
        index = np.array(np.unravel_index(missing, counts), np.int64)
        rows = 1
        if strides:  # it and those below it
            column = np.arange(missing, total, strides[0])
            there = np.isin(column, known)
            rows = int(there.argmax()) if there.any() else len(column)
        raise InputError(
            f"kernel {kernel}: {name}{_covered(index, rows, block, shape)} is written by no tile; "
            f"grid {grid} writes {len(known)} of the {total} blocks {block} of shape {shape}, "
            f"and results must be written whole"
        )


def _covered(index: Array, rows: int, block: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """The elements of the block at ``index`` and of those below it, ``rows`` in all."""
    lo = index * np.array(block, np.int64)
    hi = lo + np.array(block, np.int64) * [rows, *[1] * (len(block) - 1)][: len(block)]
    return Box(tuple(lo.tolist()), tuple(np.minimum(hi, np.array(shape, np.int64)).tolist()))


def _sizes(blocks: Sequence[Any]) -> tuple[int, ...]:
    sizes = []
    for block in blocks:
        if block is None or isinstance(block, pl.Squeezed):
            sizes.append(1)
        elif isinstance(block, int | np.integer):
            sizes.append(int(block))
        elif isinstance(block, pl.Blocked):
            sizes.append(block.block_size)
        else:
            raise InputError(
                f"block dimension {block!r} has no fixed grid of blocks; "
                f"use an integer, None or pl.Blocked"
            )
    return tuple(sizes)
