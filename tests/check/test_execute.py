"""The NumPy oracle: what it computes, in which orders, and how it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.check.goals import run_goals
from syncopate_jax.errors import DeadlockError, InputError, PlanError
from syncopate_jax.ir.comm import ComputeDep, OpDep
from syncopate_jax.ir.plan import Plan
from tests.check.small_plans import (
    chunk,
    collective,
    goal,
    halves,
    plan_of,
    push,
    random_values,
    region,
    relay,
    with_column,
)

WHOLE, PART = "x[0:4,0:6]", "y[0:4,0:6]"
ORDERS = (None, *range(60))


def numbers(start: int = 0) -> np.ndarray:
    return np.arange(start, start + 24.0).reshape(4, 6)


def test_halves_are_swapped_and_the_rest_is_poison() -> None:
    held = execute(halves(), {(0, "x"): numbers(), (1, "x"): numbers(100)})
    expected = np.concatenate([numbers()[:2], numbers(100)[2:]])
    for rank in range(2):
        assert np.array_equal(held[rank, "x"], expected)
        assert np.isnan(held[rank, "y"]).all()


def test_results_have_the_accumulator_type() -> None:
    inputs = {(r, "x"): numbers().astype(np.int32) for r in range(2)}
    assert execute(halves(), inputs, accumulate=np.float32)[0, "x"].dtype == np.float32
    assert execute(halves(), inputs)[0, "x"].dtype == np.float64


def test_reduction_in_float32_rounds_as_float32_does() -> None:
    plan = plan_of(
        [], [push(1, 0, PART, reduce="sum")],
        initial=[region(0, PART), region(1, PART)], goals=[goal(0, PART, 0, 1)],
    )  # fmt: skip
    inputs = {(0, "y"): np.full((4, 6), 2.0**24), (1, "y"): np.ones((4, 6))}
    assert execute(plan, inputs, accumulate=np.float32)[0, "y"][0, 0] == 2.0**24
    assert execute(plan, inputs)[0, "y"][0, 0] == 2.0**24 + 1


def all_right(plan: Plan, seed: int | None = None) -> bool:
    outcomes = run_goals(plan, random_values(plan), seed=seed)
    return all(np.array_equal(one.found, one.expected) for one in outcomes)


def test_right_in_every_order() -> None:
    assert all(all_right(relay(deps=(OpDep(0, 0),)), seed) for seed in ORDERS)


def test_a_race_shows_in_some_order() -> None:
    results = {all_right(relay(), seed) for seed in ORDERS}
    assert results == {True, False}


def test_a_forgotten_wait_for_tiles_shows_in_some_order() -> None:
    plan = relay(True, deps=(OpDep(0, 0),))
    assert all_right(plan, None)
    assert not all(all_right(plan, seed) for seed in ORDERS)


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_reduction_may_meet_what_tiles_have_yet_to_produce(reduce: str) -> None:
    plan = plan_of(
        [], [push(1, 0, PART, reduce=reduce)], [push(2, 0, PART, reduce=reduce)],
        initial=[region(0, PART, True), region(1, PART), region(2, PART)],
        goals=[goal(0, PART, 0, 1, 2, reduce=reduce)],
    )  # fmt: skip
    assert all(all_right(plan, seed) for seed in ORDERS)


def test_plain_write_is_lost_when_tiles_come_later() -> None:
    plan = plan_of(
        [], [push(1, 0, PART)],
        initial=[region(0, PART, True), region(1, PART)], goals=[goal(0, PART, 1)],
    )  # fmt: skip
    assert {all_right(plan, seed) for seed in ORDERS} == {True, False}


def test_tiles_that_nobody_produces_are_not_waited_for() -> None:
    plan = relay(deps=(OpDep(0, 0), ComputeDep(1, chunk("x[0:1,0:6]"))))
    assert all_right(plan, 3)


COLLECTIVES = {
    "all_gather": (("x[0:1,0:6]", "x[1:4,0:6]"), (WHOLE, WHOLE), {"concat_axis": 0}),
    "reduce_scatter": (
        (PART, PART),
        ("y[0:1,0:6]", "y[1:4,0:6]"),
        {"split_axis": 0, "reduce": "sum"},
    ),
    "all_reduce": ((PART, PART), (WHOLE, WHOLE), {"reduce": "max"}),
    "all_to_all": (
        ("x[0:1,0:6]", "x[1:4,0:6]"),
        ("y[0:4,0:4]", "y[0:4,4:6]"),
        {"split_axis": 1, "concat_axis": 0},
    ),
    "broadcast": ((WHOLE, "x[0:4,0:6]"), (PART, PART), {}),
}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_compute_what_they_say(kind: str) -> None:
    srcs, dsts, more = COLLECTIVES[kind]
    plan = plan_of(
        *[[collective(r, kind, srcs[r], dsts[r], 0, 1, **more)] for r in range(2)],
        initial=[region(r, srcs[r]) for r in range(2)],
        goals=[],
    )
    ranks = [numbers(), numbers(100)]
    joined = np.concatenate([ranks[0][:1], ranks[1][1:]])
    expected = {
        "all_gather": [joined, joined],
        "reduce_scatter": [(ranks[0] + ranks[1])[:1], (ranks[0] + ranks[1])[1:]],
        "all_reduce": [ranks[1], ranks[1]],
        "all_to_all": [joined[:, :4], joined[:, 4:]],
        "broadcast": [ranks[0], ranks[0]],
    }[kind]
    inputs = {(r, name): ranks[r] for r in range(2) for name in ("x", "y")}
    for seed in (None, 1, 2):
        held = execute(plan, inputs, seed=seed)
        for rank in range(2):
            where = chunk(dsts[rank])
            found = held[rank, where.tensor][where.box.slices]
            assert np.array_equal(found, expected[rank])


def test_malformed_plans_are_refused() -> None:
    with pytest.raises(PlanError, match=r"small: 1 finding\(s\)\n  rank 0 op 0 \[bad-index\]"):
        execute(with_column(halves(), "channel", 0, 4), {})


def test_missing_and_misshapen_inputs() -> None:
    text = r"plan small: the input of tensor x on rank 1 must have shape \(4, 6\), found nothing"
    with pytest.raises(InputError, match=text):
        execute(halves(), {(0, "x"): numbers()})
    with pytest.raises(InputError, match=r"must have shape \(4, 6\), found \(2, 6\)"):
        execute(halves(), {(0, "x"): numbers()[:2], (1, "x"): numbers()})


def test_missing_and_misshapen_values() -> None:
    text = r"plan small: the value of tensor x must have shape \(4, 6\), found nothing"
    with pytest.raises(InputError, match=text):
        run_goals(halves(), {})
    plan = plan_of([], [], initial=[region(0, PART)], goals=[])
    with pytest.raises(InputError, match=r"shape \(2, 4, 6\), found \(4, 6\)"):
        run_goals(plan, {"y": numbers()})


def test_deadlock_names_who_waits_for_what() -> None:
    plan = plan_of(
        [push(0, 1, WHOLE, deps=(OpDep(1, 0),))], [push(1, 0, WHOLE, deps=(OpDep(0, 0),))],
        initial=[region(0, WHOLE)], goals=[],
    )  # fmt: skip
    text = r"small: deadlock: r0\.0 waits for r1\.0; r1\.0 waits for r0\.0$"
    with pytest.raises(DeadlockError, match=text):
        execute(plan, {(0, "x"): numbers()})


def test_deadlock_of_collectives_names_the_absent() -> None:
    gives = [collective(r, "broadcast", WHOLE, WHOLE, 0, 1) for r in range(2)]
    other = [collective(r, "broadcast", PART, PART, 1, 0) for r in range(2)]
    plan = plan_of([gives[0], other[0]], [other[1], gives[1]], initial=[], goals=[])
    text = r"r0\.0 waits for its members r1\.1; r1\.0 waits for its members r0\.1$"
    with pytest.raises(DeadlockError, match=text):
        execute(plan, {})


def test_deadlock_of_many_is_cut_short() -> None:
    ring = [[push(r, r, WHOLE, PART, deps=(OpDep((r + 1) % 11, 0),))] for r in range(11)]
    with pytest.raises(DeadlockError, match=r"r7\.0 waits for r8\.0; and 3 more$"):
        execute(plan_of(*ring, initial=[], goals=[]), {})


@pytest.mark.parametrize("kinds", [("sum", "max"), ("max", "sum")])
def test_goals_are_reduced_as_they_say(kinds: tuple[str, str]) -> None:
    top, bottom = "y[0:2,0:6]", "y[2:4,0:6]"
    both = list(zip((top, bottom), kinds, strict=True))
    plan = plan_of(
        [], [push(1, 0, half, reduce=kind) for half, kind in both],
        initial=[region(0, PART), region(1, PART)],
        goals=[goal(0, half, 0, 1, reduce=kind) for half, kind in both],
    )  # fmt: skip
    assert all_right(plan)
    values = random_values(plan)
    for one, kind in zip(run_goals(plan, values), kinds, strict=True):
        parts = values["y"][(slice(None), *one.goal.box.slices)]
        assert np.array_equal(one.expected, parts.sum(0) if kind == "sum" else parts.max(0))
