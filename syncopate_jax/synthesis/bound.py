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
* *path*: data needs its fastest route's overheads and latencies, and then flows into (out of) its
  last (first) rank no faster than all that enters (leaves) there.

A cut and the work also wait for one overhead before the first byte and one latency after the last.
The bound is the largest term; overheads beyond those are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def seconds(self) -> float:
        """No plan takes less."""
        return max(self.cut, self.work, self.issue, self.path)

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
        return Bound(0.0, 0.0, 0.0, 0.0)
    return Bound(
        _cut(network, demand),
        _work(network, demand),
        _issue(network, demand, pull),
        _path(network, demand),
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


def _path(network: Network, demand: Demand) -> float:
    members = np.array(network.members)
    far = network.distances(0.0)[np.ix_(members, members)]
    into, out = np.zeros(network.num_ranks), np.zeros(network.num_ranks)
    for rank in network.members:
        # What nothing enters (the root of a broadcast) needs nothing.
        into[rank] = _capacity(network, network.dst == rank) or np.inf
        out[rank] = _capacity(network, network.src == rank) or np.inf
    sizes = demand.sizes
    if demand.kind == "all_to_all":
        needed = np.where(sizes > 0, far + sizes / into[members][None, :], 0.0)
    elif demand.kind == "reduce_scatter":
        # From every rank, its partial of the shard of the rank it goes to.
        needed = far + sizes[None, :] / out[members][:, None]
        needed[:, sizes == 0] = 0.0
    elif demand.kind == "all_reduce":
        needed = far + sizes.sum() / into[members][None, :]
    else:
        needed = far + sizes[:, None] / into[members][None, :]
        needed[sizes == 0] = 0.0
    np.fill_diagonal(needed, 0.0)
    return float(needed.max())
