"""First look at a schedule: do its tables fit the tile space, and do waits and raises balance?

A raise that nobody waits for is a fault too: it changes no result, but the counter is left over at
the end of a launch, and whoever made the schedule meant somebody to hear it.
"""

from __future__ import annotations

import numpy as np

from syncopate_jax.check.report import SHOWN, Report
from syncopate_jax.ir.schedule import Rows, Schedule
from syncopate_jax.kernel.tiles import TileSpace

Array = np.ndarray


class Slots:
    """Raises of every slot, slots numbered through all ranks.

    Attributes:
      first: [ranks + 1] number of each rank's first slot.
      raises: [slots] times each is raised in a launch.
    """

    def __init__(self, schedule: Schedule):
        self.first = np.concatenate([[0], np.cumsum(schedule.num_slots, dtype=np.int64)])
        self.raises = np.zeros(self.first[-1], np.int64)
        for rows in (schedule.signals, schedule.op_signals):
            rank, slot = rows.values.T
            np.add.at(self.raises, self.first[rank] + slot, 1)

    def name(self, slot: int) -> str:
        """A slot as ``r<rank>:<slot>``, the way schedules are written."""
        rank = int(np.searchsorted(self.first, slot, side="right")) - 1
        return f"r{rank}:{slot - int(self.first[rank])}"


def check_tables(schedule: Schedule, space: TileSpace, report: Report) -> None:
    """Finds orders that are no permutations, and numbers out of range."""
    sizes = (schedule.num_tiles, schedule.num_steps)
    if sizes != (space.num_tiles, space.num_steps):
        report.add(
            "wrong-space",
            -1,
            -1,
            f"the schedule is for {sizes[0]} tiles of {sizes[1]} steps, the tile space has "
            f"{space.num_tiles} of {space.num_steps}; schedule again",
        )
        return
    if schedule.workers < 1:
        report.add("no-workers", -1, -1, f"needs at least 1 worker, found {schedule.workers}")
    for name, table in (("order", schedule.order), ("k_order", schedule.k_order)):
        for rank, row in enumerate(table):
            if not np.array_equal(np.sort(row), np.arange(len(row))):
                lost = sorted(set(range(len(row))) - set(row.tolist()))
                report.add(
                    "not-a-permutation",
                    rank,
                    -1,
                    f"{name} must name each of 0..{len(row) - 1} once; it lacks {_some(lost)}",
                )
    _check_slots(schedule, report)
    _check_landings(schedule, report)


def check_balance(schedule: Schedule, slots: Slots, report: Report) -> None:
    """Finds waits for more raises than there are, and raises that nobody waits for."""
    awaited = np.zeros(len(slots.raises), np.int64)
    for rows, rank in _waits(schedule):
        slot, count = rows.values[:, -2:].T
        at = slots.first[rank] + slot
        np.maximum.at(awaited, at, count)
    for slot in np.flatnonzero(awaited > slots.raises)[:SHOWN].tolist():
        report.add(
            "too-few-raises",
            _rank(slots, slot),
            -1,
            f"slot {slots.name(slot)} is waited for as {awaited[slot]}, but raised "
            f"{slots.raises[slot]} times; lower the count or raise it more often",
        )
    for slot in np.flatnonzero(awaited < slots.raises)[:SHOWN].tolist():
        report.add(
            "lost-signal",
            _rank(slots, slot),
            -1,
            f"slot {slots.name(slot)} is raised {slots.raises[slot]} times, but waited for as "
            f"{awaited[slot]} at most; wait for all of them, or drop the rest",
        )


