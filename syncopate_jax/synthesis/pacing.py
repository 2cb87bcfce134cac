"""Keeping a schedule's pace without clocks: where a transfer was to wait for a port, it waits for
what used that port before it to land.

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
    """A schedule: of each transfer the queue, the ports, and seconds at which it starts, frees its
    queue and lands; and which waits for which by number."""

    queue: Array
    egress: Array
    ingress: Array
    start: Array
    freed: Array
    landed: Array
    waiter: Array
    awaited: Array


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
    for number in np.argsort(schedule.freed, kind="stable").tolist():
        for port in (int(schedule.egress[number]), int(schedule.ingress[number])):
            times, numbers = at.setdefault(port, ([], []))
            times.append(float(schedule.freed[number]))
            numbers.append(number)
    waiter, awaited = [], []
    for number in held.tolist():
        before = set()
        for port in (int(schedule.egress[number]), int(schedule.ingress[number])):
            times, numbers = at[port]
            place = bisect_right(times, float(start[number]) + slack) - 1
            if place >= 0 and landed[numbers[place]] > natural[number] + slack:
                before.add(numbers[place])
        waiter += [number] * len(before)
        awaited += sorted(before)
    return np.array(waiter, np.int64), np.array(awaited, np.int64)
