"""An all-to-all over a network: every block along a fastest path, the least loaded one if several.

Queues then issue blocks with more hops to go first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncopate_jax.synthesis.listing import Transfer, list_times
from syncopate_jax.synthesis.matching import Sends
from syncopate_jax.synthesis.network import Network

Array = np.ndarray

# Lengths of paths that differ by no more than rounding are equal.
_EQUAL = 1 + 1e-9
# How often every block chooses its path, the others' being as they are.
_PASSES = 5
# Of so many blocks, each chooses once.
_MANY = 20_000


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
    paths = choose_paths(network, blocks, pull)
    length = np.array([len(path) for path in paths])
    block = np.repeat(np.arange(len(paths)), length)
    link = np.array([one for path in paths for one in path], np.int64)
    hop = np.arange(len(link)) - np.repeat(np.cumsum(length) - length, length)
    handed = np.flatnonzero(hop > 0)
    turn = (blocks.dst - blocks.src)[block]
    # Over slow links peers are counted from the same place in their cluster, so that each rank of
    # a node begins with another one.
    level = network.levels()[link]
    for one in range(1, int(level.max()) + 1):
        slow = level == one
        place = _places(network.clusters(one - 1))
        turn[slow] = (place[blocks.dst] - place[blocks.src])[block][slow]
    turn = (-turn if pull else turn) % network.num_ranks
    first = list(
        zip((hop - length[block]).tolist(), turn.tolist(), strict=True)
    )  # hops to go, then nearest peers
    todo = Transfer(link, blocks.size[block], handed, handed - 1, first)
    start, landed = list_times(network, todo, pull)
    order = np.argsort(start, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    parent = np.where(hop > 0, place[np.arange(len(hop)) - 1], -1)[order]
    return Sends(block[order], link[order], start[order], landed[order], parent)


def _places(label: Array) -> Array:
    """[ranks] how many ranks before each have its label."""
    order = np.argsort(label, kind="stable")
    found = np.empty(len(label), np.int64)
    found[order] = np.arange(len(label)) - np.searchsorted(label[order], label[order])
    return found


def choose_paths(network: Network, blocks: Blocks, pull: bool = False) -> list[tuple[int, ...]]:
    """[blocks] the links that each block takes, in order.

    Every block takes, of its fastest paths, the one along which queues and ports carry least; when
    all have chosen, each chooses again.
    """
    typical = float(np.median(blocks.size))
    ways = _Ways(network, typical)
    loads = _Loads(network, typical, pull)
    found: list[tuple[int, ...]] = [() for _ in range(len(blocks.size))]
    ends = list(zip(blocks.src.tolist(), blocks.dst.tolist(), strict=True))
    for _ in range(_PASSES if len(ends) < _MANY else 1):
        for block, (start, end) in enumerate(ends):
            loads.add(found[block], -1)
            found[block] = ways.lightest(start, end, loads)
            loads.add(found[block], 1)
    return found


class _Loads:
    """Seconds that what has been routed so far keeps queues and ports busy."""

    def __init__(self, network: Network, size: float, pull: bool):
        owner = network.dst if pull else network.src
        queue = owner * len(network.channels) + network.channel
        ports = len(network.capacity)
        # Of each link what it uses, and for how long: its queue, and a port at both ends.
        self.used = np.stack([network.egress, network.ingress, ports + queue], axis=1).tolist()
        share = np.append(network.capacity, np.inf)
        held = network.overhead + size / network.bandwidth
        self.seconds = np.stack(
            [size / share[network.egress], size / share[network.ingress], held], axis=1
        ).tolist()
        self.load = [0.0] * (ports + int(queue.max(initial=0)) + 1)

    def add(self, path: tuple[int, ...], sign: int) -> None:
        for link in path:
            for what, seconds in zip(self.used[link], self.seconds[link], strict=True):
                self.load[what] += sign * seconds

    def of(self, link: int) -> float:
        a, b, c = self.used[link]
        return self.load[a] + self.load[b] + self.load[c]


class _Ways:
    """The links on fastest paths."""

    def __init__(self, network: Network, size: float):
        cost = network.seconds(size)
        self.distance = network.distances(size).tolist()
        self.src, self.cost = network.src.tolist(), cost.tolist()
        self.into: list[list[int]] = [[] for _ in range(network.num_ranks)]
        self.direct: dict[tuple[int, int], list[int]] = {}
        for link, end in enumerate(network.dst.tolist()):
            self.into[end].append(link)
            self.direct.setdefault((self.src[link], end), []).append(link)

    def lightest(self, start: int, end: int, loads: _Loads) -> tuple[int, ...]:
        """The links of a fastest path from ``start`` to ``end`` whose loads add up to least."""
        near = self.distance[start]
        alone = [
            link
            for link in self.direct.get((start, end), ())
            if self.cost[link] <= near[end] * _EQUAL
        ]
        if alone:
            return (min(alone, key=loads.of),)
        best: dict[int, tuple[float, int]] = {start: (0.0, -1)}
        todo = [end]
        while todo:
            at = todo[-1]
            if at in best:
                todo.pop()
                continue
            links = [
                link
                for link in self.into[at]
                if near[self.src[link]] + self.cost[link] <= near[at] * _EQUAL
            ]
            missing = [self.src[link] for link in links if self.src[link] not in best]
            if missing:
                todo += missing
                continue
            best[at] = min((best[self.src[link]][0] + loads.of(link), link) for link in links)
            todo.pop()
        path, at = [], end
        while at != start:
            path.append(best[at][1])
            at = self.src[path[-1]]
        return tuple(reversed(path))
