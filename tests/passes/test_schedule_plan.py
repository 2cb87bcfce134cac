"""Schedules as a whole: every case gives NumPy's result, verifies, and is the same every time."""

from __future__ import annotations

import time
from dataclasses import fields

import numpy as np
import pytest

from syncopate_jax.check.verify import verify
from syncopate_jax.check.verify_schedule import verify_schedule
from syncopate_jax.ir.schedule import Rows, Schedule, describe
from syncopate_jax.passes.schedule_plan import dump, schedule_plan, schedule_stages
from tests.golden.compare import golden
from tests.passes.matmul_cases import CASES, boxed, gather, gather_and_scatter, scatter

OPTIONS = (
    {"workers": 1},
    {"workers": 3, "intra": "snake"},
    {"workers": 4, "intra": "grouped", "group": 2},
)


def same(a: Schedule, b: Schedule) -> bool:
    for field in fields(Schedule):
        one, other = getattr(a, field.name), getattr(b, field.name)
        pairs = [(one, other)]
        if isinstance(one, Rows):
            pairs = [(one.start, other.start), (one.values, other.values)]
        if field.name != "plan" and not all(np.array_equal(x, y) for x, y in pairs):
            return False
    return True


@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 5, 6))
@pytest.mark.parametrize("name", CASES)
def test_equals_numpy(name: str, ranks: int) -> None:
    case = CASES[name](ranks)
    assert verify(case.plan) == ()
    for seed, options in enumerate(OPTIONS):
        schedule = schedule_plan(*case.given, **options)
        assert verify_schedule(schedule, *case.given[1:]) == ()
        assert case.wrong(schedule, seed) == []


@pytest.mark.parametrize("name", CASES)
def test_accesses_box_by_box_make_no_difference(name: str) -> None:
    case = CASES[name](3)
    one = schedule_plan(*case.given, workers=2)
    other = schedule_plan(*boxed(case).given, workers=2)
    assert same(one, other)
    assert verify_schedule(other, *boxed(case).given[1:]) == ()


@pytest.mark.parametrize("name", CASES)
def test_all_waits_give_the_same_order_and_result(name: str) -> None:
    case = CASES[name](3)
    few = schedule_stages(*case.given, workers=2).schedule
    many = schedule_stages(*case.given, workers=2, minimal=False).schedule
    assert np.array_equal(few.order, many.order)
    assert np.array_equal(few.num_slots, many.num_slots)
    for table in ("waits", "k_waits", "e_waits"):
        assert len(getattr(few, table).values) <= len(getattr(many, table).values)
    assert verify_schedule(many, *case.given[1:]) == ()
    assert case.wrong(many, 0) == []


def test_no_plan_no_waits() -> None:
    case = gather("all_gather_ring", 1)
    schedule = schedule_plan(*case.given)
    assert schedule.num_slots.tolist() == [0]
    assert not len(schedule.waits.values)


def test_nothing_to_compute() -> None:
    case = gather("all_gather_ring", 2, m=0)
    schedule = schedule_plan(*case.given, intra="grouped")
    assert schedule.order.shape == (2, 0)
    assert verify_schedule(schedule, *case.given[1:]) == ()


GOLDEN = {
    "gather_m": lambda: gather("all_gather_ring", 3, m=6, tiles=(1, 2, 6)),
    "gather_k": lambda: gather("all_gather_swizzle", 3, m=2, axis=1, tiles=(1, 4, 1)),
    "scatter_ring": lambda: scatter("reduce_scatter_ring", 3, m=3, tiles=(1, 2, 5)),
    "all_reduce": lambda: scatter("all_reduce_two_shot", 2, m=4, tiles=(1, 4, 5)),
    "gather_and_scatter": lambda: gather_and_scatter(2, m=4),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_text_of_every_stage(name: str) -> None:
    case = GOLDEN[name]()
    stages = schedule_stages(*case.given)
    found = "\n".join(dump(stages, rank) for rank in range(case.plan.num_ranks))
    assert found == golden(f"passes/{name}.txt", found)


def test_the_last_stage_is_the_schedule() -> None:
    case = scatter("reduce_scatter_direct", 2, m=4)
    stages = schedule_stages(*case.given)
    assert same(stages.schedule, schedule_plan(*case.given))
    assert dump(stages, 1).endswith(describe(stages.schedule, 1) + "\n")


@pytest.mark.parametrize("axis", (0, 1))
def test_thousands_of_tiles_take_milliseconds(axis: int) -> None:
    """8 ranks, split 8, 64 x 32 tiles; some 7 ms of processor time, with room for slow machines."""
    case = gather("all_gather_swizzle", 8, m=64 * 8, k=64, axis=axis, tiles=(8, 1, 1), split=8)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        schedule_plan(*case.given, workers=132, intra="grouped")
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1
