"""Which tiles of one operand meet a box, found box by box, for checks that trust no pass."""

from __future__ import annotations

import numpy as np

from syncopate_jax.kernel.frame import Frame
from syncopate_jax.kernel.tiles import TileSpace

Array = np.ndarray


class TileBoxes:
    """The boxes that tiles touch of a bound tensor, each distinct one kept once."""

    def __init__(self, frame: Frame, space: TileSpace):
        self.frame = frame
        lo, hi = frame.access.boxes(space)
        sides = np.concatenate([lo, hi], axis=2).reshape(-1, 2 * lo.shape[2])
        known, which = _distinct(sides)
        self.lo, self.hi = np.split(known, 2, axis=1)
        self.which = which.reshape(lo.shape[:2])
        self._met: dict[bytes, Array] = {}
        self._tiles: dict[bytes, Array] = {}
        self._volume: dict[bytes, int] = {}
        self._first: dict[tuple[bytes, bytes], tuple[Array, Array]] = {}

    def tiles(self, rank: int, lo: Array, hi: Array) -> Array:
        """Linear tiles of ``rank`` that touch the box ``lo:hi`` of the tensor, at any step."""
        key = self._meet(rank, lo, hi)
        if key not in self._tiles:
            self._tiles[key] = np.flatnonzero(self._met[key].any(axis=1))
        return self._tiles[key]

    def first(self, rank: int, lo: Array, hi: Array, k_order: Array) -> tuple[Array, Array]:
        """Those tiles, and for each the first position in ``k_order`` at which it touches it."""
        key = self._meet(rank, lo, hi)
        both = key, k_order.tobytes()
        if both not in self._first:
            tiles = self.tiles(rank, lo, hi)
            self._first[both] = tiles, np.argmax(self._met[key][tiles][:, k_order], axis=1)
        return self._first[both]

    def missing(self, rank: int, lo: Array, hi: Array) -> int:
        """Elements of the box that no tile of ``rank`` touches."""
        low, high = self._box(rank, lo, hi)
        key = low.tobytes() + high.tobytes()
        if key not in self._volume:
            common = np.minimum(self.hi, high) - np.maximum(self.lo, low)
            self._volume[key] = int(np.prod(np.maximum(common, 0), axis=1).sum())
        whole = int(np.prod((hi - lo).astype(np.int64)))
        return max(whole - self._volume[key], 0)

    def _box(self, rank: int, lo: Array, hi: Array) -> tuple[Array, Array]:
        low, high = self.frame.to_operand(np.array([rank]), lo[None], hi[None])
        return low[0], high[0]

    def _meet(self, rank: int, lo: Array, hi: Array) -> bytes:
        """Key of the mask [tiles, steps] of those that touch a box."""
        low, high = self._box(rank, lo, hi)
        key = low.tobytes() + high.tobytes()
        if key not in self._met:
            common = np.minimum(self.hi, high) > np.maximum(self.lo, low)
            self._met[key] = common.all(axis=1)[self.which]
        return key


def _distinct(rows: Array) -> tuple[Array, Array]:
    """The distinct rows, and the number of each row among them."""
    number, count = np.zeros(len(rows), np.int64), 1
    for column in rows.T:
        known, which = np.unique(column, return_inverse=True)
        if count * len(known) > np.iinfo(np.int64).max:
            number = np.unique(number, return_inverse=True)[1]
            count = int(number.max(initial=0)) + 1
        number, count = number * len(known) + which, count * len(known)
    first, number = np.unique(number, return_index=True, return_inverse=True)[1:]
    return rows[first], number
