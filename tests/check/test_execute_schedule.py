"""The oracle for schedules: what it computes is tested with the passes, here what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from syncopate_jax.check.execute_schedule import execute_schedule
from syncopate_jax.errors import DeadlockError, InputError, PlanError, UnsupportedError
from syncopate_jax.kernel.access import Access
from syncopate_jax.passes.schedule_plan import schedule_plan
from syncopate_jax.registry import templates
from tests.check.schedule_mutations import listed, with_rows
from tests.passes.matmul_cases import Case, gather, scatter


@pytest.fixture(scope="module")
def case() -> Case:
    return gather("all_gather_swizzle", 2, m=4, k=6, tiles=(2, 2, 3))


def test_seeds_differ_and_repeat(case: Case) -> None:
    """The order in which ranks compute tiles depends on the seed, and on nothing else."""

    def order(seed: int) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        def tile(rank: int, tile: int, step: int, blocks: dict) -> dict:
            seen.append((rank, tile))
            return case.tile(rank, tile, step, blocks)

        execute_schedule(schedule_plan(*case.given), *case.given[1:], tile, case.inputs, seed)
        return seen

    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(6)}) > 2


def test_what_is_not_written_is_nan(case: Case) -> None:
    schedule = schedule_plan(*case.given)
    signals = listed(schedule.op_signals)
    alone = with_rows(schedule, "waits", [[] for _ in range(schedule.waits.rows)])
    alone = with_rows(alone, "op_signals", [[] for _ in signals])
    early = [case.run(alone, seed)[0, "y"] for seed in range(8)]
    assert all(np.isfinite(y[:2]).all() for y in early)
    assert any(np.isnan(y[2:]).all() for y in early)


def test_accumulates_in_the_type_asked_for(case: Case) -> None:
    schedule = schedule_plan(*case.given)
    found = execute_schedule(
        schedule, *case.given[1:], case.tile, case.inputs, accumulate=np.float32
    )
    assert found[0, "y"].dtype == np.float32
    np.testing.assert_allclose(found[0, "y"], case.expected[0, "y"][1], rtol=1e-5)


def test_a_deadlock_names_who_waits(case: Case) -> None:
    schedule = schedule_plan(*case.given)
    mute = with_rows(schedule, "op_signals", [[], []])
    with pytest.raises(DeadlockError) as caught:
        case.run(mute, 0)
    assert str(caught.value) == (
        "schedule of all_gather_swizzle: deadlock: tile 0 (rank 1, position 2) waits for slot "
        "r1:0 to reach 1, it is 0; tile 2 (rank 0, position 2) waits for slot r0:0 to reach 1, "
        "it is 0"
    )


def test_a_long_deadlock_is_cut_short() -> None:
    case = gather("all_gather_swizzle", 2, m=24, k=6, tiles=(1, 2, 6))
    schedule = schedule_plan(*case.given, workers=12)
    mute = with_rows(schedule, "op_signals", [[], []])
    with pytest.raises(DeadlockError, match=r"; and 16 more$"):
        case.run(mute, 0)


def test_inputs_must_be_there(case: Case) -> None:
    schedule = schedule_plan(*case.given)
    with pytest.raises(InputError, match=r"inputs\[0, 'x'\] must be an array of shape \(4, 6\)"):
        execute_schedule(schedule, *case.given[1:], case.tile, {})


def test_malformed_tables(case: Case) -> None:
    schedule = replace(schedule_plan(*case.given), workers=0)
    with pytest.raises(PlanError, match="needs at least 1 worker, found 0"):
        case.run(schedule, 0)


def test_collectives(case: Case) -> None:
    plan = templates.get("collective")(2, (4, 6), kind="all_gather")
    schedule = replace(schedule_plan(*case.given), plan=plan)
    with pytest.raises(UnsupportedError, match="its plan has collectives; a schedule takes"):
        case.run(schedule, 0)


def test_a_result_named_as_a_tensor() -> None:
    case = scatter("all_reduce_two_shot", 2, m=4)
    accesses = {**case.accesses, "out": Access("out", (4, 4), ("m", "n"), write=True)}
    schedule = schedule_plan(*case.given)
    with pytest.raises(InputError, match="result out is bound to no tensor, but the plan has a"):
        execute_schedule(schedule, case.space, accesses, case.axis_map, case.tile, case.inputs)
