"""Running a plan on given values and comparing what its goals ask for with what they got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.buffers import COMBINE
from syncopate_jax.check.execute import execute
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
    ``execute``; it also raises InputError when a value is missing or of another shape.
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
    return tuple(
        Outcome(goal, held[goal.rank, goal.tensor][goal.box.slices], _expected(plan, goal, arrays))
        for goal in plan.goals
    )


def _expected(plan: Plan, goal: Goal, arrays: Mapping[str, Array]) -> Array:
    source = goal.source_chunk
    if not plan.tensor(source.tensor).per_rank:
        shared: Array = arrays[source.tensor][source.box.slices]
        return shared
    parts = [arrays[source.tensor][rank][source.box.slices] for rank in goal.ranks]
    total: Array = parts[0]
    for part in parts[1:]:
        total = COMBINE[goal.reduce](total, part)
    return total
