"""Plans that operators refuse, as they exchange something else, and plans that they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from syncopate_jax.check.verify import verify
from syncopate_jax.errors import PlanError
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ops import all_gather_matmul, matmul_reduce_scatter
from syncopate_jax.plans.all_gather_swizzle import all_gather_swizzle
from syncopate_jax.plans.reduce_scatter_direct import reduce_scatter_direct
from tests.ops.refusals import BACKENDS, W, X, local, refused


def gather_plan(ranks: int, **changes: Any) -> Any:
    given = {"shape": (ranks, 1, 4, 8), "dtype": "float32", "split_axis": 2} | changes
    return all_gather_swizzle(ranks, **given)


def pushed_plan(name: str, value: Callable[[int, int], int | None]) -> Plan:
    """Rank r begins with block r of x and ends in block b with block ``value(r, b)``, if any."""
    ranks, shape = 4, (4, 1, 4, 8)
    blocks = Box.full(shape).split(0, ranks)
    goals, ops = [], [[] for _ in range(ranks)]
    for rank in range(ranks):
        for into, box in enumerate(blocks):
            source = value(rank, into)
            if source is None:
                continue
            goals.append(Goal(rank, "x", box, "x", blocks[source].lo))
            if into != rank:
                ends = Chunk("x", blocks[source]), Chunk("x", box)
                ops[source].append(P2P(source, source, rank, *ends))
    initial = [Region(r, "x", box) for r, box in enumerate(blocks)]
    return build_plan(name, ranks, [Tensor("x", shape, "float32")], initial, goals, ops)


def holey_plan() -> Plan:
    """An all-gather but for block 1, which never reaches rank 0: the corners are as they ought."""
    return pushed_plan("holey", lambda rank, into: None if (rank, into) == (0, 1) else into)


def swapped_plan() -> Plan:
    """An all-gather but for blocks 1 and 2 of rank 0: each lands where the other should."""
    return pushed_plan("swapped", lambda rank, into: (0, 2, 1, 3)[into] if rank == 0 else into)


PLANS = [
    (gather_plan(3), "its number of ranks is 3, this all_gather needs 2; start from template"),
    (gather_plan(2, dtype="bfloat16"), "its dtype is bfloat16, this all_gather needs float32"),
    (gather_plan(2, shape=(2, 1, 5, 8)), "its shape is (2, 1, 5, 8), this all_gather needs (2, 1"),
    (gather_plan(2, axis=3), "rank 0 begins without x[0:1,0:1,0:4,4:8], this all_gather needs it"),
    (
        replace(gather_plan(2), goals=gather_plan(2).goals[:1]),
        "rank 1 ends without x[0:2,0:1,0:4,0:8], this all_gather needs it there; start from",
    ),
    (
        "broadcast",
        "plan broadcast: rank 1 begins without x[1:2,0:1,0:4,0:8], this all_gather needs it there",
    ),
    (
        "reduce_scatter_direct",
        "plan reduce_scatter_direct: tiles of rank 0 produce x[0:1,0:1,0:4,0:8], this all_gather "
        "needs it to be there at the start",
    ),
    (
        replace(gather_plan(2), initial=(Region(1, "x", Box((0,) * 4, (2, 1, 4, 8))),)),
        "rank 0 begins without x[0:1,0:1,0:4,0:8], this all_gather needs it there",
    ),
    (
        replace(
            gather_plan(2),
            initial=(*gather_plan(2).initial, Region(1, "x", Box((0,) * 4, (1, 1, 2, 8)))),
        ),
        "rank 1 begins with x[0:1,0:1,0:2,0:8], this all_gather needs none there",
    ),
    (holey_plan(), "plan holey: rank 0 ends without x[1:2,0:1,0:4,0:8], this all_gather needs it"),
    (
        swapped_plan(),
        "plan swapped: rank 0 has x[2:3,0:1,0:4,0:8] in x[1:2,0:1,0:4,0:8], this all_gather needs "
        "x[1:2,0:1,0:4,0:8]; start from",
    ),
    ("all_to_all_waves", "plan: template 'all_to_all_waves' makes no all_gather, it takes no axis"),
]


@pytest.mark.parametrize("plan,text", PLANS, ids=range(len(PLANS)))
def test_plans_of_another_exchange(plan: Any, text: str) -> None:
    ranks = 4 if isinstance(plan, Plan) and plan.num_ranks == 4 else 2
    for backend in BACKENDS:  # what does not use a plan says the same of it
        with refused(text):
            local(all_gather_matmul, X, W, backend=backend, plan=plan, ranks=ranks)
    with refused(text):
        local(all_gather_matmul, X, W, plan=plan, return_gathered=True, ranks=ranks)


@pytest.mark.parametrize("plan", [holey_plan(), swapped_plan()], ids=lambda plan: plan.name)
def test_plans_of_other_blocks_are_sound_in_themselves(plan: Plan) -> None:
    assert verify(plan) == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_goals_in_as_many_parts_as_one_likes(backend: str) -> None:
    plan = gather_plan(2)
    goals = tuple(replace(g, box=b) for g in plan.goals for b in reversed(g.box.split(2, 3)))
    assert local(all_gather_matmul, X, W, backend=backend, plan=replace(plan, goals=goals))


def test_plans_that_do_not_verify() -> None:
    plan = gather_plan(2)
    silent = plan.with_columns(gather_plan(1, shape=(1, 1, 4, 8)).columns)
    for backend in BACKENDS:
        with pytest.raises(PlanError, match="all_gather_swizzle: 2 finding"):
            local(all_gather_matmul, X, W, backend=backend, plan=silent)


def test_plans_of_another_reduction() -> None:
    plan = reduce_scatter_direct(2, (2, 1, 2, 6), dtype="float32", split_axis=2, reduce="max")
    y = "y[0:1,0:1,0:2,0:6]"
    with refused(
        f"rank 0 has the max of {y} over ranks (0, 1) in {y}, this reduce_scatter needs the sum of "
        f"{y} over ranks (0, 1); start from"
    ):
        local(matmul_reduce_scatter, X, W, backend="remote_dma", plan=plan)


def test_a_plan_may_be_the_users_own() -> None:
    for backend in BACKENDS:
        shape = local(all_gather_matmul, X, W, backend=backend, plan=gather_plan(2, split=2)).shape
        assert shape == (2 * 8, 6)  # out_specs joins the two ranks' results
    assert local(all_gather_matmul, X, W[:, :0], plan=gather_plan(3)).size == 0
