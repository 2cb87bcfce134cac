"""The links that a group of ranks may use: a topology as a directed graph with shared ports."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.topology import Channel, Topology

Array = np.ndarray

HOST = "host"
"""The channel through host memory: left alone wherever the ranks are joined without it."""

# Links whose bandwidths differ by less than this factor count as equally fast.
_SAME_SPEED = 1.5

_PER_LINK = ("src", "dst", "channel", "bandwidth", "overhead", "latency", "egress", "ingress")


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """What may carry the data of one collective.

    Attributes:
      topology: where the links come from.
      channels: names of the channels used, in the topology's order.
      members: the group, in its own order.
      relays: ranks that are no members, but must hand data on for members to be joined.
      src, dst, channel: [links] ends, and index into ``channels``.
      bandwidth: [links] bytes/s of the link, or of a port at its ends if that is less.
      overhead, latency: [links] seconds.
      egress, ingress: [links] index into ``capacity``.
      capacity: [ports] bytes/s.
    """

    topology: Topology
    channels: tuple[str, ...]
    members: tuple[int, ...]
    relays: tuple[int, ...]
    src: Array
    dst: Array
    channel: Array
    bandwidth: Array
    overhead: Array
    latency: Array
    egress: Array
    ingress: Array
    capacity: Array

    @property
    def num_ranks(self) -> int:
        return self.topology.num_ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """Members and relays."""
        return (*self.members, *self.relays)

    def reversed(self) -> Network:
        """The network with every link turned round."""
        return replace(self, src=self.dst, dst=self.src, egress=self.ingress, ingress=self.egress)

    def only(self, links: Array) -> Network:
        """The network with just these links, in this order."""
        return replace(self, **{name: getattr(self, name)[links] for name in _PER_LINK})

    def seconds(self, size: float) -> Array:
        """[links] seconds from the issue of a transfer of ``size`` bytes until it has landed."""
        return self.overhead + size / self.bandwidth + self.latency

    def levels(self) -> Array:
        """[links] 0 for the fastest, 1 for the next slower kind of link, and so on."""
        speeds = np.unique(self.bandwidth)[::-1]
        steps = np.concatenate(([0], np.cumsum(speeds[:-1] > _SAME_SPEED * speeds[1:])))
        found: Array = steps[len(speeds) - 1 - np.searchsorted(speeds[::-1], self.bandwidth)]
        return found

    def clusters(self, level: int) -> Array:
        """[ranks] a number for each set of ranks that links up to ``level`` join, either way."""
        label = np.arange(self.num_ranks)
        used = self.levels() <= level
        src, dst = self.src[used], self.dst[used]
        while True:
            lower = label.copy()
            np.minimum.at(lower, dst, label[src])
            np.minimum.at(lower, src, label[dst])
            lower = lower[lower]
            if np.array_equal(lower, label):
                return label
            label = lower

    def distances(self, size: float) -> Array:
        """[ranks, ranks] least seconds by which ``size`` bytes reach a rank, hop after hop."""
        found = np.full((self.num_ranks, self.num_ranks), np.inf)
        np.minimum.at(found, (self.src, self.dst), self.seconds(size))
        np.fill_diagonal(found, 0.0)
        for k in self.ranks:
            np.minimum(found, found[:, k, None] + found[None, k, :], out=found)
        return found

    def hops(self) -> Array:
        """[ranks, ranks] fewest links from rank to rank; infinite where there is no way."""
        found = np.full((self.num_ranks, self.num_ranks), np.inf)
        found[self.src, self.dst] = 1.0
        np.fill_diagonal(found, 0.0)
        for k in self.ranks:
            np.minimum(found, found[:, k, None] + found[None, k, :], out=found)
        return found

    def copying_channel(self, where: str) -> str:
        """The channel on which members copy within their own memory: the fastest that can.

        Raises InputError when none can.
        """
        members = np.array(self.members)
        speed = {c.name: float(c.bandwidth[members, members].min()) for c in self.topology.channels}
        best = max(speed, key=lambda name: speed[name], default="")
        if not best or speed[best] == 0:
            raise InputError(
                f"{where}: no channel of topology {self.topology.name} copies within a rank; give "
                f"one a bandwidth on the diagonal"
            )
        return best


def make_network(
    where: str,
    topology: Topology,
    group: Sequence[int],
    channels: Sequence[str] | None = None,
    roots: Sequence[int] | None = None,
) -> Network:
    """The network of ``group``, with relays where its own links do not join it.

    Args:
      where: whose arguments these are, for messages.
      channels: names of the channels that may be used; if None, all but ``host``, or with it if
        the group is not joined without.
      roots: the members that must reach all others; every one if None.

    Raises:
      InputError: a rank cannot reach another; the message names them.
    """
    members = tuple(group)
    heads = members if roots is None else tuple(roots)
    if channels is None:
        names = [c.name for c in topology.channels if c.name != HOST]
        direct = _links(topology, names, members)
        if not cut_off(direct, heads):
            return direct
        if not cut_off(_links(topology, names, range(topology.num_ranks), members), heads):
            return _with_relays(where, topology, names, members, heads)
        names = [c.name for c in topology.channels]
    else:
        names = [topology.channel(name).name for name in dict.fromkeys(channels)]
    direct = _links(topology, names, members)
    if not cut_off(direct, heads):
        return direct
    return _with_relays(where, topology, names, members, heads)


def _with_relays(
    where: str, topology: Topology, names: list[str], members: tuple[int, ...], heads: Sequence[int]
) -> Network:
    whole = _links(topology, names, range(topology.num_ranks), members)
    lost = cut_off(whole, heads)
    if lost:
        root, ranks = lost
        used = ", ".join(names) or "none"
        raise InputError(
            f"{where}: on topology {topology.name} rank {root} cannot reach "
            f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} (channels "
            f"{used}); add links, or leave them out of the group"
        )
    relays: set[int] = set()
    for head in heads:
        relays |= _on_paths(whole, head)
    return _links(topology, names, (*members, *sorted(relays)), members)


def _links(
    topology: Topology,
    names: Sequence[str],
    ranks: Sequence[int],
    members: Sequence[int] | None = None,
) -> Network:
    """The links of channels ``names`` between ``ranks``."""
    among = np.array(sorted(ranks), np.int64)
    columns: list[dict[str, Array]] = []
    capacity: list[float] = []
    kept = [c for c in topology.channels if c.name in names]
    for number, channel in enumerate(kept):
        columns.append(_channel_links(channel, number, among, len(capacity)))
        capacity += [*channel.egress.tolist(), *channel.ingress.tolist()]
    none = [np.zeros(0, np.int64)]  # where there is no channel at all
    joined = {name: np.concatenate([c[name] for c in columns] or none) for name in _PER_LINK}
    team = tuple(ranks) if members is None else tuple(members)
    return Network(
        topology=topology,
        channels=tuple(c.name for c in kept),
        members=team,
        relays=tuple(r for r in ranks if r not in set(team)),
        capacity=np.array(capacity),
        **joined,
    )


def _channel_links(channel: Channel, number: int, among: Array, first: int) -> dict[str, Array]:
    """The columns of a channel's links, whose ports are counted from ``first``."""
    table = channel.bandwidth[np.ix_(among, among)].copy()
    np.fill_diagonal(table, 0.0)
    i, j = np.nonzero(table)
    src, dst = among[i], among[j]
    out, into = channel.port[src], channel.port[dst]
    bandwidth = np.minimum(table[i, j], np.minimum(channel.egress[out], channel.ingress[into]))
    return {
        "src": src,
        "dst": dst,
        "channel": np.full(len(src), number),
        "bandwidth": bandwidth,
        "overhead": np.full(len(src), channel.overhead),
        "latency": channel.latency[src, dst],
        "egress": first + out,
        "ingress": first + len(channel.egress) + into,
    }


