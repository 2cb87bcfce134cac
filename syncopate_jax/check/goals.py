"""Running a plan on given values and comparing what its goals ask for with what they got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.buffers import COMBINE
from syncopate_jax.check.collectives import MAX, find_instances, find_transfers
from syncopate_jax.check.execute import execute
from syncopate_jax.check.flow import find_flow
from syncopate_jax.check.order import happens_before
from syncopate_jax.check.report import Report
from syncopate_jax.check.values import run_fingerprints
from syncopate_jax.errors import InputError
from syncopate_jax.ir.plan import Goal, Plan

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One goal of a plan: what its rank holds in the end, and what it should hold."""

    goal: Goal
    found: Array
    expected: Array


def run_goals(
    plan: Plan,
    values: Mapping[str, Array],
    *,
    seed: int | None = None,
    accumulate: type[np.floating] = np.float64,
) -> tuple[Outcome, ...]:
    """Executes ``plan`` on ``values`` and returns what every goal got and should have got.

    ``values`` has for each tensor with initial regions or goals an array of its shape, with a
    leading axis over ranks if it is per rank. Other arguments and errors are those of
    ``execute``; InputError also when a value is missing or of another shape.
    """
    arrays = {}
    sources = {goal.source_chunk.tensor for goal in plan.goals}
    for name in sorted(sources | {region.tensor for region in plan.initial}):
        tensor = plan.tensor(name)
        shape = (plan.num_ranks, *tensor.shape) if tensor.per_rank else tensor.shape
        if name not in values or np.shape(values[name]) != shape:
            found = np.shape(values[name]) if name in values else "nothing"
            raise InputError(
                f"plan {plan.name}: the value of tensor {name} must have shape {shape}, "
                f"found {found}"
            )
        arrays[name] = np.asarray(values[name]).astype(accumulate)
    inputs = {
        (rank, name): array[rank] if plan.tensor(name).per_rank else array
        for name, array in arrays.items()
        for rank in range(plan.num_ranks)
    }
    held = execute(plan, inputs, seed=seed, accumulate=accumulate)
    reductions = goal_reductions(plan)
    return tuple(
        Outcome(
            goal,
            held[goal.rank, goal.tensor][goal.box.slices],
            _expected(plan, goal, arrays, reduction),
        )
        for goal, reduction in zip(plan.goals, reductions, strict=True)
    )


def goal_reductions(plan: Plan) -> tuple[str, ...]:
    """``sum`` or ``max`` for each goal: how the operations that lead to it reduce.

    A goal that no reduction leads to, or both kinds, counts as ``sum``. The plan must be one that
    ``execute`` accepts and finishes.
    """
    if not np.any(plan.columns.reduce == MAX):
        return ("sum",) * len(plan.goals)
    instances = find_instances(plan, Report(plan))
    transfers = find_transfers(plan, instances)
    order = happens_before(plan, instances, transfers)
    flow = find_flow(plan, transfers, order)
    per_rank = np.array([tensor.per_rank for tensor in plan.tensors], bool)
    kinds = run_fingerprints(flow, per_rank).kinds[flow.goal_at]
    by_goal = np.zeros(len(plan.goals), np.uint8)
    np.bitwise_or.at(by_goal, flow.goals.index[flow.goal], kinds)
    return tuple("max" if kind == 1 << MAX else "sum" for kind in by_goal.tolist())


def _expected(plan: Plan, goal: Goal, arrays: Mapping[str, Array], reduction: str) -> Array:
    source = goal.source_chunk
    if not plan.tensor(source.tensor).per_rank:
        shared: Array = arrays[source.tensor][source.box.slices]
        return shared
    parts = [arrays[source.tensor][rank][source.box.slices] for rank in goal.ranks]
    total: Array = parts[0]
    for part in parts[1:]:
        total = COMBINE[reduction](total, part)
    return total
