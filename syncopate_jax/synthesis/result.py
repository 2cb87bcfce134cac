"""Transfers as the plan of a request: what its ranks start with and must end with, by kind."""

from __future__ import annotations

from syncopate_jax.ir.comm import DEFAULT_CHANNEL, REDUCTIONS
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ir.transfers import Transfers
from syncopate_jax.synthesis.request import Request


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