def _waits(schedule: Schedule) -> list[tuple[Rows, Array]]:
    """Every table of waits, with the rank of each entry."""
    tables = [
        (rows, rows.owner // max(schedule.num_tiles, 1))
        for rows in (schedule.waits, schedule.k_waits, schedule.e_waits)
    ]
    ops = schedule.op_waits
    return [*tables, (ops, schedule.plan.columns.rank[ops.owner])]


def _check_slots(schedule: Schedule, report: Report) -> None:
    ranks, limit = schedule.plan.num_ranks, schedule.num_slots
    for rows, rank in _waits(schedule):
        place, slot, count = np.zeros(len(rank)), *rows.values[:, -2:].T
        if rows.values.shape[1] == 3:
            place = rows.values[:, 0]
        steps = schedule.num_steps
        bad = (slot < 0) | (slot >= limit[rank]) | (count < 1) | (place < 0) | (place >= steps)
        for i in np.flatnonzero(bad)[:SHOWN].tolist():
            report.add(
                "bad-wait",
                int(rank[i]),
                -1,
                f"{_owner(schedule, rows, i, report)} waits for slot {slot[i]} as {count[i]}"
                f"{f' at step {int(place[i])}' if rows.values.shape[1] == 3 else ''}; needs a slot "
                f"below {limit[rank[i]]}, a count of at least 1 and a step below {steps}",
            )
    for rows in (schedule.signals, schedule.op_signals):
        rank, slot = rows.values.T
        known = (rank >= 0) & (rank < ranks)
        most = np.where(known, limit[np.where(known, rank, 0)], 0) if ranks else 0 * rank
        for i in np.flatnonzero(~known | (slot < 0) | (slot >= most))[:SHOWN].tolist():
            report.add(
                "bad-signal",
                -1,
                -1,
                f"{_owner(schedule, rows, i, report)} raises slot {slot[i]} of rank {rank[i]}; "
                f"needs a rank below {ranks} and a slot below {most[i]}",
            )


def _check_landings(schedule: Schedule, report: Report) -> None:
    c, limit = schedule.plan.columns, schedule.num_landings
    rows = np.flatnonzero(schedule.landing >= 0)
    number, rank = schedule.landing[rows], c.dst_rank[rows]
    for i in np.flatnonzero(number >= limit[rank])[:SHOWN].tolist():
        report.add(
            "bad-landing",
            *report.place(int(rows[i])),
            f"lands at {number[i]}, rank {rank[i]} has {limit[rank[i]]} landings",
        )
    order = np.lexsort((number, rank))
    pairs = np.stack([rank, number])[:, order]
    again = np.flatnonzero(np.all(pairs[:, 1:] == pairs[:, :-1], axis=0))
    for i in again[:SHOWN].tolist():
        one, other = rows[order[i]], rows[order[i + 1]]
        report.add(
            "shared-landing",
            *report.place(int(other)),
            f"lands at {pairs[1, i]} of rank {pairs[0, i]}, where {report.name(int(one))} lands "
            f"too; give each a landing of its own",
        )
    at = schedule.addends
    rank = at.owner // max(schedule.num_tiles, 1)
    number = at.values[:, 0]
    for i in np.flatnonzero((number < 0) | (number >= limit[rank]))[:SHOWN].tolist():
        report.add(
            "bad-addend",
            int(rank[i]),
            -1,
            f"{_owner(schedule, at, i, report)} adds landing {number[i]}, "
            f"rank {rank[i]} has {limit[rank[i]]}",
        )


def _owner(schedule: Schedule, rows: Rows, entry: int, report: Report) -> str:
    """What has an entry of a table: a tile or an operation."""
    row = int(rows.owner[entry])
    if rows is schedule.op_waits or rows is schedule.op_signals:
        return report.name(row)
    return tile_name(schedule, row)


def tile_name(schedule: Schedule, row: int) -> str:
    """A tile row as ``tile <linear> (rank <rank>, position <position>)``."""
    rank, position = divmod(row, schedule.num_tiles)
    return f"tile {schedule.order[rank, position]} (rank {rank}, position {position})"


def _rank(slots: Slots, slot: int) -> int:
    return int(np.searchsorted(slots.first, slot, side="right")) - 1


def _some(items: list[int], limit: int = 8) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(map(str, items[:limit])) + more
