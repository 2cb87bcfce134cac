"""Which signals of a schedule come only after a tile is done, on whatever rank."""

from __future__ import annotations

from syncopate_jax.ir.schedule import Schedule

Slot = tuple[int, int]


def behind_tiles(schedule: Schedule) -> set[Slot]:
    """Every (rank, slot) that a tile raises, or an operation that comes behind one.

    An operation does where it waits for such a slot, and where one does that is listed ahead of it
    in its rank's channel. Each is looked at once.
    """
    c, waits = schedule.plan.columns, schedule.op_waits
    channels = list(zip(c.rank.tolist(), c.channel.tolist(), strict=True))
    free: dict[tuple[int, int], list[int]] = {}  # operations not behind a tile, in order
    for row, channel in enumerate(channels):
        free.setdefault(channel, []).append(row)
    waiting: dict[Slot, list[int]] = {}
    for row, (slot, _) in zip(waits.owner.tolist(), waits.values.tolist(), strict=True):
        waiting.setdefault((int(c.rank[row]), slot), []).append(row)
    found: set[Slot] = {(rank, slot) for rank, slot in schedule.signals.values.tolist()}
    fresh = list(found)
    while fresh:
        for row in waiting.get(fresh.pop(), ()):
            rest = free[channels[row]]
            while rest and rest[-1] >= row:
                raised = {(rank, slot) for rank, slot in schedule.op_signals.row(rest.pop())}
                fresh += raised - found
                found |= raised
    return found
