"""Do ranks that end with the same data end with the same bits of it?

Sums of floating-point numbers depend on the order of adding, and who adds for itself begins with
its own part, and with digits that are rounded where they travel. So ranks have the same bits for
certain only of what was added up in one place and copied from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

import numpy as np

from syncopate_jax.check.collectives import PLAIN, find_transfers
from syncopate_jax.check.flow import Flow, find_flow
from syncopate_jax.check.order import happens_before
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir.plan import Plan

Array = np.ndarray


def ends_alike(plan: Plan, tensors: Collection[str]) -> bool:
    """Whether all ranks end with the same bits in ``tensors``, as far as the plan shows.

    Args:
      plan: verified, of P2P operations alone.
    """
    goals: list[set[object]] = [set() for _ in range(plan.num_ranks)]
    for goal in plan.goals:
        if goal.tensor in tensors and goal.box.size:
            goals[goal.rank].add(
                (goal.tensor, goal.box, goal.source_chunk, frozenset(goal.ranks), goal.reduce)
            )
    if not all(one == goals[0] for one in goals):
        return False
    if plan.num_ranks == 1 or not np.any(plan.columns.reduce != PLAIN):
        return True
    transfers = find_transfers(plan, [])
    try:
        flow = find_flow(plan, transfers, happens_before(plan, [], transfers))
    except UnsupportedError:  # of too many pieces, which verify refuses
        return False
    return _made_once(plan, flow, tensors)


def _made_once(plan: Plan, flow: Flow, tensors: Collection[str]) -> bool:
    """Whether an element of a goal was last added to at the same place, whichever rank has it."""
    wanted = np.isin(flow.goals.tensor, [plan.tensor_index(name) for name in tensors])
    kept = wanted[flow.goal]
    at = flow.goal_at[kept]
    atom, origin = flow.atom[at], _origins(plan, flow)[at]
    order = np.lexsort((origin, atom))
    same = np.diff(atom[order]) == 0
    return not np.any(same & (np.diff(origin[order]) != 0))


def _origins(plan: Plan, flow: Flow) -> Array:
    """[locations] a number for the value each ends with, that copies share.

    Sums have one that no other place and level has. What is there at the start is told apart by
    rank in tensors that differ from rank to rank, and by element alone in others.
    """
    count = len(flow.rank)
    per_rank = np.array([tensor.per_rank for tensor in plan.tensors], bool)
    tensor = np.searchsorted(flow.grid.offset, flow.atom, side="right") - 1
    origin = np.where(per_rank[tensor], np.arange(count), -1 - flow.atom)
    for level, (begin, end) in enumerate(itertools.pairwise(flow.batches.tolist())):
        src, dst = flow.src[begin:end], flow.dst[begin:end]
        plain = flow.reduce[begin:end] == PLAIN
        brought = origin[src[plain]]
        origin[dst[~plain]] = dst[~plain] + (level + 1) * count
        origin[dst[plain]] = brought
    return origin
