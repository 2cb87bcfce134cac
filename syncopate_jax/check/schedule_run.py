"""A schedule executed on tokens: does it finish, and what has happened before what?

Workers compute their tiles in order, ports issue their operations in order; both stop at a wait
until its slot has been raised often enough. Counters only rise, so whatever can go on keeps being
able to: all interleavings end in the same state, and one run decides for all of them whether the
schedule deadlocks. The order in which that run passed its places is one that every run respects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.schedule_tables import Slots
from syncopate_jax.ir.schedule import Rows, Schedule

TILE, OP = 0, 1
Waits = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Place:
    """A point that an actor passes once its waits are met.

    Attributes:
      kind: TILE or OP. row: of the tile (by position), or of the operation.
      step: of a tile, the step position from which on it holds; ``num_steps`` is the epilogue.
      waits: (slot, count), slots numbered through all ranks.
      last: whether the tile, or the operation, raises its slots after this place.
    """

    kind: int
    row: int
    step: int
    waits: Waits
    last: bool


class Run:
    """One run to the end, or until nothing can go on.

    Attributes:
      actors: places of each actor, in order: workers of every rank, then ports.
      trace: (actor, place) in the order passed.
      stuck: the place at which each unfinished actor waits.
    """

    def __init__(self, schedule: Schedule, slots: Slots):
        self.schedule, self.slots = schedule, slots
        self.actors = [*_workers(schedule, slots), *_ports(schedule, slots)]
        signals = _numbered(schedule.signals, slots)
        op_signals = _numbered(schedule.op_signals, slots)
        self.raises: tuple[list[list[int]], list[list[int]]] = (signals, op_signals)
        self.trace: list[tuple[int, Place]] = []
        self.value = [0] * len(slots.raises)
        self._run()

    def _run(self) -> None:
        at = [0] * len(self.actors)
        sleepers: dict[int, list[int]] = {}
        awake = list(range(len(self.actors)))
        while awake:
            actor = awake.pop()
            places = self.actors[actor]
            while at[actor] < len(places):
                place = places[at[actor]]
                blocked = self._blocking(place)
                if blocked is not None:
                    sleepers.setdefault(blocked, []).append(actor)
                    break
                self.trace.append((actor, place))
                at[actor] += 1
                if place.last:
                    for slot in self.raises[place.kind][place.row]:
                        self.value[slot] += 1
                        if slot in sleepers:
                            awake += sleepers.pop(slot)
        self.stuck = [
            places[i] for places, i in zip(self.actors, at, strict=True) if i < len(places)
        ]

    def _blocking(self, place: Place) -> int | None:
        for slot, count in place.waits:
            if self.value[slot] < count:
                return slot
        return None

    def missing(self, place: Place) -> Waits:
        """The waits of ``place`` that were not met."""
        return [(slot, count) for slot, count in place.waits if self.value[slot] < count]


def _numbered(rows: Rows, slots: Slots) -> list[list[int]]:
    """Slots raised by each row, numbered through all ranks."""
    rank, slot = rows.values.T
    numbers = (slots.first[rank] + slot).tolist()
    start = rows.start.tolist()
    return [numbers[start[i] : start[i + 1]] for i in range(rows.rows)]


def _workers(schedule: Schedule, slots: Slots) -> Iterator[list[Place]]:
    tiles, steps = schedule.num_tiles, schedule.num_steps
    before, inside, after = (
        _waits(rows) for rows in (schedule.waits, schedule.k_waits, schedule.e_waits)
    )
    for rank in range(schedule.plan.num_ranks):
        base = int(slots.first[rank])
        for worker in range(min(schedule.workers, tiles)):
            places: list[Place] = []
            for row in range(rank * tiles + worker, (rank + 1) * tiles, schedule.workers):
                found: dict[int, Waits] = {0: [(base + s, n) for s, n in before[row]]}
                for step, slot, count in inside[row]:
                    found.setdefault(step, []).append((base + slot, count))
                if after[row]:
                    found[steps] = [(base + s, n) for s, n in after[row]]
                final = max(found)
                places += [
                    Place(TILE, row, step, waits, step == final)
                    for step, waits in sorted(found.items())
                ]
            yield places


def _ports(schedule: Schedule, slots: Slots) -> Iterator[list[Place]]:
    c = schedule.plan.columns
    waits = _waits(schedule.op_waits)
    ports: dict[tuple[int, int], list[Place]] = {}
    for row, port in enumerate(zip(c.rank.tolist(), c.channel.tolist(), strict=True)):
        base = int(slots.first[port[0]])
        found = [(base + slot, count) for slot, count in waits[row]]
        ports.setdefault(port, []).append(Place(OP, row, 0, found, True))
    yield from ports.values()


def _waits(rows: Rows) -> list[list[tuple[int, ...]]]:
    """The entries of every row, rows without any sharing one list."""
    none: list[tuple[int, ...]] = []
    out = [none] * rows.rows
    for row in np.flatnonzero(np.diff(rows.start)).tolist():
        out[row] = rows.row(row)
    return out
