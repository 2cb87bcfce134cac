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
from typing import Any

import numpy as np

from syncopate_jax.check.report import Report
from syncopate_jax.errors import InputError, PlanError, UnsupportedError
from syncopate_jax.ir.plan import Plan
from syncopate_jax.kernel.access import Access, AnyAccess
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.frame import Frame, frames
from syncopate_jax.kernel.tiles import TileSpace
from syncopate_jax.passes.tile_sets import Sets, Touched, join_sets, touched

Array = np.ndarray
NO_END = np.iinfo(np.int64).max
NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class DepGraph:
    """Relations between operations (rows of the plan's columns) and tiles.

    A tile is written ``rank * num_tiles + linear tile``. An event is a set of tiles of one rank
    that some operation waits for.

    Attributes:
      lands: [ops] whether the operation is a reduction that the epilogue of tiles adds.
      need_op, need_tiles, need_steps: tiles in that set of ``tile_sets``, on the rank that receives
        the operation's data, read it, at the steps in that row of ``step_sets``.
      tile_sets: sets of linear tiles. step_sets: [sets, steps] bool.
      addend_op, addend_tile: the tile adds the operation's landing; sorted.
      events: the tiles of each event.
      event_op, event: the operation waits for the event.
      after_op, after_dep: the operation waits for the completion of another, which does not land.
    """

    plan: Plan
    space: TileSpace
    lands: Array
    need_op: Array
    need_tiles: Array
    need_steps: Array
    tile_sets: Sets
    step_sets: Array
    addend_op: Array
    addend_tile: Array
    events: Sets
    event_op: Array
    event: Array
    after_op: Array
    after_dep: Array

    @property
    def need_rank(self) -> Array:
        """[needs] the rank whose tiles read the data."""
        return self.plan.columns.dst_rank[self.need_op].astype(np.int64)


