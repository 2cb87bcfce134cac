"""An all-to-all over a network: every block along a fastest path, the least loaded one if several.

Paths are chosen block after block, from the destination backwards, each over the link that carries
least so far. Queues then issue blocks with more hops to go first.
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
_PASSES = 3


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
    paths = choose_paths(network, blocks)
    length = np.array([len(path) for path in paths])
    block = np.repeat(np.arange(len(paths)), length)
    link = np.array([one for path in paths for one in path], np.int64)
    hop = np.arange(len(link)) - np.repeat(np.cumsum(length) - length, length)
    handed = np.flatnonzero(hop > 0)
    turn = (blocks.dst - blocks.src) % network.num_ranks
    turn = -turn % network.num_ranks if pull else turn
    first = list(
        zip((hop - length[block]).tolist(), turn[block].tolist(), strict=True)
    )  # hops to go, then nearest peers
    todo = Transfer(link, blocks.size[block], handed, handed - 1, first)
    start, landed = list_times(network, todo, pull)
    order = np.argsort(start, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    parent = np.where(hop > 0, place[np.arange(len(hop)) - 1], -1)[order]
    return Sends(block[order], link[order], start[order], landed[order], parent)


def choose_paths(network: Network, blocks: Blocks) -> list[tuple[int, ...]]:
    """[blocks] the links that each block takes, in order."""
    typical = float(np.median(blocks.size))
    cost = network.seconds(typical)
    distance = network.distances(typical)
    carried = (network.overhead + typical / network.bandwidth).tolist()
    src, costs = network.src.tolist(), cost.tolist()
    into: list[list[int]] = [[] for _ in range(network.num_ranks)]
    direct: dict[tuple[int, int], int] = {}
    parallel: dict[tuple[int, int], list[int]] = {}
    for link in np.argsort(cost, kind="stable").tolist():
        into[int(network.dst[link])].append(link)
        ends = src[link], int(network.dst[link])
        first = direct.setdefault(ends, link)
        if costs[link] <= costs[first] * _EQUAL:
            parallel.setdefault(ends, []).append(link)
    load = [0.0] * len(src)
    found: list[tuple[int, ...]] = [() for _ in range(len(blocks.size))]
    pairs = list(zip(blocks.src.tolist(), blocks.dst.tolist(), strict=True))
    for _ in range(_PASSES):
        for block, (start, end) in enumerate(pairs):
            near = distance[start]
            for link in found[block]:
                load[link] -= carried[link]
            path, at = [], end
            while at != start:
                alone = direct.get((start, at))
                if alone is not None and costs[alone] <= near[at] * _EQUAL:
                    ways = parallel[start, at]
                else:
                    ways = [
                        link
                        for link in into[at]
                        if near[src[link]] + costs[link] <= near[at] * _EQUAL
                    ]
                path.append(min(ways, key=lambda link: load[link]))
                at = src[path[-1]]
            for link in path:
                load[link] += carried[link]
            found[block] = tuple(reversed(path))
    return found
