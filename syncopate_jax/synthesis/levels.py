"""Gathers in levels, whose operations carry several shards: few operations for small tensors.

The group is taken as a grid, such as 64 = 8 x 8. First every line of ranks along one axis of the
grid gathers its shards, then every line along the next what its ranks hold by then, and so on. What
a rank holds of consecutive shards goes as one operation, and holds a queue for one overhead: 14
operations a rank instead of 63. Reductions are gathers of the reversed network, run backwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from math import inf, prod

import numpy as np

from syncopate_jax.synthesis.listing import Transfer, list_times
from syncopate_jax.synthesis.matching import Style, spread
from syncopate_jax.synthesis.network import Network, cut_off

Array = np.ndarray

# Axes that a grid may have, and grids that are looked at closely, of those that seem fastest.
_AXES, _CLOSELY = 3, 6


@dataclass(frozen=True, slots=True)
class Grid:
    """``sides`` of a grid of members, that of the next member first, and the ``order`` in which
    its axes are gathered along."""

    sides: tuple[int, ...]
    order: tuple[int, ...]

    def stride(self, axis: int) -> int:
        return prod(self.sides[:axis])

    def lines(self, axis: int) -> Array:
        """[lines, side] members along ``axis``."""
        stride, side = self.stride(axis), self.sides[axis]
        members = np.arange(prod(self.sides))
        heads = members[members // stride % side == 0]
        found: Array = heads[:, None] + stride * np.arange(side)[None, :]
        return found

    def runs(self, step: int) -> tuple[int, Array]:
        """What members hold before ``step``: runs of so many shards, and [members, runs] the first
        shard of each, the run with the own shard first."""
        done = self.order[:step]
        low = 0
        while low in done:
            low += 1
        length = prod(self.sides[:low])
        members = np.arange(prod(self.sides))
        first = (members // length * length)[:, None]
        for axis in (axis for axis in done if axis > low):
            stride, side = self.stride(axis), self.sides[axis]
            place = members // stride % side
            turned = (place[:, None] + np.arange(side)) % side - place[:, None]
            first = (first[:, :, None] + turned[:, None, :] * stride).reshape(len(members), -1)
        return length, first


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """Operations in the order of issue.

    Attributes:
      link: [n] link of the network.
      first, last: [n] the shards carried, by member: from ``first`` up to but without ``last``.
      waiter, awaited: [m] which waits for which, by number.
    """

    link: Array
    first: Array
    last: Array
    waiter: Array
    awaited: Array

    def backwards(self) -> Merged:
        """What gathers on the reversed network as what collects partials."""
        end = len(self.link) - 1
        turned = (self.link[::-1], self.first[::-1], self.last[::-1])
        return Merged(*turned, end - self.awaited, end - self.waiter)

    def bytes(self, sizes: Array) -> Array:
        """[n] given the bytes of each member's shard."""
        ends = np.concatenate(([0.0], np.cumsum(sizes)))
        found: Array = ends[self.last] - ends[self.first]
        return found

    def seconds(self, network: Network, sizes: Array, pull: bool) -> float:
        """When the last has landed, if each queue issues what is ready in order."""
        order = [(float(one),) for one in range(len(self.link))]
        todo = Transfer(self.link, self.bytes(sizes), self.waiter, self.awaited, order)
        return float(list_times(network, todo, pull)[1].max(initial=0.0))


def merged_gathers(network: Network, sizes: Array, pull: bool) -> Iterator[Merged]:
    """Gathers in levels, of the grids that seem fastest for shards of ``sizes`` bytes."""
    best = _best_links(network, float(sizes.mean()))
    count = len(network.members)
    several = int(network.levels().max()) > 0
    grids = [
        Grid(sides, order)
        for sides in _factors(count, _AXES)
        if len(sides) > 1
        for order in (permutations(range(len(sides))) if several else [tuple(range(len(sides)))])
    ]
    guesses = [(_estimate(network, best, sizes, grid), grid) for grid in grids]
    guesses.sort(key=lambda pair: pair[0])
    for _, grid in [pair for pair in guesses if pair[0] < inf][:_CLOSELY]:
        one = _gather(network, best, sizes, grid, pull)
        if one is not None:
            yield one


