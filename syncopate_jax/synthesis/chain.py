"""A broadcast along chains: pieces follow each other from rank to rank without meeting.

One chain is a path from the root through all members. Where a second one leads the other way round
over queues of its own, pieces are divided between both; and the last ones, which could no longer
get all the way round, leave in both directions and meet: of 63 other ranks, a piece that leaves 10
hops before the end gets to 10 of them, and its twin, which left 53 hops before the end the other
way, to the other 53. That halves the hops that the last pieces need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt

import numpy as np

from syncopate_jax.synthesis.matching import Sends
from syncopate_jax.synthesis.network import Network

Array = np.ndarray

# Numbers of pieces that are compared, as multiples of the best one for a single chain.
_AROUND = (0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5)


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """Ways round for a broadcast over ``network``: one or two arrays of links [members - 1], of
    which the second reaches the members in the reverse order, over other queues."""

    network: Network
    ways: tuple[Array, ...]

    @property
    def hops(self) -> int:
        """Ranks that one way reaches."""
        return len(self.ways[0])

    def pace(self, way: int, size: float) -> tuple[float, float]:
        """Seconds that a piece of ``size`` bytes holds a queue, and by which it is a rank ahead."""
        net, links = self.network, self.ways[way]
        hold = float((net.overhead[links] + size / net.bandwidth[links]).max())
        return hold, hold + float(net.latency[links].max())


def find_chains(network: Network, root: int, pull: bool) -> Chains | None:
    """The chains of fastest links from ``root`` through every member and no relay, or None.

    Each rank hands on to the one that has fewest ways left, the next one in order if several do;
    that may lead nowhere.
    """
    if network.relays or len(network.members) < 2:
        return None
    ways: dict[int, dict[int, list[int]]] = {rank: {} for rank in network.members}
    for link in np.flatnonzero(network.levels() == 0).tolist():
        ways[int(network.src[link])].setdefault(int(network.dst[link]), []).append(link)
    left, at, path = set(network.members) - {root}, root, [root]
    while left:
        ahead = [rank for rank in ways[at] if rank in left]
        if not ahead:
            return None
        here = at

        def order(rank: int, here: int = here) -> tuple[int, int]:
            return len(left & ways[rank].keys()), (rank - here) % network.num_ranks

        at = min(ahead, key=order)
        path.append(at)
        left.discard(at)
    there = np.array([ways[a][b][0] for a, b in pairwise(path)])
    if not _room(network, there):
        return None
    queue = (network.dst if pull else network.src) * len(network.channels) + network.channel
    back: list[int] = []
    turned = [root, *reversed(path[1:])]
    for a, b in pairwise(turned):
        free = [link for link in ways[a].get(b, ()) if queue[link] not in queue[there]]
        if not free or not _room(network, np.append(there, [*back, free[0]])):
            return Chains(network, (there,))
        back.append(free[0])
    return Chains(network, (there, np.array(back)))


def _room(network: Network, links: Array) -> bool:
    """Whether ports carry all of ``links`` at once."""
    rate = network.bandwidth[links]
    return all(
        np.all(
            np.bincount(ports[links], rate, len(network.capacity)) <= network.capacity * 1.000001
        )
        for ports in (network.egress, network.ingress)
    )


def best_pieces(chains: Chains, size: float, most: int) -> int:
    """Into how many pieces ``size`` bytes are best cut, at most ``most``.

    A single chain of h hops takes (p + h - 1)(overhead + size / (p bandwidth)), which is least at
    p = sqrt((h - 1) size / (bandwidth overhead)).
    """
    net, links = chains.network, chains.ways[0]
    overhead, flow = float(net.overhead[links].max()), size / float(net.bandwidth[links].min())
    if not overhead:
        return most
    usual = sqrt(max(chains.hops - 1, 1) * flow / overhead)
    tried = {min(max(ceil(factor * usual), 1), most) for factor in _AROUND}
    return min(sorted(tried), key=lambda pieces: _time(chains, size / pieces, pieces))


def _time(chains: Chains, size: float, pieces: int) -> float:
    """Seconds that so many pieces of ``size`` bytes need."""
    hold, step = chains.pace(0, size)
    alone = (pieces - 1) * hold + chains.hops * step
    if len(chains.ways) == 1:
        return alone
    low, high = 0.0, alone
    while high - low > 1e-3 * hold:
        middle = (low + high) / 2
        enough = len(_reaches(chains, size, middle)) >= pieces
        low, high = (low, middle) if enough else (middle, high)
    return high


def _reaches(chains: Chains, size: float, seconds: float) -> list[tuple[int, int]]:
    """Of the pieces that can be delivered in time, how many ranks each reaches each way round."""
    hops = chains.hops
    fits = []
    for way in (0, 1):
        hold, step = chains.pace(way, size)
        slots = np.arange(max(int((seconds - step) / hold * (1 + 1e-12)) + 1, 0))
        reach = np.floor((seconds - slots * hold) / step * (1 + 1e-12)).astype(int)
        fits.append(np.minimum(reach[reach > 0], hops))
    found = [(hops, 0)] * int(np.sum(fits[0] == hops)) + [(0, hops)] * int(np.sum(fits[1] == hops))
    there, back = (fit[fit < hops].tolist() for fit in fits)
    for reach in there:  # the furthest first, each with the nearest of the others that will do
        while back and back[-1] < hops - reach:
            back.pop()
        if not back:
            break
        back.pop()
        found.append((reach, hops - reach))
    return found


def send_along(chains: Chains, sizes: Sequence[float]) -> Sends:
    """The sends that bring pieces of ``sizes`` bytes, all alike to rounding, to all members."""
    count, hops = len(sizes), chains.hops
    reaches = [(hops, 0)] * count
    if len(chains.ways) == 2:
        size = max(sizes)
        # A few candidates too many may fit; those that reach furthest are left out last.
        reaches = _reaches(chains, size, _time(chains, size, count))
        reaches = reaches[len(reaches) - count :]
    width = np.array(sizes, np.float64)
    parts: list[tuple[Array, Array, Array, Array, Array]] = []
    before = 0
    for way, links in enumerate(chains.ways):
        reach = np.array([one[way] for one in reaches])
        order = np.argsort(-reach, kind="stable")
        order = order[reach[order] > 0]
        came, parent = np.zeros(len(order)), np.full(len(order), -1)
        for hop, link in enumerate(links.tolist()):
            order = order[: int(np.sum(reach[order] > hop))]
            if not len(order):
                break
            start, landed = _queue(chains.network, link, width[order], came[: len(order)])
            parts.append((order, np.full(len(order), link), start, landed, parent[: len(order)]))
            came, parent = landed, before + np.arange(len(order))
            before += len(order)
    chunk, link, start, landed, parent = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    first = np.argsort(start, kind="stable")
    place = np.empty(len(first) + 1, np.int64)
    place[first], place[-1] = np.arange(len(first)), -1
    return Sends(chunk[first], link[first], start[first], landed[first], place[parent[first]])


def _queue(network: Network, link: int, size: Array, came: Array) -> tuple[Array, Array]:
    """When one queue starts pieces that ``came`` at these times, in order, and when they land."""
    hold = network.overhead[link] + size / network.bandwidth[link]
    done = np.cumsum(hold)
    start = np.maximum.accumulate(came - (done - hold)) + done - hold
    return start, start + hold + network.latency[link]
