"""Whether schedules finish: small ones with a known answer, faulty ones as the run says."""

from __future__ import annotations

from typing import Any

import pytest

from syncopate_jax.check.schedule_finish import finishes
from syncopate_jax.check.schedule_run import Run
from syncopate_jax.check.schedule_tables import Slots
from syncopate_jax.ir.schedule import Schedule
from syncopate_jax.passes.schedule_plan import schedule_plan
from tests.check.schedule_mutations import mutants
from tests.check.small_schedules import gather_schedule, plan_of, schedule_of, send
from tests.passes.matmul_cases import CASES


def ends(schedule: Schedule) -> bool:
    """What ``finishes`` says; the run tile by tile must say the same."""
    slots = Slots(schedule)
    found = finishes(schedule, slots)
    assert found == (not Run(schedule, slots).stuck)
    return found


def tiles_and_sends(*sends: Any, tiles: int = 2, slots: int = 2, **rows: Any) -> bool:
    """Two ranks of ``tiles`` tiles each; rank 0 lists ``sends``."""
    return ends(schedule_of(plan_of([*sends], []), tiles, slots=slots, **rows))


def test_nothing_to_do_finishes() -> None:
    assert ends(schedule_of(plan_of([], []), 0))
    assert ends(schedule_of(plan_of([], []), 3))


CHAIN: dict[str, Any] = {
    "signals": {1: [(0, 0)]},
    "op_waits": {0: [(0, 1)]},
    "op_signals": {0: [(1, 1)]},
    "waits": {2: [(1, 1)]},
}
"""Tile 1 of rank 0 starts the send, the send lets tile 0 of rank 1 go."""


def test_a_chain_of_tile_send_and_tile_finishes() -> None:
    assert tiles_and_sends(send(0, 1, 8), **CHAIN)


@pytest.mark.parametrize("missing", ["signals", "op_signals"])
def test_a_requirement_left_open_is_no_end(missing: str) -> None:
    assert not tiles_and_sends(send(0, 1, 8), **(CHAIN | {missing: {}}))


@pytest.mark.parametrize("count,wanted", [(1, True), (2, True), (3, False)])
def test_a_wait_needs_as_many_raises_as_it_counts(count: int, wanted: bool) -> None:
    raises = {0: [(1, 0)], 1: [(1, 0)]}
    assert tiles_and_sends(signals=raises, waits={3: [(0, count)]}) == wanted


def test_all_waits_of_one_place_must_be_met() -> None:
    assert not tiles_and_sends(signals={0: [(1, 0)]}, waits={2: [(0, 1), (1, 1)]})
    assert tiles_and_sends(signals={0: [(1, 0), (1, 1)]}, waits={2: [(0, 1), (1, 1)]})


def test_tiles_that_wait_for_each_other_are_stuck() -> None:
    raises = {0: [(1, 0)], 2: [(0, 0)]}
    assert not tiles_and_sends(signals=raises, waits={0: [(0, 1)], 2: [(0, 1)]})
    assert tiles_and_sends(signals=raises, waits={1: [(0, 1)], 2: [(0, 1)]})


def test_a_tile_raises_nothing_before_its_last_wait() -> None:
    """It is let go by what follows it: at a later step, or in its epilogue."""
    later = {"steps": 3, "signals": {0: [(1, 0)], 2: [(0, 0)]}, "waits": {2: [(0, 1)]}}
    assert not tiles_and_sends(k_waits={0: [(2, 0, 1)]}, **later)
    assert not tiles_and_sends(e_waits={0: [(0, 1)]}, **later)
    assert tiles_and_sends(k_waits={1: [(2, 0, 1)]}, e_waits={1: [(0, 1)]}, **later)


def test_a_worker_goes_in_order_and_another_passes_it() -> None:
    """Tile 0 waits for tile 1: with one worker for ever."""
    rows = {"waits": {0: [(0, 1)]}, "signals": {1: [(0, 0)]}}
    assert not tiles_and_sends(**rows)
    assert tiles_and_sends(workers=2, **rows)


def test_a_port_goes_in_order_and_another_channel_passes_it() -> None:
    rows = {"op_waits": {0: [(0, 1)]}, "op_signals": {1: [(0, 0)]}}
    assert not tiles_and_sends(send(0, 1, 8), send(0, 1, 8), **rows)
    assert tiles_and_sends(send(0, 1, 8), send(0, 1, 8, channel="nic"), **rows)


def test_a_gather_finishes_with_any_number_of_workers() -> None:
    assert all(ends(gather_schedule(3, 4, 8, workers)) for workers in (1, 2, 3))


@pytest.mark.parametrize("name", ["gather_k", "scatter_ring_split", "all_reduce_joined"])
def test_faulty_schedules_end_where_the_run_tile_by_tile_ends(name: str) -> None:
    case = CASES[name](3)
    schedule = schedule_plan(case.plan, case.space, case.accesses, case.axis_map, workers=2)
    assert ends(schedule)
    found = [ends(one) for kind, one in mutants(schedule, seed=1, each=4) if "swap" not in kind]
    assert {True, False} == set(found)
