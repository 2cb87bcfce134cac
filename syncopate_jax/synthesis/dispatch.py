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
