"""Does a schedule finish? The run on tokens, many tiles at a time.

What a worker does between two waits cannot stop, so it is one stretch here, whose raises are added
up and made at its end: the final state is that of ``schedule_run``, which goes tile by tile and
says who is stuck where.
"""

from __future__ import annotations

import numpy as np

from syncopate_jax.check.schedule_tables import Slots
from syncopate_jax.ir.schedule import Schedule

Array = np.ndarray


def finishes(schedule: Schedule, slots: Slots) -> bool:
    """Whether every worker and port comes to its end."""
    point, slot, count = _waits(schedule, slots)
    # A point is (actor, place of it); every actor has one at its start.
    starts = np.arange(_actors(schedule)) * _width(schedule)
    points = np.unique(np.concatenate([starts, point]))
    waits = _lists(np.searchsorted(points, point), [slot, count], len(points))
    point, slot = _raises(schedule, slots)
    both = (np.searchsorted(points, point, side="right") - 1) * len(slots.raises) + slot
    both, number = np.unique(both, return_counts=True)
    stretch, slot = np.divmod(both, max(len(slots.raises), 1))
    raises = _lists(stretch, [slot, number], len(points))
    ends = np.append(np.searchsorted(points, starts), len(points)).tolist()
    value = [0] * len(slots.raises)
    at = ends[:-1]
    sleepers: dict[int, list[int]] = {}
    awake = list(range(len(at)))
    while awake:
        actor = awake.pop()
        while at[actor] < ends[actor + 1]:
            here = at[actor]
            blocked = next((s for s, n in waits[here] if value[s] < n), None)
            if blocked is not None:
                sleepers.setdefault(blocked, []).append(actor)
                break
            at[actor] += 1
            for raised, times in raises[here]:
                value[raised] += times
                if raised in sleepers:
                    awake += sleepers.pop(raised)
    return at == ends[1:]


def _lists(owner: Array, columns: list[Array], rows: int) -> list[list[tuple[int, ...]]]:
    """The entries that belong to each row."""
    found: list[list[tuple[int, ...]]] = [[] for _ in range(rows)]
    for row, *entry in zip(owner.tolist(), *(column.tolist() for column in columns), strict=True):
        found[row].append(tuple(entry))
    return found


def _width(schedule: Schedule) -> int:
    """Places that one actor can have at most, and one more."""
    return max(schedule.num_tiles * (schedule.num_steps + 2), schedule.plan.num_ops) + 1


def _actors(schedule: Schedule) -> int:
    """Workers of every rank, then a port for each rank and channel."""
    return schedule.plan.num_ranks * (schedule.workers + len(schedule.plan.channels))


def _tile_point(schedule: Schedule, row: Array, step: Array | int) -> Array:
    rank, position = np.divmod(row, max(schedule.num_tiles, 1))
    worker = rank.astype(np.int64) * schedule.workers + position % schedule.workers
    return worker * _width(schedule) + position * (schedule.num_steps + 2) + step


def _op_point(schedule: Schedule, row: Array) -> Array:
    c, plan = schedule.plan.columns, schedule.plan
    port = c.rank[row].astype(np.int64) * len(plan.channels) + c.channel[row]
    return (plan.num_ranks * schedule.workers + port) * _width(schedule) + row


def _waits(schedule: Schedule, slots: Slots) -> tuple[Array, Array, Array]:
    """Point, slot and count of every wait."""
    points, found, counts = [], [], []
    for rows in (schedule.waits, schedule.k_waits, schedule.e_waits):
        owner, inside = rows.owner, rows.values.shape[1] == 3
        step = rows.values[:, 0] if inside else schedule.num_steps * (rows is schedule.e_waits)
        points.append(_tile_point(schedule, owner, step))
        found.append(slots.first[owner // max(schedule.num_tiles, 1)] + rows.values[:, -2])
        counts.append(rows.values[:, -1])
    owner = schedule.op_waits.owner
    points.append(_op_point(schedule, owner))
    found.append(slots.first[schedule.plan.columns.rank[owner]] + schedule.op_waits.values[:, 0])
    counts.append(schedule.op_waits.values[:, 1])
    return np.concatenate(points), np.concatenate(found), np.concatenate(counts)


def _raises(schedule: Schedule, slots: Slots) -> tuple[Array, Array]:
    """Point and slot of every raise: the end of a tile, or an operation."""
    tiles, ops = schedule.signals, schedule.op_signals
    points = [
        _tile_point(schedule, tiles.owner, schedule.num_steps + 1),
        _op_point(schedule, ops.owner),
    ]
    found = [slots.first[rows.values[:, 0]] + rows.values[:, 1] for rows in (tiles, ops)]
    return np.concatenate(points), np.concatenate(found)
