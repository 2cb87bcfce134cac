"""Times for transfers whose links are settled: each queue issues, of those whose data is there, the
one that comes first, provided that the ports at both ends have room for the link's full rate.

As in ``matching.py``, a transfer that has to be held back for want of room starts only once what
was in its way has landed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from syncopate_jax.synthesis.network import Network

Array = np.ndarray

_FREED, _LANDED = 0, 1
# Transfers of one queue that are looked at for one whose ports have room.
_TRIED = 32


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """Transfers to be timed, as arrays: [n] links and bytes, (waiter, awaited) by number, and
    ``first`` [n], of which each queue serves the least."""

    link: Array
    size: Array
    waiter: Array
    awaited: Array
    first: Sequence[tuple[float, ...]]


def list_times(network: Network, todo: Transfer, pull: bool) -> tuple[Array, Array]:
    """[n] seconds at which each transfer starts, and at which it has landed."""
    return _Listing(network, todo, pull).run()


class _Listing:
    """State of one run."""

    def __init__(self, network: Network, todo: Transfer, pull: bool):
        count = len(todo.link)
        link = todo.link
        owner = (network.dst if pull else network.src)[link]
        _, queue = np.unique(
            owner * len(network.channels) + network.channel[link], return_inverse=True
        )
        self.queue = queue.tolist()
        self.egress, self.ingress = network.egress[link].tolist(), network.ingress[link].tolist()
        self.rate = network.bandwidth[link].tolist()
        self.need = (network.bandwidth[link] * (1 - 1e-9)).tolist()
        self.hold = (network.overhead[link] + todo.size / network.bandwidth[link]).tolist()
        self.latency = network.latency[link].tolist()
        self.first = todo.first
        self.unmet = np.bincount(todo.waiter, minlength=count).tolist()
        order = np.argsort(todo.awaited, kind="stable")
        self.begin = np.searchsorted(todo.awaited[order], np.arange(count + 1)).tolist()
        self.follows = todo.waiter[order].tolist()
        self.spare = network.capacity.tolist()
        self.quiet = [0.0] * len(self.spare)
        self.ready: list[list[tuple[tuple[float, ...], int]]] = [
            [] for _ in range(max(self.queue, default=-1) + 1)
        ]
        self.idle = set(range(len(self.ready)))
        self.held_up: list[set[int]] = [
            set() for _ in self.spare
        ]  # by port, queues it lacks room for
        self.fresh: set[int] = set()  # transfers whose data came at this instant
        self.stirred: set[int] = set()  # queues freed at this instant
        self.start = [-1.0] * count
        self.landed = [-1.0] * count
        self.heap: list[tuple[float, int, int]] = []
        self.now = 0.0

    def run(self) -> tuple[Array, Array]:
        dirty = {self._arrive(one) for one, unmet in enumerate(self.unmet) if not unmet}
        self._issue(dirty)
        while self.heap:
            self.now = self.heap[0][0]
            self.fresh.clear()
            self.stirred.clear()
            dirty = set()
            roomy: set[int] = set()
            while self.heap and self.heap[0][0] == self.now:
                _, what, one = heappop(self.heap)
                roomy.update((self.egress[one], self.ingress[one]))
                if what == _FREED:
                    self.spare[self.egress[one]] += self.rate[one]
                    self.spare[self.ingress[one]] += self.rate[one]
                    self.idle.add(self.queue[one])
                    self.stirred.add(self.queue[one])
                    dirty.add(self.queue[one])
                    continue
                for other in self.follows[self.begin[one] : self.begin[one + 1]]:
                    self.unmet[other] -= 1
                    if not self.unmet[other]:
                        dirty.add(self._arrive(other))
            for port in roomy:
                dirty |= self.held_up[port]
                self.held_up[port].clear()
            self._issue(dirty)
        return np.array(self.start), np.array(self.landed)

    def _arrive(self, one: int) -> int:
        """The data of ``one`` is there; returns the queue at which it waits."""
        self.fresh.add(one)
        insort(self.ready[self.queue[one]], (self.first[one], one))
        return self.queue[one]

    def _issue(self, queues: set[int]) -> None:
        spare, quiet, need = self.spare, self.quiet, self.need
        for queue in sorted(queues & self.idle):
            stirred = queue in self.stirred
            for place, (_, one) in enumerate(self.ready[queue][:_TRIED]):
                lacking = -1
                for port in (self.egress[one], self.ingress[one]):
                    held = not stirred and quiet[port] > self.now and one not in self.fresh
                    if held or spare[port] < need[one]:
                        lacking = port
                        break
                if lacking < 0:
                    del self.ready[queue][place]
                    self._start(queue, one)
                    break
                self.held_up[lacking].add(queue)

    def _start(self, queue: int, one: int) -> None:
        self.idle.discard(queue)
        ended = self.now + self.hold[one]
        self.start[one], self.landed[one] = self.now, ended + self.latency[one]
        for port in (self.egress[one], self.ingress[one]):
            self.spare[port] -= self.rate[one]
            self.quiet[port] = max(self.quiet[port], self.landed[one])
        heappush(self.heap, (ended, _FREED, one))
        heappush(self.heap, (self.landed[one], _LANDED, one))
