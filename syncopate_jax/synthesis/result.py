"""Transfers as the plan of a request: what its ranks start with and must end with, by kind."""

from __future__ import annotations

import numpy as np

from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.comm import DEFAULT_CHANNEL, REDUCTIONS
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ir.transfers import Transfers, join_transfers
from syncopate_jax.synthesis.request import Request

Array = np.ndarray

RELAY = "relay"
"""The tensor in which blocks of an all-to-all rest on ranks that hand them on."""


def gathered_plan(request: Request, pieces: int, made: Transfers) -> Plan:
    """An all-gather or a broadcast within one tensor."""
    heads = request.members if request.kind == "all_gather" else (request.root,)
    return finished_plan(
        request,
        pieces,
        (Tensor(request.tensor, request.shards.shape, request.dtype),),
        [
            Region(r, request.tensor, box, request.produced)
            for r, box in zip(heads, request.shards.boxes(), strict=True)
        ],
        [Goal(r, request.tensor, request.shards.full) for r in request.members],
        made,
    )


def reduced_plan(request: Request, pieces: int, made: Transfers) -> Plan:
    """A reduce-scatter within one tensor."""
    goals = [
        Goal(r, request.tensor, box, ranks=request.members, reduce=REDUCTIONS[request.reduce])
        for r, box in zip(request.members, request.shards.boxes(), strict=True)
    ]
    tensors = (Tensor(request.tensor, request.shards.shape, request.dtype, True),)
    return finished_plan(request, pieces, tensors, _partials(request), goals, made)


def all_reduced_plan(
    request: Request, pieces: int, made: Transfers, channels: tuple[str, ...]
) -> Plan:
    """An all-reduce from one tensor into another."""
    shape, full = request.shards.shape, request.shards.full
    tensors = (
        Tensor(request.tensor, shape, request.dtype, True),
        Tensor(request.out, shape, request.dtype),
    )
    how = REDUCTIONS[request.reduce]
    goals = [
        Goal(r, request.out, full, request.tensor, ranks=request.members, reduce=how)
        for r in request.members
    ]
    return finished_plan(request, pieces, tensors, _partials(request), goals, made, channels)


def block_boxes(request: Request) -> tuple[Array, Array, Array]:
    """Of an all-to-all [sources, destinations, d] where blocks begin and end, and how far they
    shift from sender to receiver."""
    sent, shape, axis = request.sent, request.shards.shape, request.shards.axis
    lo = np.zeros((*sent.shape, len(shape)), np.int64)
    hi = np.broadcast_to(np.array(shape, np.int64), lo.shape).copy()
    hi[..., axis] = np.cumsum(sent, axis=1)
    lo[..., axis] = hi[..., axis] - sent
    shift = np.zeros_like(lo)
    shift[..., axis] = np.cumsum(sent, axis=0) - sent - lo[..., axis]
    return lo, hi, shift


def exchanged_plan(
    request: Request,
    pieces: int,
    made: Transfers,
    kept: Transfers,
    extent: int,
    channels: tuple[str, ...],
) -> Plan:
    """An all-to-all of blocks from one tensor to another, by way of ``extent`` of a third.

    ``made`` moves blocks between ranks, ``kept`` copies those that stay.
    """
    sent, shape, axis = request.sent, request.shards.shape, request.shards.axis
    lo, hi, shift = block_boxes(request)
    into_lo, into_hi = lo + shift, hi + shift
    goals = [
        Goal(
            request.members[d],
            request.out,
            Box(tuple(into_lo[s, d].tolist()), tuple(into_hi[s, d].tolist())),
            request.tensor,
            tuple(lo[s, d].tolist()),
            (request.members[s],),
        )
        for s, d in np.argwhere(np.all(hi > lo, axis=-1)).tolist()
    ]
    received = (*shape[:axis], int(sent.sum(0).max(initial=0)), *shape[axis + 1 :])
    resting = (*shape[:axis], extent, *shape[axis + 1 :])
    tensors = [
        Tensor(request.tensor, shape, request.dtype, True),
        Tensor(request.out, received, request.dtype, True),
    ]
    if extent:
        tensors.append(Tensor(RELAY, resting, request.dtype, True))
    full = request.shards.full
    regions = [
        Region(r, request.tensor, full.with_axis(axis, 0, total), request.produced)
        for r, total in zip(request.members, sent.sum(1).tolist(), strict=True)
    ]
    # What tiles produce is best sent first; what is there already is best copied first.
    order = [made, kept] if request.produced else [kept, made]
    return finished_plan(
        request, pieces, tuple(tensors), regions, goals, join_transfers(order), channels
    )


def with_copies(request: Request) -> tuple[tuple[str, ...], int]:
    """The plan's channels with the one for copies within a rank, and its index."""
    name = request.network.copying_channel(request.where)
    channels = tuple(dict.fromkeys((*request.network.channels, name)))
    return channels, channels.index(name)


def finished_plan(
    request: Request,
    pieces: int,
    tensors: tuple[Tensor, ...],
    initial: list[Region],
    goals: list[Goal],
    made: Transfers,
    channels: tuple[str, ...] = (),
) -> Plan:
    """The plan of these parts, under the request's name and origin."""
    return Plan(
        name=request.where,
        num_ranks=request.topology.num_ranks,
        tensors=tensors,
        initial=tuple(sorted(region for region in initial if region.box.size)),
        goals=tuple(sorted(goal for goal in goals if goal.box.size)),
        columns=made.columns(),
        channels=channels or request.network.channels or (DEFAULT_CHANNEL,),
        origins=(request.origin(pieces),),
    )


def _partials(request: Request) -> list[Region]:
    """Every member holds a partial result of the whole tensor."""
    full, produced = request.shards.full, request.produced
    return [Region(r, request.tensor, full, produced) for r in request.members]
