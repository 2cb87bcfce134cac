"""Which tiles, and which of their reduction steps, touch each of many boxes of one operand.

Boxes share sets of tiles and of steps, so each distinct set is kept once: in a gathered contraction
every transfer feeds every tile, and pairs of them would be millions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from syncopate_jax.kernel.access import Access, AnyAccess, BoxAccess
from syncopate_jax.kernel.tiles import TileSpace

Array = np.ndarray
Range = tuple[Array, Array, int]
"""Per box the first and past-last index along an axis, and how many there are."""


@dataclass(frozen=True, slots=True, eq=False)
class Sets:
    """Sets of numbers as compressed rows: set i is ``items[start[i]:start[i + 1]]``, ascending."""

    start: Array
    items: Array

    @classmethod
    def of(cls, owner: Array, items: Array, count: int) -> Sets:
        """``count`` sets from items and the set of each, sorted by set and item."""
        return cls(np.searchsorted(owner, np.arange(count + 1)), items)

    @property
    def count(self) -> int:
        return len(self.start) - 1

    @property
    def owner(self) -> Array:
        """[items] the set of each item."""
        return np.repeat(np.arange(self.count), np.diff(self.start))

    def row(self, i: int) -> Array:
        """The items of set ``i``."""
        return self.items[self.start[i] : self.start[i + 1]]

    def expand(self, picks: Array) -> tuple[Array, Array]:
        """Items of the sets ``picks``: (position in ``picks``, item), in that order."""
        size = np.diff(self.start)[picks]
        owner = np.repeat(np.arange(len(picks)), size)
        entry = np.arange(len(owner)) - (np.cumsum(size) - size)[owner] + self.start[picks][owner]
        return owner, self.items[entry]


@dataclass(frozen=True, slots=True, eq=False)
class Touched:
    """Entries (box, tile set, step set): the tiles touch the box, at those steps.

    Attributes:
      box: [entries] number of the box, ascending.
      tiles: [entries] set in ``tile_sets``, of linear tiles; none is empty.
      steps: [entries] row of ``step_sets`` [sets, steps] bool.
    """

    box: Array
    tiles: Array
    steps: Array
    tile_sets: Sets
    step_sets: Array

    def pairs(self) -> tuple[Array, Array]:
        """(box, tile) for every tile that touches a box, sorted."""
        owner, tile = self.tile_sets.expand(self.tiles)
        box = self.box[owner]
        order = np.lexsort((tile, box))
        return box[order], tile[order]


def touched(access: AnyAccess, space: TileSpace, lo: Array, hi: Array) -> Touched:
    """Tiles that touch each box ``lo:hi`` [boxes, dims] of the operand, in elements.

    An operand whose dimensions follow axes is never compared box by box: a range along a dimension
    is a range of tiles along its axis.
    """
    both = np.concatenate([lo, np.maximum(hi, lo)], axis=1)
    known, which = np.unique(both, axis=0, return_inverse=True)
    low, high = np.split(known, 2, axis=1)
    if isinstance(access, Access):
        found = _along_axes(access, space, low, high)
    else:
        found = _box_by_box(access, space, low, high)
    owner, entry = Sets.of(found.box, np.arange(len(found.box)), len(known)).expand(
        which.reshape(-1)
    )
    return Touched(owner, found.tiles[entry], found.steps[entry], found.tile_sets, found.step_sets)


def join_sets(parts: Sequence[Sets]) -> Sets:
    """The sets of all parts, numbered through."""
    ends = np.cumsum(np.concatenate([[0], *(np.diff(part.start) for part in parts)]))
    return Sets(ends, np.concatenate([part.items for part in parts]))


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
        empty |= last[name] <= first[name]
    box = np.flatnonzero(~empty)
    tile_sets, tiles = _grid_sets([(first[a.name], last[a.name], a.count) for a in space.parallel])
    step_sets, steps = _grid_sets([(first[a.name], last[a.name], a.count) for a in space.reduction])
    masks = np.zeros((step_sets.count, space.num_steps), bool)
    masks[step_sets.owner, step_sets.items] = True
    zero = np.zeros(len(lo), np.int64)
    tiles, steps = (zero if found is None else found for found in (tiles, steps))
    return Touched(box, tiles[box], steps[box], tile_sets, masks)


def _grid_sets(ranges: list[Range]) -> tuple[Sets, Array | None]:
    """Distinct sets of linear grid indices of each box, and the set of each (None: all the same).

    Without axes there is the one index 0.
    """
    if not ranges:
        return Sets(np.array([0, 1]), np.zeros(1, np.int64)), None
    corners = np.stack([side for first, last, _ in ranges for side in (first, last)], axis=1)
    known, which = np.unique(corners, axis=0, return_inverse=True)
    size = np.ones(len(known), np.int64)
    for i in range(len(ranges)):
        size *= np.maximum(known[:, 2 * i + 1] - known[:, 2 * i], 0)
    owner = np.repeat(np.arange(len(known)), size)
    rest = np.arange(len(owner)) - (np.cumsum(size) - size)[owner]
    linear, stride = np.zeros(len(owner), np.int64), 1
    for i in reversed(range(len(ranges))):
        low, high = known[owner, 2 * i], known[owner, 2 * i + 1]
        rest, index = np.divmod(rest, high - low)
        linear += (index + low) * stride
        stride *= ranges[i][2]
    return Sets.of(owner, linear, len(known)), which.reshape(-1)


def _box_by_box(access: BoxAccess, space: TileSpace, lo: Array, hi: Array) -> Touched:
    low, high = access.boxes(space)
    sides = np.concatenate([low, high], axis=2).reshape(-1, 2 * low.shape[2])
    known, which = np.unique(sides, axis=0, return_inverse=True)
    which = which.reshape(low.shape[:2])
    tile_lo, tile_hi = np.split(known, 2, axis=1)
    tile_sets: dict[bytes, tuple[int, Array]] = {}
    step_sets: dict[bytes, tuple[int, Array]] = {}
    entries = []
    for box in range(len(lo)):
        meets = np.all(np.maximum(tile_lo, lo[box]) < np.minimum(tile_hi, hi[box]), axis=1)
        at = meets[which]
        tiles = np.flatnonzero(at.any(axis=1))
        masks, group = np.unique(at[tiles], axis=0, return_inverse=True)
        for i, mask in enumerate(masks):
            entries.append(
                (box, _number(tile_sets, tiles[group.reshape(-1) == i]), _number(step_sets, mask))
            )
    which_box, which_tiles, which_steps = np.array(entries, np.int64).reshape(-1, 3).T
    sets = [items for _, items in tile_sets.values()]
    ends = np.cumsum([0, *(len(items) for items in sets)])
    return Touched(
        which_box,
        which_tiles,
        which_steps,
        Sets(ends, np.concatenate([np.zeros(0, np.int64), *sets])),
        np.array([mask for _, mask in step_sets.values()], bool).reshape(-1, space.num_steps),
    )


def _number(known: dict[bytes, tuple[int, Array]], items: Array) -> int:
    """The number of a set among those seen so far."""
    return known.setdefault(items.tobytes(), (len(known), items))[0]
