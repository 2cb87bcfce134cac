"""Keeping a schedule's pace without clocks: where a transfer was to wait for a port, it waits for
what lands at one of its ends just before.

A plan has no times. A transfer that the schedule held back until a port was free would start as
soon as its queue reaches it, share the port, and delay what the schedule had there; the delays add
up to twice the time. One more dependency keeps the order.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

Array = np.ndarray

# Times nearer than this, relatively, are equal.
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A schedule: per transfer its queue, its ends, and seconds at which it starts, frees its queue
    and lands; and which waits for which by number."""

    queue: Array
    src: Array
    dst: Array
    start: Array
    freed: Array
    landed: Array
    waiter: Array
    awaited: Array

    def backwards(self) -> Scheduled:
        """Time running the other way: ends swapped, what waited is waited for."""
        total = self.landed.max(initial=0.0)
        start = total - self.landed
        return Scheduled(
            self.queue,
            self.dst,
            self.src,
            start,
            start + (self.freed - self.start),
            total - self.start,
            self.awaited,
            self.waiter,
        )


def pace(schedule: Scheduled) -> tuple[Array, Array]:
    """Dependencies (waiter, awaited) for transfers that start later than queue and data allow."""
    start, landed = schedule.start, schedule.landed
    natural = np.zeros(len(start))
    order = np.lexsort((start, schedule.queue))
    follows = schedule.queue[order[1:]] == schedule.queue[order[:-1]]
    natural[order[1:][follows]] = schedule.freed[order[:-1][follows]]
    np.maximum.at(natural, schedule.waiter, landed[schedule.awaited])
    slack = _EQUAL * landed.max(initial=0.0)
    held = np.flatnonzero(start > natural + slack)
    if not len(held):
        none = np.zeros(0, np.int64)
        return none, none
    at: dict[int, tuple[list[float], list[int]]] = {}
    for number in np.argsort(landed, kind="stable").tolist():
        for rank in (int(schedule.src[number]), int(schedule.dst[number])):
            times, numbers = at.setdefault(rank, ([], []))
            times.append(float(landed[number]))
            numbers.append(number)
    waiter, awaited = [], []
    for number in held.tolist():
        latest = -1
        for rank in (int(schedule.src[number]), int(schedule.dst[number])):
            times, numbers = at[rank]
            place = bisect_right(times, float(start[number]) + slack) - 1
            if place >= 0 and (latest < 0 or landed[numbers[place]] > landed[latest]):
                latest = numbers[place]
        if latest >= 0 and landed[latest] > natural[number] + slack:
            waiter.append(number)
            awaited.append(latest)
    return np.array(waiter, np.int64), np.array(awaited, np.int64)
