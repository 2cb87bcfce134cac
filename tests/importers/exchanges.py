"""What every rank must get from an imported collective, in NumPy, and what its plan gives it."""

from __future__ import annotations

import numpy as np

from syncopate_jax.check.execute import execute
from syncopate_jax.check.verify import verify
from syncopate_jax.importers.exchange import RESULT, SOURCE
from syncopate_jax.importers.program import ImportedCollective
from syncopate_jax.ir.plan import Plan
from syncopate_jax.passes.expand_collectives import expand_collectives

COMBINE = {"sum": np.sum, "max": np.max}


def expected(what: ImportedCollective, given: np.ndarray) -> dict[int, np.ndarray]:
    """``given``: what each rank contributes, ranks first."""
    if what.kind == "permute":
        return {dst: given[src] for src, dst in what.groups}
    found = {}
    for group in what.groups:
        parts = [given[rank] for rank in group]
        for place, rank in enumerate(group):
            if what.kind == "broadcast":
                found[rank] = parts[0]
            elif what.kind == "all_gather":
                found[rank] = np.concatenate(parts, what.concat_axis)
            elif what.kind == "all_to_all":
                cut = [np.split(part, len(group), what.split_axis)[place] for part in parts]
                found[rank] = np.concatenate(cut, what.concat_axis)
            else:
                total = COMBINE[what.reduce](parts, axis=0)
                scatters = what.kind == "reduce_scatter"
                cut = np.split(total, len(group), what.split_axis) if scatters else [total]
                found[rank] = cut[place] if scatters else total
    return found


def lowerings(what: ImportedCollective) -> list[Plan]:
    """The plan whole, and as transfers."""
    plan = what.plan()
    return [plan, expand_collectives(plan, choose=what.choose)]


def assert_right(what: ImportedCollective, seed: int | None = 1) -> None:
    """Every lowering verifies, and gives every rank what it must get."""
    for plan in lowerings(what):
        assert_plan_right(what, plan, seed)


def assert_plan_right(what: ImportedCollective, plan: Plan, seed: int | None = 1) -> None:
    """The plan verifies, and gives every rank what it must get from the collective."""
    rng = np.random.default_rng(len(what.name))
    given = rng.integers(-9, 10, (what.num_ranks, *what.shape)).astype(np.float64)
    assert verify(plan) == (), str(what)
    inputs = {(region.rank, SOURCE): given[region.rank] for region in plan.initial}
    held = execute(plan, inputs, seed=seed)
    assert plan.tensor(RESULT).shape == what.result
    for rank, array in expected(what, given).items():
        np.testing.assert_array_equal(held[rank, RESULT], array, str(what))
