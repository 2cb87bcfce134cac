"""Sends as operations: the transfers of gathers, of reductions (gathers run backwards), and of
exchanges, whose blocks rest in scratch on the ranks that relay them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from syncopate_jax.ir.transfers import Transfers, join_transfers, make_transfers
from syncopate_jax.synthesis.listing import Transfer, list_times
from syncopate_jax.synthesis.matching import Sends
from syncopate_jax.synthesis.network import Network
from syncopate_jax.synthesis.pacing import Scheduled, pace

Array = np.ndarray

_CHANNELS = 1 << 10  # more than a topology has


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """What is moved as one unit: [chunks, d] boxes and the [chunks] rank each belongs to."""

    lo: Array
    hi: Array
    owner: Array


def _scheduled(network: Network, sends: Sends, pull: bool, merges: bool = False) -> Scheduled:
    """``sends`` with what waits for what: children for parents or, of ``merges``, the reverse."""
    src, dst = network.src[sends.link], network.dst[sends.link]
    ends = np.flatnonzero(sends.parent >= 0), sends.parent[sends.parent >= 0]
    return Scheduled(
        queue=(dst if pull else src) * len(network.channels) + network.channel[sends.link],
        egress=network.egress[sends.link],
        ingress=network.ingress[sends.link],
        start=sends.start,
        freed=sends.landed - network.latency[sends.link],
        landed=sends.landed,
        waiter=ends[merges],
        awaited=ends[not merges],
    )


def gathering(
    network: Network,
    sends: Sends,
    chunks: Chunks,
    *,
    pull: bool,
    tensor: int = 0,
    produced: bool = False,
) -> Transfers:
    """Every send as a transfer within one tensor, after the one that brought its chunk."""
    src, dst = network.src[sends.link], network.dst[sends.link]
    plan = _scheduled(network, sends, pull)
    paced = pace(plan)
    return make_transfers(
        src,
        dst,
        chunks.lo[sends.chunk],
        chunks.hi[sends.chunk],
        rank=dst if pull else src,
        src_tensor=tensor,
        dst_tensor=tensor,
        channel=network.channel[sends.link],
        waiter=np.concatenate([plan.waiter, paced[0]]),
        awaited=np.concatenate([plan.awaited, paced[1]]),
        produced=produced & (sends.parent < 0),
    )


def run_backwards(network: Network, sends: Sends, size: Array, pull: bool) -> Sends:
    """``sends`` of the reversed network as transfers of ``network`` that collect partials.

    Where a chunk parted, partials meet. The order is kept, times are found anew. In the result
    ``parent`` is the transfer that takes a sum on, and so waits for those that add to it; -1 for
    what reaches the owner.

    Args:
      size: [chunks] bytes.
    """
    count = len(sends.chunk)
    later = np.flatnonzero(sends.parent >= 0)
    first = [(-one,) for one in sends.landed.tolist()]
    todo = Transfer(sends.link, size[sends.chunk], sends.parent[later], later, first)
    start, landed = list_times(network, todo, pull)
    order = np.lexsort((-sends.landed, start))
    place = np.empty(count + 1, np.int64)
    place[order], place[count] = np.arange(count), -1
    parent = place[sends.parent][order]
    return Sends(sends.chunk[order], sends.link[order], start[order], landed[order], parent)


def reducing(
    network: Network,
    sends: Sends,
    chunks: Chunks,
    *,
    pull: bool,
    reduce: int,
    produced: bool,
) -> Transfers:
    """What ``run_backwards`` gave as transfers that add within one tensor.

    A relay has no partial of its own: what comes first is written, the others are added after it.
    """
    src, dst = network.src[sends.link], network.dst[sends.link]
    plan = _scheduled(network, sends, pull, merges=True)
    paced = pace(plan)
    waiter, awaited = [plan.waiter, paced[0]], [plan.awaited, paced[1]]
    how = np.full(len(src), reduce)
    relay = np.isin(dst, network.relays)
    if relay.any():
        into = dst * (int(sends.chunk.max()) + 1) + sends.chunk
        _, first, which = np.unique(into, return_index=True, return_inverse=True)
        leader = first[which]
        leads = leader == np.arange(len(src))
        how[relay & leads] = 0
        others = np.flatnonzero(relay & ~leads)
        waiter.append(others)
        awaited.append(leader[others])
    return make_transfers(
        src,
        dst,
        chunks.lo[sends.chunk],
        chunks.hi[sends.chunk],
        rank=dst if pull else src,
        reduce=how,
        channel=network.channel[sends.link],
        waiter=np.concatenate(waiter),
        awaited=np.concatenate(awaited),
        produced=produced & np.isin(src, network.members),
    )


def keeping(
    chunks: Chunks, channel: int, *, dst_lo: Array | None = None, produced: bool = False
) -> Transfers:
    """Each owner copies its chunks from tensor 0 to tensor 1, in its own memory."""
    return make_transfers(
        chunks.owner,
        chunks.owner,
        chunks.lo,
        chunks.hi,
        dst_lo=dst_lo,
        dst_tensor=1,
        channel=channel,
        produced=produced,
    )


def summing(
    scatter: Transfers, keep: Transfers, gather: Transfers, roots: Array, manner: str
) -> Transfers:
    """An all-reduce: sums are made in tensor 0, kept in tensor 1 by their owners, and spread there.

    In step (``manner`` is ``step``) the owners spread what they have kept, and all begin together:
    were some early, they would meet the last sums at the ports, and nobody would find back into
    step. Otherwise they spread from tensor 0, each as soon as its sum is complete, and keep sums
    before (``early``) or after that (``late``).

    Args:
      roots: [gathering transfers] the number of the copy of what a transfer starts with, -1 for one
        that hands on.
    """
    scattered, kept = len(scatter.rank), len(keep.rank)
    added = _additions(scatter, keep)
    first = np.flatnonzero(roots >= 0)
    none = np.zeros(0, np.int64)
    copy = np.repeat(np.arange(kept), [len(one) for one in added])
    sums = np.concatenate([none, *added])
    parts, copies, spread = [scatter, keep, gather], scattered, scattered + kept
    if manner == "step":
        # One queue's first transfer stands for all of them.
        _, heads = np.unique(gather.rank * _CHANNELS + gather.channel, return_index=True)
        waiter = [first, np.repeat(heads, kept)]
        awaited = [roots[first] + copies, np.tile(np.arange(kept) + copies, len(heads))]
    else:
        gather = replace(gather, src_tensor=np.where(roots >= 0, 0, gather.src_tensor))
        parts = [scatter, keep, gather]
        if manner == "late":
            parts, copies, spread = [scatter, gather, keep], scattered + len(roots), scattered
        own = [added[roots[one]] for one in first.tolist()]
        waiter, awaited = [np.repeat(first, [len(one) for one in own])], [none, *own]
    joined = join_transfers(parts)
    return replace(
        joined,
        waiter=np.concatenate([joined.waiter, copy + copies, np.concatenate(waiter) + spread]),
        awaited=np.concatenate([joined.awaited, sums, *awaited]),
    )


def _additions(scatter: Transfers, keep: Transfers) -> list[Array]:
    """[copies] the transfers that add to what each copies."""
    key = {
        (rank, *lo): number
        for number, (rank, lo) in enumerate(
            zip(keep.rank.tolist(), keep.src_lo.tolist(), strict=True)
        )
    }
    found: list[list[int]] = [[] for _ in key]
    for number, (rank, lo) in enumerate(
        zip(scatter.dst_rank.tolist(), scatter.src_lo.tolist(), strict=True)
    ):
        copy = key.get((rank, *lo))
        if copy is not None:
            found[copy].append(number)
    return [np.array(one, np.int64) for one in found]


def one_shot(
    network: Network,
    sends: Sends,
    chunks: Chunks,
    *,
    pull: bool,
    reduce: int,
    copying: int,
    produced: bool,
) -> Transfers:
    """An all-reduce in which every member adds its whole partial to every other's sum.

    ``chunks`` are the members' whole tensors, in order of owner; ``sends`` go straight from owners.
    """
    keep = keeping(chunks, copying, produced=produced)
    src, dst = network.src[sends.link], network.dst[sends.link]
    place = {owner: number for number, owner in enumerate(chunks.owner.tolist())}
    count = len(chunks.owner)
    plan = _scheduled(network, sends, pull)
    paced = pace(plan)
    copied = np.array([place[rank] for rank in dst.tolist()], np.int64)
    add = make_transfers(
        src,
        dst,
        chunks.lo[sends.chunk],
        chunks.hi[sends.chunk],
        rank=dst if pull else src,
        dst_tensor=1,
        reduce=reduce,
        channel=network.channel[sends.link],
        waiter=paced[0],
        awaited=paced[1],
        produced=produced,
    )
    joined = join_transfers([keep, add])
    return replace(
        joined,
        waiter=np.concatenate([joined.waiter, count + np.arange(len(src))]),
        awaited=np.concatenate([joined.awaited, copied]),
    )


def exchanging(
    network: Network,
    sends: Sends,
    chunks: Chunks,
    destination: Array,
    dst_lo: Array,
    axis: int,
    *,
    pull: bool,
    produced: bool,
) -> tuple[Transfers, int]:
    """Blocks from tensor 0 to tensor 1, by way of tensor 2 on relaying ranks.

    ``destination`` [chunks] and ``dst_lo`` [chunks, d] say where a block must end. Returns the
    transfers and the extent along ``axis`` that tensor 2 needs.
    """
    src, dst = network.src[sends.link], network.dst[sends.link]
    chunk = sends.chunk
    final = dst == destination[chunk]
    extent = (chunks.hi - chunks.lo)[:, axis]
    read_lo, write_lo = chunks.lo[chunk].copy(), dst_lo[chunk].copy()
    used = np.zeros(network.num_ranks, np.int64)
    base = np.zeros(len(chunk), np.int64)
    for send in np.flatnonzero(~final).tolist():
        rank, one = int(dst[send]), int(chunk[send])
        base[send] = used[rank]
        used[rank] += extent[one]
    write_lo[~final, axis] = base[~final]
    other = [i for i in range(read_lo.shape[1]) if i != axis]
    write_lo[np.ix_(np.flatnonzero(~final), other)] = chunks.lo[chunk][~final][:, other]
    plan = _scheduled(network, sends, pull)
    paced = pace(plan)
    read_lo[plan.waiter] = write_lo[plan.awaited]
    transfers = make_transfers(
        src,
        dst,
        read_lo,
        read_lo + (chunks.hi - chunks.lo)[chunk],
        dst_lo=write_lo,
        rank=dst if pull else src,
        src_tensor=np.where(sends.parent >= 0, 2, 0),
        dst_tensor=np.where(final, 1, 2),
        channel=network.channel[sends.link],
        waiter=np.concatenate([plan.waiter, paced[0]]),
        awaited=np.concatenate([plan.awaited, paced[1]]),
        produced=produced & (sends.parent < 0),
    )
    return transfers, int(used.max(initial=0))
