"""Pass: from boxes to relations, which tile needs which operation and the other way round.

::

    plan         rank 1 pushes x[4:8,0:8] to rank 0        after compute(r1 y[0:4,0:8])
    accesses     tile 2 reads x rows 4:6                    tiles 0, 1 write y rows 0:2, 2:4
    graph        tile (r0, 2) needs that operation          it needs the event {(r1, 0), (r1, 1)}

A reduction into what tiles of its destination write does not touch their buffer: its data lands
beside it, and the epilogue of each tile adds it. It has completed once those tiles have, so an
operation that depends on it waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.report import Report
from syncopate_jax.errors import PlanError, UnsupportedError
from syncopate_jax.ir.plan import Plan
from syncopate_jax.kernel.access import Access, AnyAccess
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.frame import Frame, frames
from syncopate_jax.kernel.tiles import TileSpace
from syncopate_jax.passes.tile_sets import Touched, expand, touched

Array = np.ndarray
NO_END = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class DepGraph:
    """Relations between operations (rows of the plan's columns) and tiles.

    A tile is written ``rank * num_tiles + linear tile``. An event is a set of tiles of one rank
    that some operation waits for.

    Attributes:
      lands: [ops] whether the operation is a reduction that the epilogue of tiles adds.
      need_op, need_tile, need_steps: the tile reads what the operation writes, at the steps in
        that row of ``step_sets``.
      step_sets: [sets, steps] bool.
      addend_op, addend_tile: the tile adds the operation's landing.
      event_start, event_tile: tiles of each event, as compressed rows.
      event_op, event: the operation waits for the event.
      after_op, after_dep: the operation waits for the completion of another, which does not land.
    """

    plan: Plan
    space: TileSpace
    lands: Array
    need_op: Array
    need_tile: Array
    need_steps: Array
    step_sets: Array
    addend_op: Array
    addend_tile: Array
    event_start: Array
    event_tile: Array
    event_op: Array
    event: Array
    after_op: Array
    after_dep: Array

    @property
    def num_events(self) -> int:
        return len(self.event_start) - 1


def build_depgraph(
    plan: Plan, space: TileSpace, accesses: Mapping[str, AnyAccess], axis_map: AxisMap
) -> DepGraph:
    """The relations of ``plan`` and the tiles of ``space``, the same on every rank.

    Raises:
      UnsupportedError: the plan has collectives.
      InputError: the axis map does not fit plan and operands.
      PlanError: an operation waits for a chunk that no tile produces, writes plainly into what
        tiles write, or reduces into a box that they write only in part; all such faults at once.
    """
    if plan.has_collectives():
        raise UnsupportedError(
            f"plan {plan.name}: a schedule takes transfers only; expand the plan's collectives "
            f"first (pass expand_collectives)"
        )
    return _Builder(plan, space, frames(plan, axis_map, accesses)).build()


class _Builder:
    def __init__(self, plan: Plan, space: TileSpace, found: tuple[Frame, ...]):
        self.plan, self.space, self.columns = plan, space, plan.columns
        self.tiles = space.num_tiles
        self.reads = [frame for frame in found if not frame.write]
        self.writes = [frame for frame in found if frame.write]
        self.report = Report(plan)

    def build(self) -> DepGraph:
        lands, addend_op, addend_tile = self._addends()
        need_op, need_tile, need_steps, step_sets = self._needs()
        chunk_owner, chunk_rank, chunk_tile, chunk_op = self._produced()
        after_op, after_dep = self.columns.dep_owner(), self.columns.dep_row(self.plan.num_ranks)
        after_op, after_dep = after_op[after_dep >= 0], after_dep[after_dep >= 0]
        landed = lands[after_dep]
        if self.report.findings:
            raise PlanError(self.plan.name, self.report.findings)
        # Completion of a landing is completion of the tiles that add it: more chunks to wait for.
        waits_op, waits_dep = after_op[landed], after_dep[landed]
        starts = np.searchsorted(addend_op, np.arange(self.plan.num_ops + 1))
        owner, entry = expand(starts, waits_dep)
        chunk = np.concatenate([chunk_owner, owner + len(chunk_op)])
        tile = np.concatenate([chunk_rank * self.tiles + chunk_tile, addend_tile[entry]])
        event_start, event_tile, event_op, event = _events(
            chunk, tile, np.concatenate([chunk_op, waits_op]), self.tiles
        )
        return DepGraph(
            plan=self.plan,
            space=self.space,
            lands=lands,
            need_op=need_op,
            need_tile=need_tile,
            need_steps=need_steps,
            step_sets=step_sets,
            addend_op=addend_op,
            addend_tile=addend_tile,
            event_start=event_start,
            event_tile=event_tile,
            event_op=event_op,
            event=event,
            after_op=after_op[~landed],
            after_dep=after_dep[~landed],
        )

    def _touch(self, frame: Frame, rank: Array, lo: Array, hi: Array) -> Touched:
        return touched(frame.access, self.space, *frame.to_operand(rank, lo, hi))

    def _needs(self) -> tuple[Array, Array, Array, Array]:
        c, parts, sets = self.columns, [], [np.zeros((0, self.space.num_steps), bool)]
        for frame in self.reads:
            rows = np.flatnonzero(c.dst_tensor == frame.tensor)
            found = self._touch(frame, c.dst_rank[rows], c.dst_lo[rows], c.dst_hi[rows])
            op = rows[found.box]
            tile = c.dst_rank[op] * self.tiles + found.tile
            parts.append(np.stack([op, tile, found.steps + sum(map(len, sets))]))
            sets.append(found.step_sets)
        joined = np.concatenate([np.zeros((3, 0), np.int64), *parts], axis=1).astype(np.int64)
        return joined[0], joined[1], joined[2], np.concatenate(sets)

    def _addends(self) -> tuple[Array, Array, Array]:
        c = self.columns
        lands = np.zeros(c.n, bool)
        parts = []
        for frame in self.writes:
            rows = np.flatnonzero(c.dst_tensor == frame.tensor)
            found = self._touch(frame, c.dst_rank[rows], c.dst_lo[rows], c.dst_hi[rows])
            op = rows[found.box]
            hit = np.unique(op)
            self._refuse_writes(hit[c.reduce[hit] == 0])
            hit = hit[c.reduce[hit] > 0]
            covered = self._covered(frame, c.dst_rank[hit], c.dst_lo[hit], c.dst_hi[hit])
            self._refuse_partial(frame, hit[~covered])
            lands[hit] = True
            adds = c.reduce[op] > 0
            tile = c.dst_rank[op] * self.tiles + found.tile
            parts.append(np.stack([op[adds], tile[adds]]))
        joined = np.concatenate([np.zeros((2, 0), np.int64), *parts], axis=1).astype(np.int64)
        order = np.lexsort(joined[::-1])
        return lands, joined[0, order], joined[1, order]

    def _produced(self) -> tuple[Array, Array, Array, Array]:
        """Compute dependencies: (chunk, rank, tile) triples and the operation of each chunk."""
        c = self.columns
        owners, sizes = c.cdep_owner(), np.prod((c.cdep_hi - c.cdep_lo).astype(np.int64), axis=1)
        made = sizes <= 0  # nothing to wait for
        parts = []
        for frame in self.writes:
            deps = np.flatnonzero((c.cdep_tensor == frame.tensor) & ~made)
            box = (c.cdep_rank[deps], c.cdep_lo[deps], c.cdep_hi[deps])
            found = self._touch(frame, *box)
            made[deps] = self._covered(frame, *box)
            dep = deps[found.box]
            parts.append(np.stack([dep, c.cdep_rank[dep], found.tile]))
        self._refuse_unmade(np.flatnonzero(~made))
        joined = np.concatenate([np.zeros((3, 0), np.int64), *parts], axis=1).astype(np.int64)
        return joined[0], joined[1], joined[2], owners

    def _covered(self, frame: Frame, rank: Array, lo: Array, hi: Array) -> Array:
        """Whether the tiles of each rank write all of each box."""
        low, high = frame.to_operand(rank, lo, hi)
        kept = np.prod(np.maximum(high - low, 0), axis=1)
        whole = np.prod((hi - lo).astype(np.int64), axis=1)
        return (kept == whole) & (self._written(frame, low, high) == whole)

    def _written(self, frame: Frame, lo: Array, hi: Array) -> Array:
        """Elements of each operand box that some tile writes; tiles do not overlap."""
        if isinstance(frame.access, Access):
            ends = [NO_END if d is None else self.space.axis(d).extent for d in frame.access.dims]
            return np.prod(np.maximum(np.minimum(hi, ends) - lo, 0), axis=1)
        low, high = frame.access.boxes(self.space)
        sides = np.concatenate([low, high], axis=2).reshape(-1, 2 * lo.shape[1])
        tile_lo, tile_hi = np.split(np.unique(sides, axis=0), 2, axis=1)
        boxes, which = np.unique(np.concatenate([lo, hi], axis=1), axis=0, return_inverse=True)
        count = np.zeros(len(boxes), np.int64)
        for i, box in enumerate(boxes):
            a, b = np.split(box, 2)
            common = np.maximum(np.minimum(tile_hi, b) - np.maximum(tile_lo, a), 0)
            count[i] = np.prod(common, axis=1).sum()
        return count[which.reshape(-1)]

    def _refuse_writes(self, rows: Array) -> None:
        c = self.columns
        self.report.rows(
            "overwrites-tiles",
            rows,
            lambda row: (
                f"writes {self.report.side(row, 'dst')} on rank {c.dst_rank[row]}, which tiles "
                f"there write too; reduce into it, or receive into another tensor"
            ),
        )

    def _refuse_partial(self, frame: Frame, rows: Array) -> None:
        c = self.columns

        def text(row: int) -> str:
            rank = int(c.dst_rank[row])
            held = self.report.box(frame.tensor, frame.lo[rank], frame.hi[rank])
            return (
                f"reduces into {self.report.side(row, 'dst')} on rank {rank}, whose tiles write "
                f"only part of it (they produce {held}); cut the chunk where tiles end"
            )

        self.report.rows("lands-in-part", rows, text)

    def _refuse_unmade(self, deps: Array) -> None:
        c, owner = self.columns, self.columns.cdep_owner()
        for dep in deps.tolist():
            chunk = self.report.box(int(c.cdep_tensor[dep]), c.cdep_lo[dep], c.cdep_hi[dep])
            rank, index = self.report.place(int(owner[dep]))
            held = [
                self.report.box(f.tensor, f.lo[c.cdep_rank[dep]], f.hi[c.cdep_rank[dep]])
                for f in self.writes
                if f.tensor == c.cdep_tensor[dep]
            ]
            made = f"they produce {held[0]}" if held else "the axis map binds it to no result"
            self.report.add(
                "not-produced",
                rank,
                index,
                f"waits for compute(r{c.cdep_rank[dep]} {chunk}), which tiles there do not write "
                f"in full; {made}",
            )


def _events(
    chunk: Array, tile: Array, chunk_op: Array, num_tiles: int
) -> tuple[Array, Array, Array, Array]:
    """Events from (chunk, tile) pairs: chunks of the same tiles are one event.

    An event whose tiles all belong to another event of the same operation is left out there.
    Events are numbered by rank and first tile. ``chunk_op``: the operation that waits for a chunk.
    """
    order = np.lexsort((tile, chunk))
    chunk, tile = chunk[order], tile[order]
    start = np.searchsorted(chunk, np.arange(len(chunk_op) + 1))
    sets: dict[bytes, list[int]] = {}
    keys = []
    for a, b in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
        key = tile[a:b].tobytes()
        sets.setdefault(key, [a, b])
        keys.append(key)
    kept = sorted((tuple(tile[a:b].tolist()), key) for key, (a, b) in sets.items() if b > a)
    number = {key: i for i, (_, key) in enumerate(kept)}
    events = [np.array(tiles, np.int64) for tiles, _ in kept]
    wanted: dict[int, set[int]] = {}
    for op, key in zip(chunk_op.tolist(), keys, strict=True):
        if key in number:
            wanted.setdefault(op, set()).add(number[key])
    pairs = [(op, e) for op in sorted(wanted) for e in _maximal(wanted[op], events, num_tiles)]
    ends = np.cumsum([0, *(len(tiles) for tiles in events)])
    op, event = np.array(pairs, np.int64).reshape(-1, 2).T
    return ends, np.concatenate([np.zeros(0, np.int64), *events]), op, event


def _maximal(found: set[int], events: list[Array], num_tiles: int) -> list[int]:
    """The events that are no proper part of another one in ``found``."""
    if len(found) == 1:
        return list(found)

    def inside(a: int, b: int) -> bool:
        one, other = events[a], events[b]
        return (
            one[0] // num_tiles == other[0] // num_tiles
            and len(one) < len(other)
            and bool(np.isin(one, other).all())
        )

    return [a for a in sorted(found) if not any(inside(a, b) for b in found if b != a)]
