"""Which tiles, and which of their reduction steps, touch each of many boxes of one operand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncopate_jax.kernel.access import Access, AnyAccess
from syncopate_jax.kernel.tiles import TileSpace

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Touched:
    """Pairs of a box and a tile that touches it.

    Attributes:
      box: [pairs] number of the box, ascending.
      tile: [pairs] linear tile, ascending for one box.
      steps: [pairs] row of ``step_sets``.
      step_sets: [sets, steps] bool: the reduction steps at which it does.
    """

    box: Array
    tile: Array
    steps: Array
    step_sets: Array


def touched(access: AnyAccess, space: TileSpace, lo: Array, hi: Array) -> Touched:
    """Tiles that touch each box ``lo:hi`` [boxes, dims] of the operand, in elements.

    Boxes that repeat are looked up once. An operand whose dimensions follow axes is never compared
    box by box: a range along a dimension is a range of tiles along its axis.
    """
    if not len(lo):
        none = np.zeros(0, np.int64)
        return Touched(none, none, none, np.zeros((0, space.num_steps), bool))
    both = np.concatenate([lo, np.maximum(hi, lo)], axis=1)
    known, which = np.unique(both, axis=0, return_inverse=True)
    low, high = np.split(known, 2, axis=1)
    find = _along_axes if isinstance(access, Access) else _box_by_box
    found = find(access, space, low, high)
    return _repeated(found, which.reshape(-1), len(known))


def expand(start: Array, picks: Array) -> tuple[Array, Array]:
    """Entries of compressed rows ``picks``: (position in ``picks``, entry), in that order."""
    size = np.diff(start)[picks]
    owner = np.repeat(np.arange(len(picks)), size)
    first = np.cumsum(size) - size
    return owner, np.arange(len(owner)) - first[owner] + start[picks][owner]


def _repeated(found: Touched, which: Array, count: int) -> Touched:
    """The pairs of unique boxes given again for each box; ``which``: its unique box."""
    start = np.searchsorted(found.box, np.arange(count + 1))
    owner, entry = expand(start, which)
    return Touched(owner, found.tile[entry], found.steps[entry], found.step_sets)


def _along_axes(access: Access, space: TileSpace, lo: Array, hi: Array) -> Touched:
    first = {axis.name: np.zeros(len(lo), np.int64) for axis in space.axes}
    last = {axis.name: np.full(len(lo), axis.count, np.int64) for axis in space.axes}
    empty = np.any(hi <= lo, axis=1)
    for d, name in enumerate(access.dims):
        if name is not None:
            tile = space.axis(name).tile
            first[name] = np.maximum(first[name], lo[:, d] // tile)
            last[name] = np.minimum(last[name], -(-hi[:, d] // tile))
    for name in last:
        last[name][empty] = 0
    box, tile = _grid([(first[a.name], last[a.name], a.count) for a in space.parallel], len(lo))
    ranges = [(first[a.name], last[a.name], a.count) for a in space.reduction]
    sets, steps = _step_ranges(ranges, len(lo), space.num_steps)
    some = sets.any(axis=1)[steps[box]]
    return Touched(box[some], tile[some], steps[box][some], sets)


def _step_ranges(
    ranges: list[tuple[Array, Array, int]], count: int, num_steps: int
) -> tuple[Array, Array]:
    """The distinct step sets of boxes, and the set of each box."""
    if not ranges:
        return np.ones((1, num_steps), bool), np.zeros(count, np.int64)
    corners = np.stack([side for first, last, _ in ranges for side in (first, last)], axis=1)
    known, which = np.unique(corners, axis=0, return_inverse=True)
    cut = [(known[:, 2 * i], known[:, 2 * i + 1], n) for i, (_, _, n) in enumerate(ranges)]
    owner, step = _grid(cut, len(known))
    sets = np.zeros((len(known), num_steps), bool)
    sets[owner, step] = True
    return sets, which.reshape(-1)


def _grid(ranges: list[tuple[Array, Array, int]], boxes: int) -> tuple[Array, Array]:
    """(box, linear index) of every grid point whose index along each axis lies in its range."""
    extents = [np.maximum(last - first, 0) for first, last, _ in ranges]
    size = np.ones(boxes, np.int64)
    for extent in extents:
        size *= extent
    owner = np.repeat(np.arange(boxes), size)
    rest = np.arange(len(owner)) - (np.cumsum(size) - size)[owner]
    linear, stride = np.zeros(len(owner), np.int64), 1
    for (first, _, count), extent in zip(reversed(ranges), reversed(extents), strict=True):
        rest, index = np.divmod(rest, extent[owner])
        linear += (index + first[owner]) * stride
        stride *= count
    return owner, linear


def _box_by_box(access: AnyAccess, space: TileSpace, lo: Array, hi: Array) -> Touched:
    low, high = access.boxes(space)
    sides = np.concatenate([low, high], axis=2).reshape(-1, 2 * low.shape[2])
    known, which = np.unique(sides, axis=0, return_inverse=True)
    which = which.reshape(low.shape[:2])
    tile_lo, tile_hi = np.split(known, 2, axis=1)
    numbers: dict[bytes, int] = {}
    rows, pairs = [], []
    for box in range(len(lo)):
        meets = np.all(np.maximum(tile_lo, lo[box]) < np.minimum(tile_hi, hi[box]), axis=1)
        at = meets[which]
        tiles = np.flatnonzero(at.any(axis=1))
        masks, inverse = np.unique(at[tiles], axis=0, return_inverse=True)
        ids = []
        for mask in masks:
            if mask.tobytes() not in numbers:
                numbers[mask.tobytes()] = len(rows)
                rows.append(mask)
            ids.append(numbers[mask.tobytes()])
        steps = np.array(ids, np.int64)[inverse.reshape(-1)]
        pairs.append(np.stack([np.full(len(tiles), box), tiles, steps]))
    joined = np.concatenate(pairs, axis=1).astype(np.int64)
    sets = np.array(rows, bool).reshape(-1, space.num_steps)
    return Touched(joined[0], joined[1], joined[2], sets)
