"""Attempts whose operations carry several shards (``levels.py``), as drafts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.transfers import Transfers, join_transfers, make_transfers
from syncopate_jax.synthesis.assemble import Chunks, keeping
from syncopate_jax.synthesis.draft import Draft
from syncopate_jax.synthesis.levels import Merged, merged_gathers
from syncopate_jax.synthesis.request import Request
from syncopate_jax.synthesis.result import (
    all_reduced_plan,
    gathered_plan,
    reduced_plan,
    with_copies,
)

Array = np.ndarray

# Pairs of ways to sum and to spread of which all-reduces are made.
_PAIRS = 3


def merged_drafts(request: Request) -> Iterator[Draft]:
    """Attempts at an all-gather, a reduce-scatter or an all-reduce; none where relays are needed.

    A gather of what tiles produce is not merged: an operation would wait for tiles of several
    ranks.
    """
    sizes = request.demand().sizes
    if request.network.relays or len(sizes) < 4 or not sizes.sum():
        return
    if request.kind == "all_gather" and not request.produced:
        for merged in merged_gathers(request.network, sizes, request.pull):
            seconds = merged.seconds(request.network, sizes, request.pull)
            yield Draft(seconds, len(merged.link), (partial(_gathered, request, merged),))
        return
    if request.kind not in ("reduce_scatter", "all_reduce"):
        return
    back = merged_gathers(request.network.reversed(), sizes, not request.pull)
    downs = [merged.backwards() for merged in back]
    if request.kind == "reduce_scatter":
        for down in downs:
            seconds = down.seconds(request.network, sizes, request.pull)
            yield Draft(seconds, len(down.link), (partial(_reduced, request, down),))
        return
    ups = list(merged_gathers(request.network, sizes, request.pull))
    for some in (downs, ups):
        some.sort(key=lambda one: one.seconds(request.network, sizes, request.pull))
    for down, up in list(zip(downs, ups, strict=False))[:_PAIRS]:
        seconds = sum(one.seconds(request.network, sizes, request.pull) for one in (down, up))
        count = len(down.link) + len(sizes) + len(up.link)
        yield Draft(seconds, count, (partial(_all_reduced, request, down, up),))


def _gathered(request: Request, merged: Merged) -> Plan:
    return gathered_plan(request, 1, _transfers(request, merged))


def _reduced(request: Request, merged: Merged) -> Plan:
    return reduced_plan(request, 1, _sums(request, merged))


def _sums(request: Request, merged: Merged) -> Transfers:
    return _transfers(request, merged, reduce=request.reduce, produced=request.produced)


def _transfers(
    request: Request, merged: Merged, *, tensor: int = 0, reduce: int = 0, produced: bool = False
) -> Transfers:
    net, shards = request.network, request.shards
    src, dst = net.src[merged.link], net.dst[merged.link]
    return make_transfers(
        src,
        dst,
        shards.lo[merged.first, 0],
        shards.hi[merged.last - 1, 0],
        rank=dst if request.pull else src,
        src_tensor=tensor,
        dst_tensor=tensor,
        reduce=reduce,
        channel=net.channel[merged.link],
        waiter=merged.waiter,
        awaited=merged.awaited,
        produced=produced,
    )


def _all_reduced(request: Request, down: Merged, up: Merged) -> Plan:
    """Sums are made in tensor 0 and kept in tensor 1 by their owners, and gathered there."""
    net, shards, members = request.network, request.shards, np.array(request.members)
    channels, copying = with_copies(request)
    chunks = Chunks(shards.lo[:, 0], shards.hi[:, 0], members)
    scatter, gather = _sums(request, down), _transfers(request, up, tensor=1)
    kept = len(scatter.rank)
    spread = kept + len(members)
    place = np.full(net.num_ranks, -1)
    place[members] = np.arange(len(members))
    # An owner keeps its shard when all that adds to it has come.
    owner = place[net.dst[down.link]]
    adds = np.flatnonzero((down.first <= owner) & (owner < down.last))
    # What carries an owner's own shard on waits until it is kept.
    sender = place[net.src[up.link]]
    own = np.flatnonzero((up.first <= sender) & (sender < up.last))
    joined = join_transfers([scatter, keeping(chunks, copying, produced=request.produced), gather])
    return all_reduced_plan(
        request,
        1,
        Transfers(
            **{name: getattr(joined, name) for name in Transfers.__slots__}
            | {
                "waiter": np.concatenate([joined.waiter, kept + owner[adds], spread + own]),
                "awaited": np.concatenate([joined.awaited, adds, kept + sender[own]]),
            }
        ),
        channels,
    )