def cut_off(network: Network, heads: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
    """A head and the members it cannot reach, or None."""
    follows: list[set[int]] = [set() for _ in range(network.num_ranks)]
    for s, d in zip(network.src.tolist(), network.dst.tolist(), strict=True):
        follows[s].add(d)
    everyone = set(network.members)
    known: set[int] = set()  # reaches a head that reaches all, and so reaches all
    for head in heads:
        seen, todo = {head}, [head]
        while todo and not (seen & known):
            fresh = follows[todo.pop()] - seen
            seen |= fresh
            todo += fresh
        if not (seen & known) and everyone - seen:
            return head, tuple(sorted(everyone - seen))
        known.add(head)
    return None


def _on_paths(network: Network, head: int) -> set[int]:
    """The ranks that are no members on paths from ``head`` to all members, as few as may be."""
    members = set(network.members)
    follows: dict[int, set[int]] = {}
    for s, d in zip(network.src.tolist(), network.dst.tolist(), strict=True):
        follows.setdefault(s, set()).add(d)
    before: dict[int, int] = {}
    heap = [(0, 0, head, head)]
    while heap:
        outside, hops, rank, came = heappop(heap)
        if rank in before:
            continue
        before[rank] = came
        for other in sorted(follows.get(rank, ())):
            if other not in before:
                heappush(heap, (outside + (other not in members), hops + 1, other, rank))
    found: set[int] = set()
    for member in members:
        rank = member
        while rank != head:
            rank = before[rank]
            if rank not in members:
                found.add(rank)
    return found


def halves(network: Network) -> list[Array]:
    """The ranks that are nearer to one end of a link than to the other, by hops, as masks [ranks].

    On a ring or a torus these are halves, on a line all beginnings and ends.
    """
    hops = np.full((network.num_ranks, network.num_ranks), np.inf)
    hops[network.src, network.dst] = hops[network.dst, network.src] = 1.0
    np.fill_diagonal(hops, 0.0)
    for k in network.ranks:
        np.minimum(hops, hops[:, k, None] + hops[None, k, :], out=hops)
    found: dict[bytes, Array] = {}
    for a, b in zip(network.src.tolist(), network.dst.tolist(), strict=True):
        half = hops[a] < hops[b]
        found.setdefault(half.tobytes(), half)
    return list(found.values())


def balls(network: Network) -> list[Array]:
    """Sets of ranks around each rank, by hops, as masks [ranks]; whole sets are left out."""
    joined = np.zeros((network.num_ranks, network.num_ranks), bool)
    joined[network.src, network.dst] = joined[network.dst, network.src] = True
    wanted = np.zeros(network.num_ranks, bool)
    wanted[list(network.members)] = True
    found: dict[bytes, Array] = {}
    for rank in network.members:
        ball = np.zeros(network.num_ranks, bool)
        ball[rank] = True
        for _ in itertools.count():
            found.setdefault(ball.tobytes(), ball)
            wider = ball | np.any(joined[ball], axis=0)
            if np.all(wider[wanted]) or np.array_equal(wider, ball):
                break
            ball = wider
    return list(found.values())
