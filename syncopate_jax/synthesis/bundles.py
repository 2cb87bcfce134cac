"""An all-to-all whose operations carry several blocks, where blocks have several hops to go.

From every source blocks spread along one tree of fastest paths. Blocks for consecutive members that
share a hop and go on behind it are one operation; a block that ends there is one of its own, since
it lands in another tensor. On a ring of 64 that is 138 operations a rank instead of 1024.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.transfers import make_transfers
from syncopate_jax.synthesis.assemble import Chunks, keeping
from syncopate_jax.synthesis.draft import Draft
from syncopate_jax.synthesis.listing import Transfer, list_times
from syncopate_jax.synthesis.network import Network
from syncopate_jax.synthesis.pacing import Scheduled, pace
from syncopate_jax.synthesis.request import Request
from syncopate_jax.synthesis.result import block_boxes, exchanged_plan, with_copies

Array = np.ndarray

# Lengths of paths that differ by no more than rounding are equal.
_EQUAL = 1 + 1e-9


@dataclass(slots=True)
class _Bundles:
    """Operations by column: the link, the source, the destinations from ``first`` to ``last``, the
    operation that brought them (-1: none), hops that the furthest of them has yet to go, and
    whether they end here."""

    link: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    final: list[bool] = field(default_factory=list)


def has_several_hops(request: Request) -> bool:
    """Whether it is an all-to-all of blocks of which some have several hops to go."""
    if request.kind != "all_to_all" or request.after is not None or len(request.members) < 2:
        return False
    members = np.array(request.members)
    return bool((request.network.hops()[np.ix_(members, members)][request.sent > 0] > 1).any())


def bundled_drafts(request: Request) -> Iterator[Draft]:
    """The attempt at an all-to-all of blocks; none where every block has one hop to go."""
    if not has_several_hops(request):
        return
    made = _bundles(request)
    net = request.network
    lo, hi, _ = block_boxes(request)
    axis, size = request.shards.axis, request.demand().sizes
    ends = np.concatenate([np.zeros((len(size), 1)), np.cumsum(size, axis=1)], axis=1)
    source, first, last = (np.array(one) for one in (made.source, made.first, made.last))
    link, parent = np.array(made.link), np.array(made.parent)
    turn = (net.dst[link] - net.src[link]) % net.num_ranks
    rank = list(zip((-np.array(made.ahead)).tolist(), turn.tolist(), strict=True))
    later = np.flatnonzero(parent >= 0)
    width = ends[source, last + 1] - ends[source, first]
    start, landed = list_times(net, Transfer(link, width, later, parent[later], rank), request.pull)
    order = np.lexsort((np.arange(len(link)), start))
    place = np.append(np.empty(len(order), np.int64), -1)
    place[order] = np.arange(len(order))

    def build() -> Plan:
        return _built(
            request,
            link[order],
            lo[source, first][order],
            hi[source, last][order],
            block_boxes(request)[2][source, first][order],
            place[parent[order]],
            np.array(made.final)[order],
            start[order],
            landed[order],
            axis,
        )

    yield Draft(float(landed.max(initial=0.0)), len(link) + len(size), (build,))


def _bundles(request: Request) -> _Bundles:
    net, sent = request.network, request.sent
    place = {rank: member for member, rank in enumerate(request.members)}
    sizes = request.demand().sizes
    typical = float(np.median(sizes[sizes > 0])) if np.any(sizes > 0) else 0.0
    near, cost = net.distances(typical), net.seconds(typical)
    into: dict[int, list[int]] = {}
    for link, end in enumerate(net.dst.tolist()):
        into.setdefault(end, []).append(link)
    made = _Bundles()
    for source, root in enumerate(request.members):
        before = {
            rank: _from(net, near[root], cost, into.get(rank, []), rank, root)
            for rank in net.ranks
            if rank != root
        }
        goes: dict[int, list[int]] = {}  # by rank, the destinations that pass or end there
        deep: dict[int, int] = {}  # by rank, how many hops the furthest of them has from there
        for target in np.flatnonzero(sent[source]).tolist():
            rank, hops = request.members[target], 0
            while rank != root:
                goes.setdefault(rank, []).append(target)
                deep[rank] = max(deep.get(rank, 0), hops)
                rank, hops = int(net.src[before[rank]]), hops + 1
        came: dict[tuple[int, int], int] = {}  # by rank and destination, what brought it
        for rank in sorted(goes, key=lambda one: (float(near[root, one]), one)):
            link = before[rank]
            here = place.get(rank, -1)
            for run in _runs(sorted(set(goes[rank]) - {here}), sent[source]):
                for target in run:
                    came[rank, target] = len(made.link)
                _add(made, link, source, run, came.get((int(net.src[link]), run[0]), -1))
                made.ahead.append(deep[rank])
                made.final.append(False)
            if here in goes[rank]:
                _add(made, link, source, [here], came.get((int(net.src[link]), here), -1))
                made.ahead.append(0)
                made.final.append(True)
    return made


def _from(
    network: Network, near: Array, cost: Array, links: list[int], rank: int, root: int
) -> int:
    """Of the links by which fastest paths from ``root`` enter ``rank``, the one from the nearest
    number: that leaves consecutive destinations together. Ties fall by turns."""
    best = min(near[network.src[link]] + cost[link] for link in links)
    ways = [link for link in links if near[network.src[link]] + cost[link] <= best * _EQUAL]
    turned = -1 if root % 2 else 1
    return min(
        ways,
        key=lambda link: (
            min((d := abs(int(network.src[link]) - rank)), network.num_ranks - d),
            turned * int(network.src[link]),
            link,
        ),
    )


def _add(made: _Bundles, link: int, source: int, run: list[int], parent: int) -> None:
    made.link.append(link)
    made.source.append(source)
    made.first.append(run[0])
    made.last.append(run[-1])
    made.parent.append(parent)


def _runs(targets: list[int], extents: Array) -> Iterator[list[int]]:
    """``targets``, which rise, in runs between which no others have anything to get."""
    run: list[int] = []
    for target in targets:
        if run and extents[run[-1] + 1 : target].any():
            yield run
            run = []
        run.append(target)
    if run:
        yield run


def _built(
    request: Request,
    link: Array,
    lo: Array,
    hi: Array,
    shift: Array,
    parent: Array,
    final: Array,
    start: Array,
    landed: Array,
    axis: int,
) -> Plan:
    """The plan of operations in order of start, whose sources hold boxes ``lo`` to ``hi``."""
    net, pull = request.network, request.pull
    src, dst = net.src[link], net.dst[link]
    later = np.flatnonzero(parent >= 0)
    paced = pace(
        Scheduled(
            queue=(dst if pull else src) * len(net.channels) + net.channel[link],
            egress=net.egress[link],
            ingress=net.ingress[link],
            start=start,
            freed=landed - net.latency[link],
            landed=landed,
            waiter=later,
            awaited=parent[later],
        )
    )
    used = np.zeros(net.num_ranks, np.int64)
    write = lo + shift
    for one in np.flatnonzero(~final).tolist():
        write[one] = lo[one]
        write[one, axis] = used[dst[one]]
        used[dst[one]] += hi[one, axis] - lo[one, axis]
    read = lo.copy()
    brought = parent[later]
    read[later, axis] = write[brought, axis] + lo[later, axis] - lo[brought, axis]
    made = make_transfers(
        src,
        dst,
        read,
        read + hi - lo,
        dst_lo=write,
        rank=dst if pull else src,
        src_tensor=np.where(parent >= 0, 2, 0),
        dst_tensor=np.where(final, 1, 2),
        channel=net.channel[link],
        waiter=np.concatenate([later, paced[0]]),
        awaited=np.concatenate([brought, paced[1]]),
        produced=request.produced & (parent < 0),
    )
    low, high, far = (np.diagonal(one).T for one in block_boxes(request))
    stays = np.all(high > low, axis=1)
    channels, copying = with_copies(request) if stays.any() else (net.channels, 0)
    own = Chunks(low[stays], high[stays], np.array(request.members)[stays])
    kept = keeping(own, copying, dst_lo=(low + far)[stays], produced=request.produced)
    return exchanged_plan(request, 1, made, kept, int(used.max(initial=0)), channels)
