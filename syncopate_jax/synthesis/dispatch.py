"""An all-to-all over a network: every block along a fastest path, the least loaded one if several.

Paths are chosen block after block, from the destination backwards, each over the link that carries
least so far. Then time passes: an idle queue issues, of the blocks that wait at it, the one with
most hops to go for which both ports have room for the link's full rate.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from syncopate_jax.synthesis.matching import Sends
from syncopate_jax.synthesis.network import Network

Array = np.ndarray

_FREED, _LANDED = 0, 1
# Lengths of paths that differ by no more than rounding are equal.
_EQUAL = 1 + 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """What is to be delivered: [blocks] ranks of both ends, which differ, and bytes."""

    src: Array
    dst: Array
    size: Array


def deliver(network: Network, blocks: Blocks, pull: bool = False) -> Sends:
    """Brings every block from its source to its destination; ``pull``: receivers issue."""
    if not len(blocks.size):
        none = np.zeros(0, np.int64)
        return Sends(none, none, none.astype(float), none.astype(float), none)
    return _Delivery(network, blocks, choose_paths(network, blocks), pull).run()


def choose_paths(network: Network, blocks: Blocks) -> list[tuple[int, ...]]:
    """[blocks] the links that each block takes, in order."""
    typical = float(np.median(blocks.size))
    cost = network.seconds(typical)
    distance = network.distances(typical)
    carried = (network.overhead + typical / network.bandwidth).tolist()
    src, costs = network.src.tolist(), cost.tolist()
    into: list[list[int]] = [[] for _ in range(network.num_ranks)]
    direct: dict[tuple[int, int], int] = {}
    for link in np.argsort(cost, kind="stable").tolist():
        into[int(network.dst[link])].append(link)
        direct.setdefault((src[link], int(network.dst[link])), link)
    load = [0.0] * len(src)
    found: list[tuple[int, ...]] = []
    for start, end in zip(blocks.src.tolist(), blocks.dst.tolist(), strict=True):
        alone = direct.get((start, end))
        near = distance[start]
        if alone is not None and costs[alone] <= near[end] * _EQUAL:
            parallel = [
                link
                for link in into[end]
                if src[link] == start and costs[link] <= near[end] * _EQUAL
            ]
            path = [min(parallel, key=lambda link: load[link])]
        else:
            path, at = [], end
            while at != start:
                ways = [
                    link for link in into[at] if near[src[link]] + costs[link] <= near[at] * _EQUAL
                ]
                path.append(min(ways, key=lambda link: load[link]))
                at = src[path[-1]]
            path.reverse()
        for link in path:
            load[link] += carried[link]
        found.append(tuple(path))
    return found


class _Delivery:
    """State of one run: which blocks wait at which queue."""

    def __init__(
        self, network: Network, blocks: Blocks, paths: Sequence[tuple[int, ...]], pull: bool
    ):
        self.network, self.paths = network, paths
        self.size = blocks.size.tolist()
        owner = network.dst if pull else network.src
        ids = owner * len(network.channels) + network.channel
        known, queue_of = np.unique(ids, return_inverse=True)
        self.queue_of = queue_of.tolist()
        self.waiting: list[list[tuple[int, int, int]]] = [[] for _ in known]
        self.idle = set(range(len(known)))
        self.blocked: set[int] = set()
        turn = (blocks.dst - blocks.src) % network.num_ranks
        self.turn = (-turn % network.num_ranks if pull else turn).tolist()
        self.hop = [0] * len(paths)
        self.last = [-1] * len(paths)
        self.spare = network.capacity.tolist()
        self.egress, self.ingress = network.egress.tolist(), network.ingress.tolist()
        self.bandwidth = network.bandwidth.tolist()
        self.overhead, self.latency = network.overhead.tolist(), network.latency.tolist()
        self.log: list[tuple[int, int, float, float, int]] = []
        self.heap: list[tuple[float, int, int]] = []
        self.now = 0.0

    def run(self) -> Sends:
        for block in range(len(self.paths)):
            self._arrive(block)
        self._issue(self.idle)
        while self.heap:
            self.now = self.heap[0][0]
            dirty: set[int] = set()
            freed = False
            while self.heap and self.heap[0][0] == self.now:
                _, what, send = heappop(self.heap)
                block, link = self.log[send][:2]
                if what == _FREED:
                    freed = True
                    self.spare[self.egress[link]] += self.bandwidth[link]
                    self.spare[self.ingress[link]] += self.bandwidth[link]
                    self.idle.add(self.queue_of[link])
                    dirty.add(self.queue_of[link])
                elif self.hop[block] < len(self.paths[block]):
                    dirty.add(self._arrive(block))
            self._issue(dirty | self.blocked if freed else dirty)
        return Sends(*(np.array(column) for column in zip(*self.log, strict=True)))

    def _arrive(self, block: int) -> int:
        """``block`` waits for its next link; returns the queue it waits at."""
        path, hop = self.paths[block], self.hop[block]
        queue: int = self.queue_of[path[hop]]
        insort(self.waiting[queue], (hop - len(path), self.turn[block], block))
        return queue

    def _issue(self, queues: set[int]) -> None:
        for queue in sorted(queues & self.idle):
            self.blocked.discard(queue)
            for place, (_, _, block) in enumerate(self.waiting[queue]):
                link = self.paths[block][self.hop[block]]
                need = self.bandwidth[link] * (1 - 1e-9)
                spare = min(self.spare[self.egress[link]], self.spare[self.ingress[link]])
                if spare >= need:
                    del self.waiting[queue][place]
                    self._start(queue, block, link)
                    break
                self.blocked.add(queue)

    def _start(self, queue: int, block: int, link: int) -> None:
        self.blocked.discard(queue)
        self.idle.discard(queue)
        rate = self.bandwidth[link]
        self.spare[self.egress[link]] -= rate
        self.spare[self.ingress[link]] -= rate
        ended = self.now + self.overhead[link] + self.size[block] / rate
        landed = ended + self.latency[link]
        send = len(self.log)
        self.log.append((block, link, self.now, landed, self.last[block]))
        self.last[block] = send
        self.hop[block] += 1
        heappush(self.heap, (ended, _FREED, send))
        heappush(self.heap, (landed, _LANDED, send))
