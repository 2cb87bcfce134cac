"""What no plan can beat: a lower bound on the time of a collective on a topology.

Each term holds for every plan that only pushes, or only pulls, under the cost model of
``ir.topology`` and ``check.simulate``, however it relays, cuts or combines data:

* *cut*: what must enter (or leave) a set of ranks is no faster than its links and ports together.
  Tried are single ranks, the clusters that faster links join, the ranks within 1, 2, … hops, and
  those nearer to one end of a link; for an all-reduce also all clusters, each taken as one rank.
* *work*: every byte delivered holds a queue, and a rank has one queue a channel; so all deliveries
  together are no faster than all queues (and all ports) together. All-gather and reduce-scatter
  deliver each byte to (or from) all members but one; an all-reduce does both, 2(n-1) transfers an
  element (one-way gossip with combining needs as many); an all-to-all delivers each block over at
  least its fastest path.
* *issue*: pushes hold the sender's queues, pulls the receiver's: what must leave (enter) a rank is
  no faster than the fastest links of its queues, one a channel.
* *path*: data needs its fastest route's overheads and latencies, and flows out of its first rank
  and into its last no faster than all that leaves or enters there: what leaves last has the whole
  route before it, and what arrives first has come the whole route.
* *rounds*: what one rank has must be heard of by all that depend on it, and pushes hold a queue for
  their overhead; so a rank that has heard at time t can tell one other a queue by t + overhead +
  latency, one more by an overhead later, and so on. Let the ranks that have heard never waste a
  push, and let everybody be joined with everybody: that many ranks have heard by any time, at most.
  Into the last that hears, all that depends on the first must still flow. Pulls are the same run
  backwards: of what one rank needs, so much can have been read by so long before the end.

A cut and the work also wait for one overhead before the first byte and one latency after the last.
The bound is the largest term; overheads beyond those are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappush, heapreplace

import numpy as np

from syncopate_jax.synthesis.network import Network, balls, halves

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound by its terms, in seconds."""

    cut: float
    work: float
    issue: float
    path: float
    rounds: float

    @property
    def seconds(self) -> float:
        """No plan takes less."""
        return max(self.cut, self.work, self.issue, self.path, self.rounds)

    @property
    def term(self) -> str:
        """Name of the largest term."""
        return max(self.__slots__, key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What a collective must move, in bytes.

    Attributes:
      kind: as in ``comm.COLLECTIVES``.
      sizes: [members] bytes of each member's shard (the root's tensor for a broadcast, whose other
        members have 0); for an all-to-all [members, members] bytes from row to column.
    """

    kind: str
    sizes: Array


def lower_bound(network: Network, demand: Demand, pull: bool) -> Bound:
    """The bound on ``demand`` over ``network`` by pushes or by pulls; 0 if nothing moves."""
    if len(network.members) < 2 or not demand.sizes.sum():
        return Bound(0.0, 0.0, 0.0, 0.0, 0.0)
    return Bound(
        _cut(network, demand),
        _work(network, demand),
        _issue(network, demand, pull),
        _path(network, demand, pull),
        _rounds(network, demand, pull),
    )


def _crossing(demand: Demand, inside: Array) -> tuple[float, float]:
    """Bytes that must enter and leave the members where ``inside`` [members] is set."""
    sizes, kind = demand.sizes, demand.kind
    if not inside.any() or inside.all():
        return 0.0, 0.0
    if kind == "all_to_all":
        enter = float(sizes[~inside][:, inside].sum())
        return enter, float(sizes[inside][:, ~inside].sum())
    within, outside = float(sizes[inside].sum()), float(sizes[~inside].sum())
    if kind == "all_reduce":
        return within + outside, within + outside
    return (within, outside) if kind == "reduce_scatter" else (outside, within)


def _capacity(network: Network, crossing: Array) -> float:
    """Bytes/s that the links in the mask ``crossing`` [links] carry together."""
    total = 0.0
    for channel in range(len(network.channels)):
        used = crossing & (network.channel == channel)
        if used.any():
            ports = [
                network.capacity[np.unique(side[used])].sum()
                for side in (network.egress, network.ingress)
            ]
            total += min(float(network.bandwidth[used].sum()), *map(float, ports))
    return total


def _cut(network: Network, demand: Demand) -> float:
    members = np.array(network.members)
    label = np.arange(network.num_ranks)
    sets = [label == one for one in network.ranks]
    for level in range(int(network.levels().max())):
        cluster = network.clusters(level)
        sets += [cluster == one for one in np.unique(cluster)]
    worst = _between_clusters(network, demand)
    for inside in (*sets, *balls(network), *halves(network)):
        for needed, a, b in zip(
            _crossing(demand, inside[members]), (~inside, inside), (inside, ~inside), strict=True
        ):
            if needed:
                links = a[network.src] & b[network.dst]
                first = float((network.overhead + network.latency)[links].min())
                worst = max(worst, first + needed / _capacity(network, links))
    return worst


def _between_clusters(network: Network, demand: Demand) -> float:
    """Of an all-reduce: clusters deliver to each other as if each were one rank."""
    if demand.kind != "all_reduce":
        return 0.0
    worst = 0.0
    for level in range(int(network.levels().max())):
        cluster = network.clusters(level)
        links = cluster[network.src] != cluster[network.dst]
        count = len(np.unique(cluster[list(network.members)]))
        if count > 1:
            first = float((network.overhead + network.latency)[links].min())
            needed = 2 * (count - 1) * float(demand.sizes.sum())
            worst = max(worst, first + needed / _capacity(network, links))
    return worst


def _work(network: Network, demand: Demand) -> float:
    n, total = len(network.members), float(demand.sizes.sum())
    first = float((network.overhead + network.latency).min())
    if demand.kind == "all_to_all":
        hop = np.full((network.num_ranks, network.num_ranks), np.inf)
        np.minimum.at(hop, (network.src, network.dst), 1 / network.bandwidth)
        np.fill_diagonal(hop, 0.0)
        for k in network.ranks:
            np.minimum(hop, hop[:, k, None] + hop[None, k, :], out=hop)
        members = np.array(network.members)
        seconds = float((demand.sizes * hop[np.ix_(members, members)])[demand.sizes > 0].sum())
        queues = np.union1d(_queues(network, network.src), _queues(network, network.dst))
        return first + seconds / len(queues)
    deliveries = total * (n - 1) * (2 if demand.kind == "all_reduce" else 1)
    return first + deliveries / _throughput(network)


def _issue(network: Network, demand: Demand, pull: bool) -> float:
    ends = network.dst if pull else network.src
    worst = 0.0
    for place, rank in enumerate(network.members):
        alone = np.arange(len(network.members)) == place
        needed = _crossing(demand, alone)[0 if pull else 1]
        own = ends == rank
        if needed and own.any():
            fastest = np.zeros(len(network.channels))
            np.maximum.at(fastest, network.channel[own], network.bandwidth[own])
            first = float((network.overhead + network.latency)[own].min())
            worst = max(worst, first + needed / float(fastest.sum()))
    return worst


def _queues(network: Network, ends: Array) -> Array:
    return ends * len(network.channels) + network.channel


def _throughput(network: Network) -> float:
    """Bytes/s that all queues carry together, each at its rank's fastest link of a channel."""
    total = 0.0
    for channel in range(len(network.channels)):
        used = network.channel == channel
        fastest = np.zeros(network.num_ranks)
        for ends in (network.src, network.dst):
            np.maximum.at(fastest, ends[used], network.bandwidth[used])
        total += min(float(fastest.sum()), _capacity(network, used))
    return total


