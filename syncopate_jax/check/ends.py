"""What ranks begin and end with: whether two plans agree on it, and where boxes leave a gap.

Both are seen element by element, on the atoms of what is compared, so that it does not matter into
how many regions or goals a plan cuts the same data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.atoms import Boxes, Grid
from syncopate_jax.check.bounds import padded_shapes
from syncopate_jax.check.flow import MAX_ATOMS
from syncopate_jax.check.integers import distinct, distinct_rows
from syncopate_jax.check.regions import Goals, Regions, check_regions, goal_arrays, region_arrays
from syncopate_jax.check.report import Report
from syncopate_jax.errors import PlanError, UnsupportedError
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.comm import REDUCTIONS
from syncopate_jax.ir.plan import Plan

Array = np.ndarray


def difference(plan: Plan, usual: Plan, needs: str) -> str:
    """How ``plan`` begins or ends otherwise than ``usual``, in words; empty where it does not.

    Tensors are told apart by their places, as plans may call them differently.

    Args:
      needs: who needs what ``usual`` does, such as ``this all_gather needs``.

    Raises:
      PlanError: initial data or goals of ``plan`` make no sense by themselves.
      UnsupportedError: boxes cut each other into too many pieces.
    """
    if plan.num_ranks != usual.num_ranks:
        return f"its number of ranks is {plan.num_ranks}, {needs} {usual.num_ranks}"
    report = Report(plan)
    check_regions(plan, report)
    if report.findings:
        raise PlanError(plan.name, report.findings)
    return _Pair(plan, usual).difference(needs)


def first_gap(
    shape: tuple[int, ...],
    boxes: Iterable[tuple[int, Box]],
    lo: Array,
    hi: Array,
) -> tuple[int, Box] | None:
    """A rank and a box of its ``lo[rank]:hi[rank]`` that no (rank, box) covers; None if all is.

    Args:
      shape: of the tensor, in which all boxes lie.
      boxes: may overlap.
      lo, hi: [ranks, dims].

    Raises UnsupportedError when the boxes cut each other into too many pieces.
    """
    kept = [(rank, box) for rank, box in boxes if box.size]
    rank = np.array([r for r, _ in kept], np.int64)
    low = np.maximum(np.array([b.lo for _, b in kept]).reshape(-1, len(shape)), lo[rank])
    high = np.minimum(np.array([b.hi for _, b in kept]).reshape(-1, len(shape)), hi[rank])
    inside = np.all(low < high, axis=1)
    rank, low, high = rank[inside], low[inside], high[inside]
    wanted = np.flatnonzero(np.all(lo < hi, axis=1))
    found = Boxes(np.zeros(len(rank), np.int64), low, high)
    frames = Boxes(np.zeros(len(wanted), np.int64), lo[wanted], hi[wanted])
    grid = _grid(np.array([shape], np.int64).reshape(1, -1), (found, frames), ())
    owner, atom = grid.atoms(found)
    held = distinct(rank[owner] * grid.count + atom)
    count = np.bincount(held // max(grid.count, 1), minlength=len(lo))
    first, extent = grid.span(frames)
    lacking = np.flatnonzero(np.prod(extent, axis=1) > count[wanted])
    if not len(lacking):
        return None
    i = lacking[0]
    mine = held[held // grid.count == wanted[i]] % grid.count
    # Of the atoms in row-major order one of the first that many, and one more, is not held.
    cell = np.unravel_index(np.arange(len(mine) + 1), extent[i])
    at = np.ravel_multi_index(tuple(first[i][:, None] + np.array(cell)), tuple(grid.cells[0]))
    gap = grid.bounds(np.setdiff1d(at, mine)[:1])
    return int(wanted[i]), Box(tuple(gap.lo[0].tolist()), tuple(gap.hi[0].tolist()))


def _grid(shapes: Array, boxes: Sequence[Boxes], links: Sequence[tuple[Boxes, Boxes]]) -> Grid:
    grid = Grid(shapes, boxes, links)
    total = sum(map(grid.volume, boxes))
    if total > MAX_ATOMS:
        raise UnsupportedError(
            f"initial data and goals cut each other into {total} pieces, more than the {MAX_ATOMS} "
            f"that are compared; align their boxes"
        )
    return grid


@dataclass(frozen=True, slots=True, eq=False)
class _Ends:
    """Initial regions and goals of one plan, as boxes of a grid."""

    regions: Regions
    goals: Goals
    held: Boxes
    wanted: Boxes
    source: Boxes

    @classmethod
    def of(cls, plan: Plan, ndim: int) -> _Ends:
        r, g = region_arrays(plan, ndim), goal_arrays(plan, ndim)
        return cls(
            r,
            g,
            Boxes(r.tensor, r.lo, r.hi),
            Boxes(g.tensor, g.lo, g.hi),
            Boxes(g.source, g.source_lo, g.source_hi),
        )

    def starts(self, grid: Grid) -> Array:
        """[n, 3] rank, atom, and whether tiles produce it."""
        owner, atom = grid.atoms(self.held)
        return np.stack([self.regions.rank[owner], atom, self.regions.produced[owner]], axis=1)

    def goals_of(self, grid: Grid, numbers: dict[tuple[int, ...], int]) -> Array:
        """[n, 5] rank, atom, the atom it must equal, the set of ranks in ``numbers``, reduction."""
        owner, atom = grid.atoms(self.wanted)
        sets = [numbers.setdefault(tuple(sorted(r)), len(numbers)) for r in self.goals.contributors]
        over = np.array(sets, np.int64)[self.goals.ranks[owner]]
        reduce = self.goals.reduce[owner]
        source = grid.atoms(self.source)[1]
        return np.stack([self.goals.rank[owner], atom, source, over, reduce], axis=1)


class _Pair:
    """Two plans of as many ranks, cut along the same lines."""

    def __init__(self, plan: Plan, usual: Plan):
        self.plan, self.usual = plan, usual
        ndim = max(len(t.shape) for one in (plan, usual) for t in one.tensors)
        shapes = np.zeros((max(len(plan.tensors), len(usual.tensors)), ndim), np.int64)
        self.ends = [_Ends.of(one, ndim) for one in (plan, usual)]
        for one in (plan, usual):
            own = shapes[: len(one.tensors)]
            np.maximum(own, padded_shapes(one, ndim), out=own)
        boxes = [box for e in self.ends for box in (e.held, e.wanted, e.source)]
        self.grid = _grid(shapes, boxes, [(e.wanted, e.source) for e in self.ends])
        self.numbers: dict[tuple[int, ...], int] = {}

    def difference(self, needs: str) -> str:
        mine, other = (ends.starts(self.grid) for ends in self.ends)
        if words := self._starts(*_apart(mine, other), needs):
            return words
        mine, other = (ends.goals_of(self.grid, self.numbers) for ends in self.ends)
        return self._goals(*_apart(mine, other), needs)

    def _starts(self, extra: Array, missing: Array, needs: str) -> str:
        if not len(extra) and not len(missing):
            return ""
        if not len(missing):
            where = self._hull(extra, self.plan)
            return f"rank {extra[0, 0]} begins with {where}, {needs} none there"
        (rank, _, produced), where = missing[0], self._hull(missing, self.usual)
        if not (extra[:, :2] == missing[0, :2]).all(axis=1).any():
            return f"rank {rank} begins without {where}, {needs} it there"
        if produced:
            return f"rank {rank} is given {where}, {needs} its tiles to produce it"
        return f"tiles of rank {rank} produce {where}, {needs} it to be there at the start"

    def _goals(self, extra: Array, missing: Array, needs: str) -> str:
        if not len(extra) and not len(missing):
            return ""
        if not len(missing):
            where = self._hull(extra, self.plan)
            return f"rank {extra[0, 0]} ends with {where}, {needs} none there"
        rank, where = missing[0, 0], self._hull(missing, self.usual)
        found = extra[(extra[:, :2] == missing[0, :2]).all(axis=1)]
        if not len(found):
            return f"rank {rank} ends without {where}, {needs} it there"
        got, wanted = self._value(found[0], self.plan), self._value(missing[0], self.usual)
        return f"rank {rank} has {got} in {self._box(missing[0, 1], self.usual)}, {needs} {wanted}"

    def _value(self, row: Array, plan: Plan) -> str:
        """What a goal's atom must equal."""
        _, _, source, over, reduce = row.tolist()
        ranks = list(self.numbers)[over]
        box = self._box(source, plan)
        return f"the {REDUCTIONS[reduce]} of {box} over ranks {ranks}" if ranks else box

    def _box(self, atom: int, plan: Plan) -> str:
        box = self.grid.bounds(np.array([atom]))
        return Report(plan).box(int(box.tensor[0]), box.lo[0], box.hi[0])

    def _hull(self, rows: Array, plan: Plan) -> str:
        """Around what of the first row's rank and tensor is in ``rows``; its first box if less."""
        atoms = distinct(rows[rows[:, 0] == rows[0, 0], 1])
        tensor, lo, hi = self.grid.hull(atoms)
        count = np.count_nonzero(self.grid.bounds(atoms).tensor == tensor)
        if self.grid.volume(Boxes(np.array([tensor]), lo[None], hi[None])) == count:
            return Report(plan).box(tensor, lo, hi)
        return self._box(int(atoms[0]), plan)


def _apart(mine: Array, other: Array) -> tuple[Array, Array]:
    """The distinct rows of the first matrix that are not in the second, and the other way round."""
    known, place = distinct_rows(np.concatenate([mine, other]))
    has = np.zeros((2, len(known)), bool)
    has[0, place[: len(mine)]] = True
    has[1, place[len(mine) :]] = True
    return known[has[0] & ~has[1]], known[has[1] & ~has[0]]