def _factors(count: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``count`` as a product of up to ``most`` numbers above 1, in any order."""
    if count > 1:
        yield (count,)
    if most > 1:
        for side in range(2, count // 2 + 1):
            if count % side == 0:
                for rest in _factors(count // side, most - 1):
                    yield (side, *rest)


def _best_links(network: Network, size: float) -> dict[tuple[int, int], int]:
    """The link from rank to rank that is fastest for ``size`` bytes."""
    found: dict[tuple[int, int], int] = {}
    seconds = network.seconds(size)
    ends = zip(network.src.tolist(), network.dst.tolist(), strict=True)
    for link, pair in enumerate(ends):
        if pair not in found or seconds[link] < seconds[found[pair]]:
            found[pair] = link
    return found


def _estimate(
    network: Network, best: dict[tuple[int, int], int], sizes: Array, grid: Grid
) -> float:
    """Seconds of one line after the other, by the first line of each axis."""
    total = 0.0
    for step, axis in enumerate(grid.order):
        length, first = grid.runs(step)
        line = [network.members[one] for one in grid.lines(axis)[0]]
        links = [best[pair] for pair in pairwise(line) if pair in best]
        if len(links) < len(line) - 1:
            return inf
        size = float(sizes.mean()) * length
        hold = float((network.overhead[links] + size / network.bandwidth[links]).max())
        hops = 1 if (line[0], line[len(line) // 2]) in best else len(line) // 2
        total += (len(line) - 1) * first.shape[1] * hold
        total += hops * float(network.latency[links].max()) + (hops - 1) * hold
    return total


def _gather(
    network: Network, best: dict[tuple[int, int], int], sizes: Array, grid: Grid, pull: bool
) -> Merged | None:
    """The gather along the axes of ``grid``; None if a line is not joined."""
    count = len(network.members)
    place = {rank: member for member, rank in enumerate(network.members)}
    brought = np.full((count, count), -1)  # by member and shard: the operation
    links: list[int] = []
    firsts: list[int] = []
    lasts: list[int] = []
    waiter: list[int] = []
    awaited: list[int] = []
    src = [place.get(rank, -1) for rank in network.src.tolist()]
    dst = [place.get(rank, -1) for rank in network.dst.tolist()]
    for step, axis in enumerate(grid.order):
        length, first = grid.runs(step)
        sends: list[tuple[int, int]] = []
        for line in grid.lines(axis):
            more = _line(network, best, sizes, line, first, length, pull)
            if more is None:
                return None
            sends += more
        for link, run in sends:
            needed = set(brought[src[link], run : run + length].tolist()) - {-1}
            waiter += [len(links)] * len(needed)
            awaited += sorted(needed)
            brought[dst[link], run : run + length] = len(links)
            links.append(link)
            firsts.append(run)
            lasts.append(run + length)
    return Merged(*(np.array(one, np.int64) for one in (links, firsts, lasts, waiter, awaited)))


def _line(
    network: Network,
    best: dict[tuple[int, int], int],
    sizes: Array,
    line: Array,
    first: Array,
    length: int,
    pull: bool,
) -> list[tuple[int, int]] | None:
    """What one line sends, in order: (link, first shard of the run); None if it is not joined."""
    ranks = [network.members[one] for one in line]
    side, runs = len(ranks), first.shape[1]
    direct = [(ranks[i], ranks[(i + turn) % side]) for turn in range(1, side) for i in range(side)]
    if all(pair in best for pair in direct):
        owner = np.tile(np.arange(side), side - 1)
        return [
            (best[pair], run)
            for place in range(runs)
            for pair, run in zip(direct, first[line[owner], place].tolist(), strict=True)
        ]
    inside = np.flatnonzero(np.isin(network.src, ranks) & np.isin(network.dst, ranks))
    part = replace(network.only(inside), members=tuple(ranks), relays=())
    if cut_off(part, ranks):
        return None
    chunks = first[line].T.reshape(-1)
    width = [float(sizes[run : run + length].sum()) for run in chunks.tolist()]
    sends = spread(part, ranks * runs, width, Style(pull=pull))
    return list(zip(inside[sends.link].tolist(), chunks[sends.chunk].tolist(), strict=True))
