"""Any plan, run with ``ppermute``, gives what the oracle gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.backends import stepwise
from syncopate_jax.backends.buffers import Buffer
from syncopate_jax.check.execute import execute
from syncopate_jax.errors import DeadlockError
from syncopate_jax.ir.comm import OpDep
from syncopate_jax.ir.plan import Plan
from syncopate_jax.passes.expand_collectives import expand_collectives
from tests.check.random_plans import random_plan
from tests.check.small_plans import goal, plan_of, push, random_values, region
from tests.ops import cases


def start_of(plan: Plan) -> dict[tuple[int, str], np.ndarray]:
    """Every rank's buffers before the plan runs; NaN where it holds nothing."""
    values = random_values(plan)
    held = {
        (r, t.name): np.full(t.shape, np.nan, np.float32)
        for r in range(plan.num_ranks)
        for t in plan.tensors
    }
    for region_ in plan.initial:
        source = values[region_.tensor]
        source = source[region_.rank] if plan.tensor(region_.tensor).per_rank else source
        where = region_.box.slices
        held[region_.rank, region_.tensor][where] = source[where]
    return held


def run_stepwise(plan: Plan, held: dict[tuple[int, str], np.ndarray]) -> Any:
    ranks = plan.num_ranks
    buffers = {
        t.name: Buffer(
            t.name, "whole", np.zeros((ranks, len(t.shape)), int), np.tile(t.shape, (ranks, 1))
        )
        for t in plan.tensors
    }
    stacked = {
        t.name: jnp.asarray(np.stack([held[r, t.name] for r in range(ranks)])) for t in plan.tensors
    }

    def body(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        local = {name: x[0] for name, x in arrays.items()}
        return {n: x[None] for n, x in stepwise.run(plan, buffers, local, ("t",)).items()}

    fn = jax.shard_map(
        body, mesh=cases.ranks_mesh(ranks), in_specs=jax.P("t"), out_specs=jax.P("t")
    )
    return jax.jit(fn)(stacked)


SEEDS = [pytest.param(s, marks=[] if s < 16 else pytest.mark.slow) for s in range(80)]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_plans_give_what_the_oracle_gives(seed: int) -> None:
    plan = expand_collectives(random_plan(seed))
    held = start_of(plan)
    starts = {(r.rank, r.tensor) for r in plan.initial}
    wanted = execute(plan, {key: np.nan_to_num(held[key]) for key in starts})
    found = run_stepwise(plan, held)
    assert plan.goals or plan.num_ranks == 1
    for one in plan.goals:
        where = one.box.slices
        np.testing.assert_array_equal(
            np.asarray(found[one.tensor])[one.rank][where], wanted[one.rank, one.tensor][where]
        )


def test_rounds_join_operations_alike_in_shape() -> None:
    swap = plan_of(
        [push(0, 1, "x[0:2,0:6]")], [push(1, 0, "x[2:4,0:6]")],
        initial=[region(0, "x[0:2,0:6]"), region(1, "x[2:4,0:6]")],
        goals=[goal(0, "x[0:4,0:6]"), goal(1, "x[0:4,0:6]")],
    )  # fmt: skip
    assert [r.rows for r in stepwise.rounds(swap)] == [(0, 1)]


def test_a_rank_sends_once_a_round() -> None:
    one_to_all = plan_of(
        [push(0, 1, "x[0:4,0:6]"), push(0, 2, "x[0:4,0:6]")], [], [],
        initial=[region(0, "x[0:4,0:6]")],
        goals=[goal(1, "x[0:4,0:6]"), goal(2, "x[0:4,0:6]")],
    )  # fmt: skip
    assert [r.rows for r in stepwise.rounds(one_to_all)] == [(0,), (1,)]


def test_a_circle_of_dependencies() -> None:
    circle = plan_of(
        [push(0, 1, "x[0:2,0:6]", deps=(OpDep(1, 0),))],
        [push(1, 0, "x[2:4,0:6]", deps=(OpDep(0, 0),))],
        initial=[region(0, "x[0:2,0:6]"), region(1, "x[2:4,0:6]")], goals=[],
    )  # fmt: skip
    with pytest.raises(
        DeadlockError,
        match=r"plan small: 2 operations wait for each other in a circle; run check.verify",
    ):
        stepwise.rounds(circle)
