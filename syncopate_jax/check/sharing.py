"""Transfers that share ports: max-min fair rates, and when each runs dry at them.

A flow takes bytes from an egress port to an ingress port, at most at the rate of its link. Rates
are max-min fair: a port's capacity is shared equally among its flows, and what a flow cannot use
(it is slower elsewhere) goes to the others. Only flows that share a port, directly or through
other flows, are rated again when one starts or ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappush

Event = tuple[float, int, int, int]
"""(time in seconds, phase, what it is about, a number the phase knows the meaning of)."""

ENDED = 0
"""Phase of the events that a flow's end pushes: ``(time, ENDED, flow, version)``."""


class Flows:
    """The flows in progress.

    Attributes:
      src, dst: per flow its egress and ingress port, or -1 for none.
      link: per flow the bytes/s of its link.
      left: per flow the bytes still to move.
      capacity: per port its bytes/s.
      heap: events; an end is stale if its version is no longer ``version[flow]``.
    """

    def __init__(
        self,
        src: Sequence[int],
        dst: Sequence[int],
        link: Sequence[float],
        size: Sequence[float],
        capacity: Sequence[float],
        heap: list[Event],
    ):
        self.src, self.dst, self.link, self.capacity, self.heap = src, dst, link, capacity, heap
        self.left = list(size)
        self.rate = [0.0] * len(src)
        self.since = [0.0] * len(src)
        self.version = [0] * len(src)
        # Dictionaries serve as sets that keep their order, so that ties fall the same way each run.
        self.members: list[dict[int, None]] = [{} for _ in capacity]
        self.fresh: list[int] = []
        self.dirty: dict[int, None] = {}

    def start(self, flow: int) -> None:
        """Lets ``flow`` begin; it gets its rate from the next ``share``."""
        self.fresh.append(flow)
        for port in (self.src[flow], self.dst[flow]):
            if port >= 0:
                members = self.members[port]
                if members:
                    self.dirty[port] = None
                members[flow] = None

    def end(self, flow: int) -> None:
        """Takes ``flow`` off its ports."""
        for port in (self.src[flow], self.dst[flow]):
            if port >= 0:
                members = self.members[port]
                del members[flow]
                if members:
                    self.dirty[port] = None

    def share(self, now: float) -> None:
        """Rates again the flows that starts and ends since the last call have touched."""
        dirty, fresh = self.dirty, self.fresh
        if dirty:
            for flows in self._components(dirty):
                for flow, rate in self._fill(flows).items():
                    self._set_rate(flow, rate, now)
            dirty.clear()
        for flow in fresh:
            if not self.rate[flow]:
                self._set_rate(flow, self._alone(flow), now)
        fresh.clear()

    def _alone(self, flow: int) -> float:
        """Rate of a flow that shares neither of its ports."""
        rate = self.link[flow]
        for port in (self.src[flow], self.dst[flow]):
            if port >= 0 and self.capacity[port] < rate:
                rate = self.capacity[port]
        return rate

    def _set_rate(self, flow: int, rate: float, now: float) -> None:
        old = self.rate[flow]
        if rate == old:
            return
        if old:
            self.left[flow] = max(0.0, self.left[flow] - (now - self.since[flow]) * old)
        self.since[flow] = now
        self.rate[flow] = rate
        self.version[flow] += 1
        heappush(self.heap, (now + self.left[flow] / rate, ENDED, flow, self.version[flow]))

    def _components(self, ports: Iterable[int]) -> list[dict[int, None]]:
        """The sets of flows that share ports with each other and touch ``ports``."""
        seen: set[int] = set()
        found = []
        for first in ports:
            if first in seen or not self.members[first]:
                continue
            seen.add(first)
            flows: dict[int, None] = {}
            todo = [first]
            while todo:
                for flow in self.members[todo.pop()]:
                    if flow in flows:
                        continue
                    flows[flow] = None
                    for port in (self.src[flow], self.dst[flow]):
                        if port >= 0 and port not in seen:
                            seen.add(port)
                            todo.append(port)
            found.append(flows)
        return found

    def _fill(self, flows: dict[int, None]) -> dict[int, float]:
        """Max-min fair rates: raise all alike until a port or link is full, freeze, repeat."""
        open_flows = dict(flows)
        spare: dict[int, float] = {}
        count: dict[int, int] = {}
        for flow in flows:
            for port in (self.src[flow], self.dst[flow]):
                if port >= 0:
                    spare[port] = self.capacity[port]
                    count[port] = count.get(port, 0) + 1
        rates: dict[int, float] = {}
        while open_flows:
            fair = min((spare[p] / count[p] for p in count), default=float("inf"))
            slow = min(self.link[flow] for flow in open_flows)
            level = min(fair, slow)
            # Rounding must not keep a full port from being seen as full.
            limit = level * (1 + 1e-12)
            full = {port for port in count if spare[port] / count[port] <= limit}
            frozen = [
                flow
                for flow in open_flows
                if self.link[flow] <= limit or self.src[flow] in full or self.dst[flow] in full
            ]
            for flow in frozen:
                rates[flow] = level
                del open_flows[flow]
                for port in (self.src[flow], self.dst[flow]):
                    if port >= 0:
                        spare[port] = max(0.0, spare[port] - level)
                        count[port] -= 1
                        if not count[port]:
                            del count[port]
        return rates
