"""Verification of schedules: one in which nothing is found cannot hang, nor use data too early.

It trusts no pass: relations between tiles and operations are found again, box by box, and order
is proven from the tables alone. A wait proves order only if it is for *all* raises of its slot;
then everything that raised it has happened, and all that happened before that.

In turn: do tables fit the tile space, do raises and waits balance; does an execution on tokens
finish; has all that a tile reads or adds, and all that an operation waits for, happened before;
is each landing added once to every tile it overlaps. What the plan alone decides, such as races
between operations, is ``verify``'s to find.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from syncopate_jax.check.report import SHOWN, Report
from syncopate_jax.check.schedule_finish import finishes
from syncopate_jax.check.schedule_order import Order
from syncopate_jax.check.schedule_run import OP, Place, Run
from syncopate_jax.check.schedule_tables import Slots, check_balance, check_tables, tile_name
from syncopate_jax.check.tile_boxes import TileBoxes
from syncopate_jax.errors import Finding, PlanError, UnsupportedError
from syncopate_jax.ir.schedule import Schedule
from syncopate_jax.kernel.access import AnyAccess
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.frame import frames
from syncopate_jax.kernel.tiles import TileSpace

Array = np.ndarray


def verify_schedule(
    schedule: Schedule,
    space: TileSpace,
    accesses: Mapping[str, AnyAccess],
    axis_map: AxisMap,
) -> tuple[Finding, ...]:
    """Every fault found in ``schedule``; an empty tuple means that it is proven sound.

    Its plan must verify by itself. Faults beyond 100 of one kind are counted or left out.

    Raises:
      UnsupportedError: the plan has collectives.
      InputError: the axis map does not fit plan and operands.
    """
    plan = schedule.plan
    if plan.has_collectives():
        raise UnsupportedError(
            f"schedule of {plan.name}: its plan has collectives; a schedule takes transfers only"
        )
    report = Report(plan)
    check_tables(schedule, space, report)
    if report.findings:
        return tuple(report.findings)
    slots = Slots(schedule)
    check_balance(schedule, slots, report)
    if not finishes(schedule, slots):
        _report_stuck(schedule, Run(schedule, slots), report)
    _Relations(schedule, space, accesses, axis_map, report, Order(schedule, slots)).check()
    return tuple(report.findings)


def check_schedule(
    schedule: Schedule,
    space: TileSpace,
    accesses: Mapping[str, AnyAccess],
    axis_map: AxisMap,
) -> None:
    """Raises PlanError with every finding unless ``schedule`` verifies."""
    findings = verify_schedule(schedule, space, accesses, axis_map)
    if findings:
        raise PlanError(f"schedule of {schedule.plan.name}", findings)


def _report_stuck(schedule: Schedule, run: Run, report: Report) -> None:
    raisers: dict[int, list[str]] = {}
    wanted = {slot for place in run.stuck for slot, _ in run.missing(place)}
    done = {(place.kind, place.row) for _, place in run.trace if place.last}
    for kind, raised in enumerate(run.raises):
        for row, slots in enumerate(raised):
            for slot in wanted.intersection(slots) if (kind, row) not in done else ():
                raisers.setdefault(slot, []).append(_name(schedule, report, kind, row))
    for place in run.stuck[:SHOWN]:
        slot, count = run.missing(place)[0]
        left = raisers.get(slot, [])
        by = f"{', '.join(left[:3])}{' …' if len(left) > 3 else ''} would raise it" if left else ""
        rank, index = report.place(place.row) if place.kind == OP else (-1, -1)
        if place.kind != OP:
            rank = place.row // schedule.num_tiles
        report.add(
            "deadlock",
            rank,
            index,
            f"{_name(schedule, report, place.kind, place.row)}{_step(schedule, place)} waits for "
            f"slot {run.slots.name(slot)} to reach {count}, it stays at {run.value[slot]}; "
            f"{by or 'nothing else raises it'}",
        )
    report.more("deadlock", len(run.stuck), "places")


def _name(schedule: Schedule, report: Report, kind: int, row: int) -> str:
    return report.name(row) if kind == OP else tile_name(schedule, row)


def _step(schedule: Schedule, place: Place) -> str:
    if place.kind == OP or place.step == 0:
        return ""
    return ", epilogue," if place.step == schedule.num_steps else f", step position {place.step},"


class _Relations:
    """What must have happened before what, by the plan and the boxes of tiles."""

    def __init__(
        self,
        schedule: Schedule,
        space: TileSpace,
        accesses: Mapping[str, AnyAccess],
        axis_map: AxisMap,
        report: Report,
        order: Order,
    ):
        self.schedule, self.plan, self.report, self.order = schedule, schedule.plan, report, order
        found = frames(self.plan, axis_map, accesses)
        self.reads = [TileBoxes(frame, space) for frame in found if not frame.write]
        self.writes = [TileBoxes(frame, space) for frame in found if frame.write]
        self.tiles = schedule.num_tiles
        self.position = np.argsort(schedule.order, axis=1)

    def check(self) -> None:
        landed = self._check_addends()
        self._check_reads()
        self._check_ops(landed)
        self.order.settle(self.report, self.schedule)

    def _rows(self, rank: int, tiles: Array) -> Array:
        """Rows, by position, of linear tiles of a rank."""
        return rank * self.tiles + self.position[rank, tiles]

    def _check_reads(self) -> None:
        c = self.plan.columns
        for boxes in self.reads:
            ops = np.flatnonzero(c.dst_tensor == boxes.frame.tensor)
            found = boxes.find(c.dst_rank[ops], c.dst_lo[ops], c.dst_hi[ops])
            for op, box, rank in zip(ops.tolist(), found, c.dst_rank[ops].tolist(), strict=True):
                tiles, step = boxes.first(box, self.schedule.k_order[rank])
                self.order.tiles_after_op(self._rows(rank, tiles), step, op, "reads what")

    def _check_addends(self) -> dict[int, Array]:
        """Checks landings and who adds them; returns the tiles that must add each operation's."""
        c, schedule = self.plan.columns, self.schedule
        landed: dict[int, Array] = {}
        for boxes in self.writes:
            ops = np.flatnonzero(c.dst_tensor == boxes.frame.tensor)
            lo, hi = c.dst_lo[ops], c.dst_hi[ops]
            sizes = np.prod((hi - lo).astype(np.int64), axis=1).tolist()
            found = boxes.find(c.dst_rank[ops], lo, hi)
            for op, box, size in zip(ops.tolist(), found, sizes, strict=True):
                tiles = boxes.tiles(box)
                if len(tiles):
                    landed[op] = self._rows(int(c.dst_rank[op]), tiles)
                    self._check_landing(op, boxes.missing(box, size))
        for op in np.flatnonzero(schedule.landing >= 0).tolist():
            if op not in landed:
                self.report.add(
                    "stray-landing",
                    *self.report.place(op),
                    f"lands at {schedule.landing[op]} of rank {c.dst_rank[op]}, but no tile there "
                    f"writes {self.report.side(op, 'dst')}; let it write to its destination",
                )
        steps = schedule.num_steps
        for op, rows in landed.items():
            self.order.tiles_after_op(rows, np.full(len(rows), steps), op, "adds what")
        self._compare_addends(landed)
        return landed

    def _check_landing(self, op: int, missing: int) -> None:
        """What is wrong with an operation into what tiles write, all but ``missing`` elements."""
        c = self.plan.columns
        if c.reduce[op] and self.schedule.landing[op] >= 0 and not missing:
            return
        rank, where = int(c.dst_rank[op]), self.report.side(op, "dst")
        at = self.report.place(op)
        if c.reduce[op] == 0:
            text = f"writes {where} on rank {rank}, which tiles there write too"
            self.report.add("overwrites-tiles", *at, f"{text}; receive into another tensor")
        elif self.schedule.landing[op] < 0:
            text = f"reduces into {where} on rank {rank}, which tiles there write"
            self.report.add("no-landing", *at, f"{text}; it needs a landing that they add")
        if missing:
            text = f"reduces into {where}, of which tiles of rank {rank} leave out {missing}"
            self.report.add("lands-in-part", *at, f"{text} elements; cut it where tiles end")

    def _compare_addends(self, landed: dict[int, Array]) -> None:
        schedule = self.schedule
        ops = [op for op in landed if schedule.landing[op] >= 0]
        rows = np.concatenate([np.zeros(0, np.int64), *(landed[op] for op in ops)])
        number = np.repeat(schedule.landing[ops], [len(landed[op]) for op in ops])
        given = schedule.addends.owner, schedule.addends.values[:, 0]
        if all(map(np.array_equal, _sorted_pairs(rows, number), _sorted_pairs(*given))):
            return
        wanted: dict[int, list[int]] = {}
        for op, rows in landed.items():
            for row in rows.tolist() if schedule.landing[op] >= 0 else ():
                wanted.setdefault(row, []).append(int(schedule.landing[op]))
        start, numbers = schedule.addends.start.tolist(), given[1].tolist()
        for row in range(schedule.addends.rows):
            found, needed = sorted(numbers[start[row] : start[row + 1]]), wanted.get(row, [])
            if found != sorted(needed):
                self.report.add(
                    "wrong-addends",
                    row // self.tiles,
                    -1,
                    f"{tile_name(schedule, row)} adds landings {found}, "
                    f"needs each of {sorted(needed)} once",
                )

    def _check_ops(self, landed: dict[int, Array]) -> None:
        c, order, report = self.plan.columns, self.order, self.report
        owner, needed = c.dep_owner().tolist(), c.dep_row(self.plan.num_ranks).tolist()
        for op, dep in zip(owner, needed, strict=True):
            if dep in landed:
                if not order.starts_after(op, landed[dep]):
                    order.op_after_tiles(op, landed[dep], f"completion of {report.name(dep)}")
            elif dep >= 0:
                order.op_after_op(op, dep)
        made = {boxes.frame.tensor: boxes for boxes in self.writes}
        owners = c.cdep_owner()
        for tensor in np.unique(c.cdep_tensor).tolist():
            deps = np.flatnonzero(c.cdep_tensor == tensor)
            ranks, lo, hi = c.cdep_rank[deps], c.cdep_lo[deps], c.cdep_hi[deps]
            sizes = np.prod((hi - lo).astype(np.int64), axis=1).tolist()
            boxes = made.get(tensor)
            found = [-1] * len(deps) if boxes is None else boxes.find(ranks, lo, hi)
            for i, (op, rank) in enumerate(zip(owners[deps].tolist(), ranks.tolist(), strict=True)):
                missing = sizes[i] if boxes is None else boxes.missing(found[i], sizes[i])
                if missing:
                    chunk = f"compute(r{rank} {report.box(tensor, lo[i], hi[i])})"
                    text = f"waits for {chunk}, of which tiles there leave out {missing} elements"
                    report.add("not-produced", *report.place(op), text)
                if boxes is None:
                    continue
                rows = self._rows(rank, boxes.tiles(found[i]))
                if not order.starts_after(op, rows):
                    chunk = f"compute(r{rank} {report.box(tensor, lo[i], hi[i])})"
                    order.op_after_tiles(op, rows, chunk)


def _sorted_pairs(row: Array, number: Array) -> tuple[Array, Array]:
    order = np.lexsort((number, row))
    return row[order], number[order]
