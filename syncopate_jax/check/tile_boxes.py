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
        # [d, boxes]: the long axis last, which is the fast one to go along.
        self.lo, self.hi = np.split(np.ascontiguousarray(known.T), 2)
        self.which = which.reshape(lo.shape[:2])
        self.asked: list[tuple[Array, Array]] = []
        self._number: dict[bytes, int] = {}
        self._met: dict[int, Array] = {}
        self._tiles: dict[int, Array] = {}
        self._volume: dict[int, int] = {}
        self._first: dict[tuple[int, bytes], tuple[Array, Array]] = {}

    def find(self, rank: Array, lo: Array, hi: Array) -> list[int]:
        """A number for each box ``lo:hi`` [boxes, d] of the tensor, seen by the tiles of a rank.

        Boxes that lie alike in the operand share a number; it is what the other methods take.
        """
        if not len(rank):
            return []
        low, high = self.frame.to_operand(rank, lo, hi)
        known, which = _distinct(np.concatenate([low, high], axis=1))
        numbers = []
        for low, high in zip(*np.split(known[..., None], 2, axis=1), strict=True):
            number = self._number.setdefault(low.tobytes() + high.tobytes(), len(self.asked))
            if number == len(self.asked):
                self.asked.append((low, high))
            numbers.append(number)
        return np.array(numbers)[which].tolist()

    def tiles(self, box: int) -> Array:
        """Linear tiles that touch a box, at any step."""
        if box not in self._tiles:
            self._tiles[box] = np.flatnonzero(self._meet(box).any(axis=1))
        return self._tiles[box]

    def first(self, box: int, k_order: Array) -> tuple[Array, Array]:
        """Those tiles, and for each the first position in ``k_order`` at which it touches it."""
        both = box, k_order.tobytes()
        if both not in self._first:
            tiles = self.tiles(box)
            self._first[both] = tiles, np.argmax(self._meet(box)[tiles][:, k_order], axis=1)
        return self._first[both]

    def missing(self, box: int, size: int) -> int:
        """Elements of a box of ``size`` elements of the tensor that no tile touches."""
        if box not in self._volume:
            low, high = self.asked[box]
            common = np.minimum(self.hi, high) - np.maximum(self.lo, low)
            self._volume[box] = int(np.prod(np.maximum(common, 0), axis=0).sum())
        return max(size - self._volume[box], 0)

    def _meet(self, box: int) -> Array:
        """Mask [tiles, steps] of those that touch a box."""
        if box not in self._met:
            low, high = self.asked[box]
            common = np.minimum(self.hi, high) > np.maximum(self.lo, low)
            self._met[box] = common.all(axis=0)[self.which]
        return self._met[box]


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