def build_depgraph(
    plan: Plan, space: TileSpace, accesses: Mapping[str, AnyAccess], axis_map: AxisMap
) -> DepGraph:
    """The relations of ``plan`` and the tiles of ``space``, the same on every rank.

    Raises:
      UnsupportedError: the plan has collectives.
      InputError: the axis map does not fit plan and operands, or a reduction axis is empty.
      PlanError: an operation waits for a chunk that no tile produces, writes plainly into what
        tiles write, or reduces into a box that they write only in part; all such faults at once.
    """
    if plan.has_collectives():
        raise UnsupportedError(
            f"plan {plan.name}: a schedule takes transfers only; expand the plan's collectives "
            f"first (pass expand_collectives)"
        )
    empty = [axis.name for axis in space.reduction if axis.count == 0]
    if empty:
        raise InputError(
            f"plan {plan.name}: reduction axis {empty[0]} of the tile space has extent 0, so tiles "
            f"would have no step to run; compute without fusion (backend 'xla')"
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
        needs = self._needs()
        chunk_owner, chunk_tile, chunk_op = self._produced()
        after_op, after_dep = self.columns.dep_owner(), self.columns.dep_row(self.plan.num_ranks)
        after_op, after_dep = after_op[after_dep >= 0], after_dep[after_dep >= 0]
        landed = lands[after_dep]
        if self.report.findings:
            raise PlanError(self.plan.name, self.report.findings)
        # Completion of a landing is completion of the tiles that add it: more chunks to wait for.
        adding = Sets.of(addend_op, addend_tile, self.plan.num_ops)
        known, which = np.unique(after_dep[landed], return_inverse=True)
        owner, tile = adding.expand(known)
        chunks = Sets.of(chunk_owner, chunk_tile, len(chunk_op))
        events, event_op, event = _events(
            join_sets([chunks, Sets.of(owner, tile, len(known))]),
            np.concatenate([chunk_op, after_op[landed]]),
            np.concatenate([np.arange(len(chunk_op)), which + len(chunk_op)]),
            self.tiles,
        )
        return DepGraph(
            plan=self.plan,
            space=self.space,
            lands=lands,
            **needs,
            addend_op=addend_op,
            addend_tile=addend_tile,
            events=events,
            event_op=event_op,
            event=event,
            after_op=after_op[~landed],
            after_dep=after_dep[~landed],
        )

    def _touch(self, frame: Frame, rank: Array, lo: Array, hi: Array) -> Touched:
        return touched(frame.access, self.space, *frame.to_operand(rank, lo, hi))

    def _needs(self) -> dict[str, Any]:
        c = self.columns
        entries, tile_sets = [np.zeros((3, 0), np.int64)], [Sets(np.zeros(1, np.int64), NONE)]
        step_sets = [np.zeros((0, self.space.num_steps), bool)]
        for frame in self.reads:
            rows = np.flatnonzero(c.dst_tensor == frame.tensor)
            found = self._touch(frame, c.dst_rank[rows], c.dst_lo[rows], c.dst_hi[rows])
            tiles = found.tiles + sum(sets.count for sets in tile_sets)
            steps = found.steps + sum(len(sets) for sets in step_sets)
            entries.append(np.stack([rows[found.box], tiles, steps]))
            tile_sets.append(found.tile_sets)
            step_sets.append(found.step_sets)
        op, tiles, steps = np.concatenate(entries, axis=1)
        return {
            "need_op": op,
            "need_tiles": tiles,
            "need_steps": steps,
            "tile_sets": join_sets(tile_sets),
            "step_sets": np.concatenate(step_sets),
        }

    def _addends(self) -> tuple[Array, Array, Array]:
        c = self.columns
        lands = np.zeros(c.n, bool)
        parts = [np.zeros((2, 0), np.int64)]
        for frame in self.writes:
            rows = np.flatnonzero(c.dst_tensor == frame.tensor)
            found = self._touch(frame, c.dst_rank[rows], c.dst_lo[rows], c.dst_hi[rows])
            hit = np.unique(rows[found.box])
            self._refuse_writes(hit[c.reduce[hit] == 0])
            hit = hit[c.reduce[hit] > 0]
            covered = self._covered(frame, c.dst_rank[hit], c.dst_lo[hit], c.dst_hi[hit])
            self._refuse_partial(frame, hit[~covered])
            lands[hit] = True
            box, tile = found.pairs()
            op = rows[box]
            parts.append(np.stack([op, c.dst_rank[op] * self.tiles + tile])[:, c.reduce[op] > 0])
        op, tile = np.concatenate(parts, axis=1)
        order = np.lexsort((tile, op))
        return lands, op[order], tile[order]

    def _produced(self) -> tuple[Array, Array, Array]:
        """Compute dependencies: (chunk, tile) pairs and the operation that waits for each chunk."""
        c = self.columns
        sizes = np.prod((c.cdep_hi - c.cdep_lo).astype(np.int64), axis=1)
        made = sizes <= 0  # nothing to wait for
        parts = [np.zeros((2, 0), np.int64)]
        for frame in self.writes:
            deps = np.flatnonzero((c.cdep_tensor == frame.tensor) & ~made)
            box = (c.cdep_rank[deps], c.cdep_lo[deps], c.cdep_hi[deps])
            found = self._touch(frame, *box)
            made[deps] = self._covered(frame, *box)
            which, tile = found.pairs()
            dep = deps[which]
            parts.append(np.stack([dep, c.cdep_rank[dep] * self.tiles + tile]))
        self._refuse_unmade(np.flatnonzero(~made))
        chunk, tile = np.concatenate(parts, axis=1)
        order = np.lexsort((tile, chunk))
        return chunk[order], tile[order], c.cdep_owner()

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


def _events(chunks: Sets, op: Array, chunk: Array, num_tiles: int) -> tuple[Sets, Array, Array]:
    """Events, and pairs of an operation and an event, from tiles of chunks and who waits for them.

    Chunks of the same tiles are one event. An event whose tiles all belong to another event of the
    same operation is left out there. Events are numbered by rank and first tile.
    """
    keys = [chunks.row(i).tobytes() for i in range(chunks.count)]
    first = {key: i for i, key in reversed([*enumerate(keys)])}
    kept = sorted((tuple(chunks.row(i).tolist()), key) for key, i in first.items() if key)
    number = {key: i for i, (_, key) in enumerate(kept)}
    ends = np.cumsum([0, *(len(tiles) for tiles, _ in kept)])
    events = Sets(ends, np.array([tile for tiles, _ in kept for tile in tiles], np.int64))
    wanted: dict[int, set[int]] = {}
    for waiter, awaited in zip(op.tolist(), chunk.tolist(), strict=True):
        if keys[awaited]:
            wanted.setdefault(waiter, set()).add(number[keys[awaited]])
    pairs = [(one, e) for one in sorted(wanted) for e in _maximal(wanted[one], events, num_tiles)]
    event_op, event = np.array(pairs, np.int64).reshape(-1, 2).T
    return events, event_op, event


def _maximal(found: set[int], events: Sets, num_tiles: int) -> list[int]:
    """The events that are no proper part of another one in ``found``."""
    if len(found) == 1:
        return list(found)

    def inside(a: int, b: int) -> bool:
        one, other = events.row(a), events.row(b)
        return (
            one[0] // num_tiles == other[0] // num_tiles
            and len(one) < len(other)
            and bool(np.isin(one, other).all())
        )

    return [a for a in sorted(found) if not any(inside(a, b) for b in found if b != a)]
