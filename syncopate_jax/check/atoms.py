"""Atoms: the pieces of a tensor that no box of the plan cuts, the unit in which data is followed.

Every tensor is cut by a grid with a line wherever a box begins or ends. A movement between
different places carries the cuts of each side to the other, until nothing new appears; then source
and destination of every movement consist of equally many atoms of equal shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.integers import distinct, distinct_rows, expand, is_member
from syncopate_jax.errors import UnsupportedError

Array = np.ndarray

MAX_ROUNDS = 64
"""Rounds of carrying cuts after which every element is cut from the next."""
MAX_CUTS = 1 << 24
MAX_CELLS = 1 << 40
"""Atoms of all tensors; with some 2^20 ranks, locations still fit into 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Boxes of tensors: ``tensor`` [n], ``lo`` and ``hi`` [n, d]."""

    tensor: Array
    lo: Array
    hi: Array


class Grid:
    """The atoms of every tensor, numbered from 0 over all tensors, row-major within one."""

    def __init__(self, shapes: Array, boxes: Sequence[Boxes], links: Sequence[tuple[Boxes, Boxes]]):
        """Cuts tensors of ``shapes`` [tensors, d] by ``boxes`` and along ``links``, pairs of
        boxes of equal shapes between which data or values pass."""
        self.shapes = shapes
        tensors, ndim = shapes.shape
        self.stride = shapes.max(axis=0, initial=0) + 1
        self.cuts = [self._cut(d, boxes, links) for d in range(ndim)]
        ids = np.arange(tensors)
        self.base = np.zeros((tensors, ndim), np.int64)
        self.cells = np.ones((tensors, ndim), np.int64)
        for d, cuts in enumerate(self.cuts):
            self.base[:, d] = np.searchsorted(cuts, ids * self.stride[d])
            self.cells[:, d] = np.searchsorted(cuts, (ids + 1) * self.stride[d]) - self.base[:, d]
            self.cells[:, d] -= 1
        total = sum(math.prod(extents) for extents in self.cells.tolist())
        if total > MAX_CELLS:
            raise UnsupportedError(
                f"the boxes cut the tensors into {total} atoms, more than the {MAX_CELLS} that "
                "are numbered; align the boxes of different operations"
            )
        volume = np.prod(self.cells, axis=1)
        self.offset = np.cumsum(volume) - volume
        self.count = int(volume.sum())

    def _cut(self, d: int, boxes: Sequence[Boxes], links: Sequence[tuple[Boxes, Boxes]]) -> Array:
        """Sorted keys ``tensor * stride + coordinate`` of the cuts along dimension ``d``."""
        stride = self.stride[d]
        ids = np.arange(len(self.shapes)) * stride
        keys = [ids, ids + self.shapes[:, d]]
        for box in boxes:
            base = box.tensor * stride
            keys += [distinct(base + box.lo[:, d]), distinct(base + box.hi[:, d])]
        found = distinct(np.concatenate(keys))
        start, length, shift = self._shifts(d, links)
        fresh = found if len(start) else found[:0]
        for _ in range(MAX_ROUNDS):
            if not len(fresh):
                return found
            at, stop = np.searchsorted(fresh, start), np.searchsorted(fresh, start + length)
            moved = fresh[expand(at, stop)] + np.repeat(shift, stop - at)
            moved = distinct(moved)
            fresh = moved[~is_member(moved, found)]
            found = distinct(np.concatenate([found, fresh]))
        return self._cut_everywhere(d)

    def _cut_everywhere(self, d: int) -> Array:
        extents = self.shapes[:, d]
        if extents.sum() > MAX_CUTS:
            raise UnsupportedError(
                f"boxes cut dimension {d} of the tensors ever finer as they are moved to other "
                f"coordinates; {extents.sum()} elements are more than {MAX_CUTS}, the most that "
                "are told apart; align the boxes"
            )
        base = np.arange(len(extents)) * self.stride[d]
        return expand(base, base + extents + 1)

    def _shifts(self, d: int, links: Sequence[tuple[Boxes, Boxes]]) -> tuple[Array, Array, Array]:
        """Distinct intervals of keys along ``d`` and how far each carries its cuts."""
        rows = [np.zeros((0, 3), np.int64)]
        for one, other in links:
            a = one.tensor * self.stride[d] + one.lo[:, d]
            b = other.tensor * self.stride[d] + other.lo[:, d]
            length = one.hi[:, d] - one.lo[:, d]
            apart = a != b
            a, b, length = a[apart], b[apart], length[apart]
            rows += [np.stack([a, length, b - a], axis=1), np.stack([b, length, a - b], axis=1)]
        return tuple(distinct_rows(np.concatenate(rows))[0].T)

    def span(self, boxes: Boxes) -> tuple[Array, Array]:
        """[n, d] first cell of each box, and its number of cells, along each dimension."""
        first = np.empty(boxes.lo.shape, np.int64)
        last = np.empty(boxes.lo.shape, np.int64)
        for d, cuts in enumerate(self.cuts):
            key = boxes.tensor * self.stride[d]
            first[:, d] = np.searchsorted(cuts, key + boxes.lo[:, d]) - self.base[boxes.tensor, d]
            last[:, d] = np.searchsorted(cuts, key + boxes.hi[:, d]) - self.base[boxes.tensor, d]
        return first, last - first

    def volume(self, boxes: Boxes) -> int:
        """Number of atoms of all boxes together; approximate where it is beyond 2^53."""
        return int(np.prod(self.span(boxes)[1], axis=1, dtype=np.float64).sum())

    def atoms(self, boxes: Boxes) -> tuple[Array, Array]:
        """The atoms of every box, box after box in row-major order: box number, atom number."""
        first, extent = self.span(boxes)
        count = np.prod(extent, axis=1)
        total = int(count.sum())
        cells = self.cells[boxes.tensor]
        if total == len(count) and np.all(count == 1):
            owner, inner = np.arange(total), None
        else:
            owner = np.repeat(np.arange(len(count)), count)
            inner = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
        atom = np.zeros(total, np.int64)
        weight = np.ones(len(count), np.int64)
        for d in reversed(range(first.shape[1])):
            if inner is None:
                atom += first[:, d] * weight
            else:
                inner, cell = np.divmod(inner, extent[owner, d])
                atom += (first[owner, d] + cell) * weight[owner]
            weight = weight * cells[:, d]
        return owner, atom + self.offset[boxes.tensor[owner]]

    def bounds(self, atoms: Array) -> Boxes:
        """The box of each atom."""
        tensor = np.searchsorted(self.offset, atoms, side="right") - 1
        left = atoms - self.offset[tensor]
        lo = np.empty((len(atoms), len(self.cuts)), np.int64)
        hi = np.empty_like(lo)
        for d in reversed(range(len(self.cuts))):
            left, cell = np.divmod(left, self.cells[tensor, d])
            at = self.base[tensor, d] + cell
            lo[:, d] = self.cuts[d][at] - tensor * self.stride[d]
            hi[:, d] = self.cuts[d][at + 1] - tensor * self.stride[d]
        return Boxes(tensor, lo, hi)

    def hull(self, atoms: Array) -> tuple[int, Array, Array]:
        """Tensor and smallest box that holds ``atoms`` of the first atom's tensor."""
        boxes = self.bounds(atoms)
        mine = boxes.tensor == boxes.tensor[0]
        return int(boxes.tensor[0]), boxes.lo[mine].min(axis=0), boxes.hi[mine].max(axis=0)
