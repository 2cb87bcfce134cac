"""Buffers, barriers in shared memory, and counters in GMEM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.mosaic_interpreter.views import History, Knowledge, View, learn


@dataclass(slots=True, eq=False)
class Buffer:
    """An array of GMEM or shared memory; ``name`` says where."""

    name: str
    array: np.ndarray
    in_gmem: bool
    history: History = field(default_factory=History)


@dataclass(frozen=True, slots=True)
class Remote:
    """A buffer or counter that every device has under this key, as seen from ``device``."""

    device: int
    key: Any


@dataclass(slots=True, eq=False)
class Barrier:
    """An mbarrier: a phase completes with every ``arrivals`` arrivals.

    Attributes:
      phases: what arrived in each completed phase, and before it.
      loads: copies that were started to arrive here.
    """

    name: str
    arrivals: int
    phases: list[Knowledge] = field(default_factory=list)
    pending: Knowledge = field(default_factory=Knowledge)
    arrived: int = 0
    loads: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    def arrive(self, what: Knowledge) -> None:
        self.pending.learn(what)
        self.arrived += 1
        if self.arrived == self.arrivals:
            self.phases.append(self.pending)
            self.pending, self.arrived = self.pending.copy(), 0
            self._check_observed()

    def _check_observed(self) -> None:
        """Hardware has one bit of phase: who is two behind takes it for not completed."""
        for name, seen in self.seen.items():
            if len(self.phases) - seen > 2:
                raise AssertionError(
                    f"{self.name} completed phase {len(self.phases)}, but {name}, which waits for "
                    f"its phases, has waited for {seen}"
                )

    def observe(self, name: str) -> Knowledge:
        """The next phase that warpgroup ``name`` has not waited for, which is complete."""
        seen = self.seen.get(name, 0)
        if len(self.phases) - seen > 1:
            raise AssertionError(
                f"{name} waits for phase {seen + 1} of {self.name}, which has completed "
                f"{len(self.phases)}: the phase's bit has come round"
            )
        self.seen[name] = seen + 1
        return self.phases[seen]


@dataclass(slots=True, eq=False)
class Counter:
    """A semaphore in GMEM: what was released with every unit, in order of arrival.

    A wait for n takes what the first n brought, not what came beyond: on another day only those
    would have been there.
    """

    name: str
    released: list[View] = field(default_factory=list)
    taken: int = 0

    @property
    def value(self) -> int:
        return len(self.released) - self.taken

    def signal(self, units: int, view: View) -> None:
        self.released += [view] * units

    def acquire(self, count: int, decrement: bool) -> View:
        """What ``count`` units have brought; the counter has them."""
        found: View = {}
        for view in self.released[: self.taken + count]:
            learn(found, view)
        self.taken += count if decrement else 0
        return found
