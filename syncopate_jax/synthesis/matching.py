"""Spreading chunks over a network by matching links with chunks as time goes on.

The network is expanded in time, in the manner of TACOS (Won et al., MICRO 2024): whenever a queue
is idle, it takes the chunk that its peers lack most, to the peer that lacks most, provided that
the ports at both ends have room for the link's full rate. A queue that had to stay idle for want of
room starts only once what was in its way has landed, which a plan can say (``pacing.py``).

Two things are added for links of unequal speed. A slow link first brings what no rank of the
receiver's *cluster* (the ranks that faster links join) holds or is about to get, since that must
come over a slow link once and only once; and what it might bring beyond that must land before a
deadline, lest a slow link finish last.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from syncopate_jax.synthesis.network import Network

Array = np.ndarray

_FREED, _LANDED = 0, 1
# Peers with something to gain that a queue compares before it chooses one.
_COMPARED = 8


@dataclass(frozen=True, slots=True)
class Style:
    """How ties fall.

    Attributes:
      seed: of random ties; None: the own chunk first, peers in rotation.
      deadline: seconds by which a slow link must have delivered what its receiver's cluster has.
      pull: the receiver's queue issues a transfer, not the sender's.
    """

    seed: int | None = None
    deadline: float = float("inf")
    pull: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Sends:
    """What was sent, in the order of start.

    Attributes:
      chunk, link: [n] what, and over which link of the network.
      start, landed: [n] seconds.
      parent: [n] the send that brought the chunk to its source; -1 where it was at the start.
    """

    chunk: Array
    link: Array
    start: Array
    landed: Array
    parent: Array

    @property
    def seconds(self) -> float:
        """When the last one lands."""
        return float(self.landed.max(initial=0.0))


def spread(network: Network, origin: Sequence[int], size: Sequence[float], style: Style) -> Sends:
    """Brings every chunk from its origin to all members, by way of relays where needed.

    Args:
      origin: [chunks] the rank that holds a chunk at the start.
      size: [chunks] bytes.
    """
    if not len(origin) or len(network.members) < 2:
        none = np.zeros(0, np.int64)
        return Sends(none, none, none.astype(float), none.astype(float), none)
    matching = _Matching(network, origin, size, style)
    matching.run()
    return _prune(matching.sends(), network)


class _Matching:
    """State of one run."""

    def __init__(
        self, network: Network, origin: Sequence[int], size: Sequence[float], style: Style
    ):
        self.network, self.style = network, style
        self.size = [float(one) for one in size]
        self.random = random.Random(style.seed) if style.seed is not None else None
        self.deadline = style.deadline
        ranks, chunks = network.num_ranks, len(origin)
        self.have = [0] * ranks
        self.first = [0] * ranks  # where a rank's own chunks begin: ties are broken from there on
        for chunk, rank in enumerate(origin):
            if not self.have[rank]:
                self.first[rank] = chunk
            self.have[rank] |= 1 << chunk
        self.own = list(self.have)
        self.want = [0] * ranks
        for rank in network.ranks:
            self.want[rank] = (1 << chunks) - 1 & ~self.have[rank]
        self.chunks = chunks
        self.brought = [-1] * (ranks * chunks)
        self.served = [0] * ranks  # chunks a rank has got (push) or given (pull) so far
        self.now = 0.0
        self.heap: list[tuple[float, int, int]] = []
        self.log: tuple[list[int], list[int], list[float], list[float], list[int]] = (
            [], [], [], [], [],
        )  # fmt: skip
        self._init_links()
        self._init_clusters(origin)

    def _init_links(self) -> None:
        net, pull = self.network, self.style.pull
        self.src, self.dst = net.src.tolist(), net.dst.tolist()
        self.bandwidth, self.overhead = net.bandwidth.tolist(), net.overhead.tolist()
        self.latency = net.latency.tolist()
        self.egress, self.ingress = net.egress.tolist(), net.ingress.tolist()
        self.spare = net.capacity.tolist()
        self.need = (net.bandwidth * (1 - 1e-9)).tolist()
        self.quiet = [0.0] * len(self.spare)  # when what last used a port has landed
        self.stirred: set[int] = set()  # queues freed at this instant
        self.supplied: dict[int, int] = {}  # by rank, the chunks landed at this instant
        owner, peer = (net.dst, net.src) if pull else (net.src, net.dst)
        ids = owner * len(net.channels) + net.channel
        known, self.queue_of = np.unique(ids, return_inverse=True)
        self.queue_of = self.queue_of.tolist()
        self.owner = (known // len(net.channels)).tolist()
        self.options: list[list[int]] = [[] for _ in known]
        # Peers in rotation, starting behind the owner, so that owners do not meet at one peer.
        turn = (owner - peer if pull else peer - owner) % net.num_ranks
        for link in np.argsort(turn, kind="stable").tolist():
            self.options[self.queue_of[link]].append(link)
        self.peers = [
            {(self.src if pull else self.dst)[link] for link in links} for links in self.options
        ]
        self.next_option = [0] * len(known)
        self.queues_of_rank: list[list[int]] = [[] for _ in range(net.num_ranks)]
        for queue, rank in enumerate(self.owner):
            self.queues_of_rank[rank].append(queue)
        self.idle = set(range(len(known)))
        self.place_of = [0] * len(self.src)
        for links in self.options:
            for place, link in enumerate(links):
                self.place_of[link] = place
        self.held_up: list[set[int]] = [
            set() for _ in self.spare
        ]  # by port, links it lacks room for

    def _init_clusters(self, origin: Sequence[int]) -> None:
        """Per level of speed and cluster, chunks by the number of its ranks that hold them."""
        net = self.network
        level = net.levels()
        self.level = level.tolist()
        self.cluster: list[list[int]] = []  # [levels][ranks] index into counts
        self.counts: list[list[int]] = []
        self.held: list[list[int]] = []  # [clusters][count] mask of chunks
        taking_part = set(net.ranks)
        for one in range(int(level.max()) + 1):
            label = net.clusters(one)
            index: dict[int, int] = {}
            for rank in range(net.num_ranks):
                index.setdefault(int(label[rank]), len(self.counts) + len(index))
            self.cluster.append([index[int(label[rank])] for rank in range(net.num_ranks)])
            for root in index:
                most = sum(int(label[rank]) == root for rank in taking_part)
                self.counts.append([0] * self.chunks)
                self.held.append([(1 << self.chunks) - 1, *[0] * (most + 1)])
        for chunk, rank in enumerate(origin):
            self._count(chunk, rank)

    def _count(self, chunk: int, rank: int) -> None:
        bit = 1 << chunk
        for cluster in self.cluster:
            place = cluster[rank]
            count = self.counts[place][chunk]
            self.counts[place][chunk] = count + 1
            self.held[place][count] ^= bit
            self.held[place][count + 1] |= bit

    def run(self) -> None:
        """Lets time pass until all is delivered."""
        self._match(dict.fromkeys(self.idle))
        while self.heap or self._force():
            self.now = self.heap[0][0]
            # Queues to be looked at, with the places of the links to try; None for all.
            dirty: dict[int, list[int] | None] = {}
            self.stirred.clear()
            self.supplied.clear()
            roomy: set[int] = set()
            while self.heap and self.heap[0][0] == self.now:
                _, what, send = heappop(self.heap)
                link = self.log[1][send]
                ports = self.egress[link], self.ingress[link]
                roomy.update(ports)
                if what == _FREED:
                    rate = self.bandwidth[link]
                    for port in ports:
                        self.spare[port] += rate
                    queue = self.queue_of[link]
                    self.idle.add(queue)
                    self.stirred.add(queue)
                    dirty[queue] = None
                else:
                    self._land(send, self.dst[link], dirty)
            for port in roomy:
                for link in self.held_up[port]:
                    queue = self.queue_of[link]
                    if queue in self.idle:
                        places = dirty.setdefault(queue, [])
                        if places is not None:
                            places.append(self.place_of[link])
                self.held_up[port].clear()
            self._match(dirty)

    def _force(self) -> bool:
        """Nothing is on its way: whatever is still wanted may come late. False if nothing is."""
        if not any(self.want):
            return False
        self.deadline = float("inf")
        self._match(dict.fromkeys(self.idle))
        assert self.heap, "a network whose members are joined can always deliver"
        return True

    def _land(self, send: int, rank: int, dirty: dict[int, list[int] | None]) -> None:
        self.have[rank] |= 1 << self.log[0][send]
        self.supplied[rank] = self.supplied.get(rank, 0) | 1 << self.log[0][send]
        if self.style.pull:
            dirty |= {queue: None for queue in self.idle if rank in self.peers[queue]}
        else:
            dirty |= {queue: None for queue in self.queues_of_rank[rank] if queue in self.idle}

    def _match(self, dirty: dict[int, list[int] | None]) -> None:
        queues = sorted(dirty)
        if self.random:
            self.random.shuffle(queues)
        for queue in queues:
            if queue in self.idle:
                self._try(queue, dirty[queue])

    def _try(self, queue: int, places: list[int] | None) -> None:
        """Starts the best transfer that ``queue`` can issue now, if any, over links at ``places``.

        All links are tried if None.
        """
        have, want, spare, need = self.have, self.want, self.spare, self.need
        src, dst, served = self.src, self.dst, self.served
        egress, ingress = self.egress, self.ingress
        ends = src if self.style.pull else dst
        options = self.options[queue]
        stirred, quiet, now = queue in self.stirred, self.quiet, self.now
        at, count = self.next_option[queue], len(options)
        found: tuple[int, int, int] | None = None
        least, compared = 1 << 60, 0
        if self.random:
            at = self.random.randrange(count)
        turns = (*range(at, count), *range(at)) if places is None else sorted(set(places))
        for place in turns:
            link = options[place]
            useful = have[src[link]] & want[dst[link]]
            if not useful:
                continue
            out, into = egress[link], ingress[link]
            if spare[out] < need[link] or spare[into] < need[link]:
                self.held_up[out if spare[out] < need[link] else into].add(link)
                continue
            if not stirred and (quiet[out] > now or quiet[into] > now):
                # It is held back, which takes a landing to wait for.
                useful &= self.supplied.get(src[link], 0)
                if not useful:
                    self.held_up[out if quiet[out] > now else into].add(link)
                    continue
            if self.level[link]:
                useful = self._worth_it(link, useful)
                if not useful:
                    continue
            if served[ends[link]] < least:
                least = served[ends[link]]
                found = (place, link, useful)
            compared += 1
            if compared == _COMPARED:
                break
        if found is not None:
            place, link, useful = found
            self.next_option[queue] = (place + 1) % count
            self._start(queue, link, self._pick(link, useful))

    def _worth_it(self, link: int, useful: int) -> int:
        """What of ``useful`` a slow link may bring: what is new to the cluster, or comes early."""
        cluster = self.cluster[self.level[link] - 1][self.dst[link]]
        fresh = useful & self.held[cluster][0]
        if fresh:
            return fresh
        if self.deadline == float("inf"):
            return useful
        largest = max(self.size)
        lands = self.now + self.overhead[link] + largest / self.bandwidth[link] + self.latency[link]
        return useful if lands <= self.deadline else 0

    def _pick(self, link: int, useful: int) -> int:
        """The chunk that the fewest ranks around the receiver have; the sender's own first."""
        level = self.level[link]
        for one in range(max(level - 1, 0), level + 1):
            for mask in self.held[self.cluster[one][self.dst[link]]]:
                if useful & mask:
                    useful &= mask
                    break
        src = self.src[link]
        if useful & self.own[src]:
            useful &= self.own[src]
        start = self.random.randrange(self.chunks) if self.random else self.first[src]
        rest = useful >> start
        if rest:
            return start + (rest & -rest).bit_length() - 1
        return (useful & -useful).bit_length() - 1

    def _start(self, queue: int, link: int, chunk: int) -> None:
        src, dst = self.src[link], self.dst[link]
        rate = self.bandwidth[link]
        self.spare[self.egress[link]] -= rate
        self.spare[self.ingress[link]] -= rate
        self.idle.discard(queue)
        self.want[dst] &= ~(1 << chunk)
        self.served[src if self.style.pull else dst] += 1
        self._count(chunk, dst)
        chunks, links, starts, landed, parents = self.log
        send = len(chunks)
        ended = self.now + self.overhead[link] + self.size[chunk] / rate
        chunks.append(chunk)
        links.append(link)
        starts.append(self.now)
        landed.append(ended + self.latency[link])
        for port in (self.egress[link], self.ingress[link]):
            self.quiet[port] = max(self.quiet[port], landed[-1])
        parents.append(self.brought[src * self.chunks + chunk])
        self.brought[dst * self.chunks + chunk] = send
        heappush(self.heap, (ended, _FREED, send))
        heappush(self.heap, (landed[-1], _LANDED, send))

    def sends(self) -> Sends:
        return Sends(*(np.array(column) for column in self.log))


def _prune(sends: Sends, network: Network) -> Sends:
    """Without what went to a relay and no further."""
    if not network.relays:
        return sends
    relay = np.zeros(network.num_ranks, bool)
    relay[list(network.relays)] = True
    needed = ~relay[network.dst[sends.link]]
    for send in range(len(needed) - 1, -1, -1):
        if needed[send] and sends.parent[send] >= 0:
            needed[sends.parent[send]] = True
    number = np.append(np.cumsum(needed) - 1, -1)
    return Sends(
        sends.chunk[needed],
        sends.link[needed],
        sends.start[needed],
        sends.landed[needed],
        number[sends.parent[needed]],
    )
