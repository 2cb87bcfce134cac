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
from syncopate_jax.registry import templates
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


SEEDS = [pytest.param(s, marks=[] if s < 6 else pytest.mark.slow) for s in range(80)]


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


def bfloat16_errors(name: str, home: str, **options: Any) -> float:
    """Of the sums of 8 bfloat16 partials, relative to float64."""
    plan = templates.get(name)(8, (16, 64), dtype="bfloat16", **options)
    parts = np.random.default_rng(0).standard_normal((8, 16, 64)).astype(jnp.bfloat16)
    empty = np.zeros((16, 64), jnp.bfloat16)
    held = {
        (r, t.name): parts[r] if t.name == "y" else empty for r in range(8) for t in plan.tensors
    }
    out = np.asarray(run_stepwise(plan, held)[home], np.float64)
    wanted = parts.astype(np.float64).sum(0)
    errors = [cases.error(out[g.rank][g.box.slices], wanted[g.box.slices]) for g in plan.goals]
    return max(errors)


def test_hops_round_no_more_often_than_direct_sums() -> None:
    """One rounding of a bfloat16 is an error of at most 2**-9, some 2**-10 on average."""
    direct = bfloat16_errors("reduce_scatter_direct", "y")
    assert direct < 2.0**-9
    assert bfloat16_errors("reduce_scatter_ring", "y") <= 1.1 * direct
    for options in ({}, {"algorithm": "ring"}, {"most_listed": 4}):
        assert bfloat16_errors("all_reduce_two_shot", "out", **options) <= 1.1 * direct
    assert bfloat16_errors("all_reduce_one_shot", "out") <= 1.1 * direct


def test_sums_of_large_integers_are_exact() -> None:
    plan = templates.get("reduce_scatter_ring")(3, (3, 2), dtype="int32")
    held = {(r, "y"): np.full((3, 2), 2**24 + r, np.int32) for r in range(3)}
    found = np.asarray(run_stepwise(plan, held)["y"])
    for r in range(3):
        np.testing.assert_array_equal(found[r, r], 3 * 2**24 + 3)


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
