"""One attempt at a request: chunks of some number a shard, sent in some style, as a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ir.shards import cut_boxes
from syncopate_jax.ir.transfers import Transfers
from syncopate_jax.synthesis.assemble import (
    Chunks,
    exchanging,
    gathering,
    keeping,
    one_shot,
    reducing,
    run_backwards,
    summing,
)
from syncopate_jax.synthesis.chain import Chains, send_along
from syncopate_jax.synthesis.dispatch import Blocks, deliver
from syncopate_jax.synthesis.matching import Sends, Style, spread
from syncopate_jax.synthesis.request import Request
from syncopate_jax.synthesis.result import (
    all_reduced_plan,
    block_boxes,
    exchanged_plan,
    finished_plan,
    gathered_plan,
    reduced_plan,
    with_copies,
)

Array = np.ndarray

# Dependencies of an all-reduce beyond which its owners do not start from what they have added up.
_MOST_DEPENDENCIES = 300_000


@dataclass(frozen=True, slots=True)
class Draft:
    """An attempt.

    Attributes:
      seconds: what it takes by the synthesiser's own clock.
      transfers: number of its transfers.
      builds: each makes a plan; they differ in what the clock does not tell.
    """

    seconds: float
    transfers: int
    builds: tuple[Callable[[], Plan], ...]


def draft(request: Request, pieces: int, style: Style) -> Draft:
    """The attempt with ``pieces`` chunks a shard (or block) in ``style``."""
    makers = {
        "all_gather": _gather,
        "broadcast": _gather,
        "reduce_scatter": _reduce_scatter,
        "all_reduce": _all_reduce,
        "all_to_all": _all_to_all if request.after is None else _resharding,
    }
    return makers[request.kind](request, pieces, style)


def _shard_chunks(request: Request, pieces: int) -> Chunks:
    """The pieces of every shard that are not empty."""
    shards = request.shards
    lo, hi = cut_boxes(shards.lo[:, 0], shards.hi[:, 0], shards.axis, pieces)
    heads = request.members
    if request.kind == "broadcast":
        heads = (request.root,)
    owner = np.repeat(np.array(heads), lo.shape[1])
    return _filled(lo.reshape(-1, lo.shape[-1]), hi.reshape(-1, hi.shape[-1]), owner)


def _filled(lo: Array, hi: Array, owner: Array) -> Chunks:
    some = np.all(hi > lo, axis=1)
    return Chunks(lo[some], hi[some], owner[some])


def _bytes(request: Request, chunks: Chunks) -> list[int]:
    found: list[int] = (np.prod(chunks.hi - chunks.lo, axis=1) * request.itemsize).tolist()
    return found


def _gather(request: Request, pieces: int, style: Style) -> Draft:
    chunks = _shard_chunks(request, pieces)
    style = replace(style, pull=request.pull)
    sends = spread(request.network, chunks.owner.tolist(), _bytes(request, chunks), style)
    return _gathered(request, pieces, chunks, sends)


def chained(request: Request, pieces: int, chains: Chains) -> Draft:
    """The attempt at a broadcast whose pieces go along ``chains``."""
    chunks = _shard_chunks(request, pieces)
    return _gathered(request, pieces, chunks, send_along(chains, _bytes(request, chunks)))


def _gathered(request: Request, pieces: int, chunks: Chunks, sends: Sends) -> Draft:
    net, pull = request.network, request.pull

    def build() -> Plan:
        made = gathering(net, sends, chunks, pull=pull, produced=request.produced)
        return gathered_plan(request, pieces, made)

    return Draft(sends.seconds, len(sends.chunk), (build,))


def _reduce_scatter(request: Request, pieces: int, style: Style) -> Draft:
    chunks = _shard_chunks(request, pieces)
    sends = _merging(request, chunks, style)

    def build() -> Plan:
        return reduced_plan(request, pieces, _reductions(request, sends, chunks))

    return Draft(sends.seconds, len(sends.chunk), (build,))


def _merging(request: Request, chunks: Chunks, style: Style) -> Sends:
    """Chunks spread over the reversed network, run backwards: partials meet at their owners.

    What a rank receives it then sends, so its receiver's queue becomes its sender's.
    """
    back = request.network.reversed()
    size = _bytes(request, chunks)
    sends = spread(back, chunks.owner.tolist(), size, replace(style, pull=not request.pull))
    return run_backwards(request.network, sends, np.array(size, np.float64), request.pull)


def _reductions(request: Request, sends: Sends, chunks: Chunks) -> Transfers:
    return reducing(
        request.network,
        sends,
        chunks,
        pull=request.pull,
        reduce=request.reduce,
        produced=request.produced,
    )


def _all_reduce(request: Request, pieces: int, style: Style) -> Draft:
    chunks = _shard_chunks(request, pieces)
    down = _merging(request, chunks, style)
    up = spread(
        request.network,
        chunks.owner.tolist(),
        _bytes(request, chunks),
        replace(style, pull=request.pull),
    )

    def build(manner: str) -> Plan:
        channels, copying = with_copies(request)
        made = summing(
            _reductions(request, down, chunks),
            keeping(chunks, copying, produced=request.produced),
            gathering(
                request.network, up, chunks, pull=request.pull, tensor=1,
                produced=request.produced and manner != "step",
            ),
            np.where(up.parent < 0, up.chunk, -1),
            manner,
        )  # fmt: skip
        return all_reduced_plan(request, pieces, made, channels)

    builds: list[Callable[[], Plan]] = [partial(build, "step")]
    into = np.bincount(down.chunk[down.parent < 0], minlength=len(chunks.owner))
    out = np.bincount(up.chunk[up.parent < 0], minlength=len(chunks.owner))
    if int((into * out).sum()) < _MOST_DEPENDENCIES:
        builds += [partial(build, "early"), partial(build, "late")]
    transfers = len(down.chunk) + len(chunks.owner) + len(up.chunk)
    return Draft(down.seconds + up.seconds, transfers, tuple(builds))


def one_shot_draft(request: Request, limit: float) -> Draft | None:
    """An all-reduce in one hop, for small tensors.

    None where a fastest path has several hops, or it would surely take over ``limit`` seconds.
    """
    net, members, full = request.network, np.array(request.members), request.shards.full
    if full.size == 0 or len(members) < 2:
        return None
    fastest = sum(
        float(net.bandwidth[net.channel == channel].max(initial=0.0))
        for channel in range(len(net.channels))
    )
    if (len(members) - 1) * full.size * request.itemsize / fastest > limit:
        return None
    place, into = (side.reshape(-1) for side in np.indices((len(members),) * 2))
    place, into = place[place != into], into[place != into]
    lo, hi = np.zeros((len(place), full.ndim), np.int64), np.tile(full.hi, (len(place), 1))
    sends = _delivered(request, Chunks(lo, hi, members[place]), members[into])
    if np.any(sends.parent >= 0):
        return None
    count = len(members)

    def build() -> Plan:
        channels, copying = with_copies(request)
        made = one_shot(
            net,
            replace(sends, chunk=place[sends.chunk]),
            Chunks(lo[:count], hi[:count], members),
            pull=request.pull,
            reduce=request.reduce,
            copying=copying,
            produced=request.produced,
        )
        return all_reduced_plan(request, 1, made, channels)

    return Draft(sends.seconds, len(sends.chunk), (build,))


def _all_to_all(request: Request, pieces: int, style: Style) -> Draft:
    """Between members, block d of member s becomes block s of member d."""
    members, axis = np.array(request.members), request.shards.axis
    place, into = (side.reshape(-1) for side in np.indices(request.sent.shape))
    low, high, far = (side.reshape(len(place), -1) for side in block_boxes(request))
    lo, hi = cut_boxes(low, high, axis, pieces)
    parts = lo.shape[1]
    block = np.repeat(np.arange(len(place)), parts)
    lo, hi = lo.reshape(-1, lo.shape[-1]), hi.reshape(-1, hi.shape[-1])
    some = np.all(hi > lo, axis=1)
    block, lo, hi = block[some], lo[some], hi[some]
    stays = place[block] == into[block]
    moving = Chunks(lo[~stays], hi[~stays], members[place[block[~stays]]])
    target = members[into[block[~stays]]]
    sends = _delivered(request, moving, target, style.seed)

    def build() -> Plan:
        channels, copying = with_copies(request) if stays.any() else (request.network.channels, 0)
        made, extent = exchanging(
            request.network, sends, moving, target, moving.lo + far[block[~stays]], axis,
            pull=request.pull, produced=request.produced,
        )  # fmt: skip
        own = Chunks(lo[stays], hi[stays], members[place[block[stays]]])
        kept = keeping(own, copying, dst_lo=own.lo + far[block[stays]], produced=request.produced)
        return exchanged_plan(request, pieces, made, kept, extent, channels)

    return Draft(sends.seconds, len(sends.chunk) + int(stays.sum()), (build,))


def _resharding(request: Request, pieces: int, style: Style) -> Draft:
    """Shards along one axis become shards along another; blocks keep their coordinates."""
    before, after, members = request.shards, request.after, np.array(request.members)
    assert after is not None
    place, into = (side.reshape(-1) for side in np.indices((len(members),) * 2))
    lo = np.maximum(before.lo[place, 0], after.lo[into, 0])
    hi = np.minimum(before.hi[place, 0], after.hi[into, 0])
    moves = (place != into) & np.all(hi > lo, axis=1)
    lo, hi = cut_boxes(lo[moves], hi[moves], after.axis, pieces)
    parts = lo.shape[1]
    owner, target = (np.repeat(members[side[moves]], parts) for side in (place, into))
    lo, hi = lo.reshape(-1, lo.shape[-1]), hi.reshape(-1, hi.shape[-1])
    some = np.all(hi > lo, axis=1)
    chunks = Chunks(lo[some], hi[some], owner[some])
    sends = _delivered(request, chunks, target[some], style.seed)

    def build() -> Plan:
        made = gathering(
            request.network, sends, chunks, pull=request.pull, produced=request.produced
        )
        boxes = zip(request.members, before.boxes(), strict=True)
        return finished_plan(
            request,
            pieces,
            (Tensor(request.tensor, before.shape, request.dtype),),
            [Region(r, request.tensor, box, request.produced) for r, box in boxes],
            [
                Goal(r, request.tensor, b)
                for r, b in zip(request.members, after.boxes(), strict=True)
            ],
            made,
        )

    return Draft(sends.seconds, len(sends.chunk), (build,))


def _delivered(request: Request, chunks: Chunks, target: Array, seed: int | None = None) -> Sends:
    """Every chunk brought to its ``target`` [chunks]; ``seed``: in which order paths are chosen."""
    size = np.array(_bytes(request, chunks), np.float64)
    order = np.argsort((target - chunks.owner) % request.topology.num_ranks, kind="stable")
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(order))
    blocks = Blocks(chunks.owner[order], target[order], size[order])
    sends = deliver(request.network, blocks, request.pull)
    return replace(sends, chunk=order[sends.chunk])