def _path(network: Network, demand: Demand, pull: bool) -> float:
    members = np.array(network.members)
    far = network.distances(0.0)[np.ix_(members, members)]
    out = _rates(network, network.src, queued=not pull)[members]
    into = _rates(network, network.dst, queued=pull)[members]
    slower = np.minimum(out[:, None], into[None, :])
    moved = _depending(demand)
    needed = np.where(moved > 0, far - _unequal(network) + moved / slower, 0.0)
    return float(needed.max())


def _rounds(network: Network, demand: Demand, pull: bool) -> float:
    """How long it takes until what one rank has (needs) has got everywhere (from everywhere)."""
    moved = _depending(demand)
    moved = moved.T if pull else moved
    rates = _rates(network, network.src if pull else network.dst, queued=False)
    fastest = float(rates[list(network.members)].max())
    queues = [
        (float(network.overhead[used].min()), float(network.latency[used].min()))
        for channel in range(len(network.channels))
        if np.any(used := network.channel == channel)
    ]
    worst = 0.0
    known: dict[int, float] = {}
    for row in moved:
        some = row[row > 0]
        if len(some):
            if len(some) not in known:
                known[len(some)] = reaching(len(some), queues) - _unequal(network)
            worst = max(worst, known[len(some)] + float(some.min()) / fastest)
    return worst


def reaching(others: int, queues: list[tuple[float, float]]) -> float:
    """Seconds until so many other ranks can have heard of one, if no data takes any time.

    Each rank that has heard sends on ``queues``, (overhead, latency) each, to ranks that have not.
    """
    heap = [(overhead + latency, overhead, latency) for overhead, latency in queues]
    heapify(heap)
    now = 0.0
    for _ in range(others):
        now, overhead, latency = heap[0]
        heapreplace(heap, (now + overhead, overhead, latency))
        for own, delay in queues:
            heappush(heap, (now + own + delay, own, delay))
    return now


def _depending(demand: Demand) -> Array:
    """[members, members] bytes of what the column must end up with that depend on the row."""
    sizes, kind = demand.sizes, demand.kind
    if kind == "all_to_all":
        moved = sizes.copy()
    elif kind == "all_reduce":
        moved = np.full((len(sizes),) * 2, sizes.sum())
    else:
        moved = np.tile(sizes, (len(sizes), 1))
        moved = moved if kind == "reduce_scatter" else moved.T.copy()
    np.fill_diagonal(moved, 0.0)
    return moved


def _rates(network: Network, ends: Array, queued: bool) -> Array:
    """[ranks] bytes/s over the links with a rank at ``ends``; ``queued``: one at a time a channel.

    Infinite where there is no link: what nothing enters (the root of a broadcast) needs nothing.
    """
    found = np.full(network.num_ranks, np.inf)
    for rank in network.ranks:
        own = ends == rank
        if own.any():
            found[rank] = sum(
                min(
                    _capacity(network, own & (network.channel == channel)),
                    float(network.bandwidth[own & (network.channel == channel)].max(initial=0.0))
                    if queued
                    else np.inf,
                )
                for channel in range(len(network.channels))
            )
    return found


def _unequal(network: Network) -> float:
    """Largest difference in latency between links of one channel: so much earlier than by the
    fastest of them may data start to flow over another."""
    return max(
        float(np.ptp(network.latency[used]))
        for channel in range(len(network.channels))
        if np.any(used := network.channel == channel)
    )
