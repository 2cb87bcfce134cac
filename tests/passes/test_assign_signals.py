"""Slots, who raises them, and landings."""

from __future__ import annotations

import numpy as np

from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, ComputeDep, OpDep
from syncopate_jax.ir.plan import Region, Tensor
from syncopate_jax.kernel.access import Access
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.tiles import Axis, TileSpace
from syncopate_jax.passes.schedule_plan import schedule_plan
from tests.passes.matmul_cases import gather, scatter


def test_a_relay_waits_on_the_slot_of_the_tiles() -> None:
    case = gather("all_gather_ring", 3, m=6, tiles=(2, 4, 6))
    schedule = schedule_plan(*case.given)
    assert schedule.num_slots.tolist() == [2, 2, 2]
    # Rank 0 receives r2.0, which it hands on as r0.1, and r2.1.
    assert schedule.op_waits.row(1) == [(0, 1)]
    assert schedule.op_signals.row(4) == [(0, 0)]
    assert schedule.waits.row(1) == [(0, 1)]
    assert len(schedule.signals.values) == 0


def test_nothing_is_raised_that_nobody_waits_for() -> None:
    case = gather("all_gather_ring", 3, m=6, tiles=(2, 4, 6))
    space = TileSpace((Axis("m", 0, 2), *case.space.axes[1:]))
    accesses = {"x": Access("x", (0, 6), ("m", "k"))}
    schedule = schedule_plan(case.plan, space, accesses, case.axis_map)
    # No tiles: only the relays wait.
    assert schedule.num_slots.tolist() == [1, 1, 1]
    assert len(schedule.op_signals.values) == 3


def test_a_pull_is_told_by_its_peer() -> None:
    """The dependency lands on its source, the pull waits elsewhere: a slot for each listener."""
    case = gather("all_gather_ring", 3, m=6, mode="pull", tiles=(2, 4, 6))
    schedule = schedule_plan(*case.given)
    first = case.plan.op(0, 0)  # rank 0 pulls from rank 2; rank 1 then pulls the same from it
    assert (first.src_rank, first.dst_rank) == (2, 0)
    targets = [target for target, _ in schedule.op_signals.row(0)]
    assert targets == [0, 1]
    assert schedule.op_waits.row(3) == [(schedule.op_signals.row(0)[1][1], 1)]


def test_tiles_raise_at_the_rank_that_waits() -> None:
    case = scatter("reduce_scatter_direct", 2, m=4, mode="pull", tiles=(2, 2, 5))
    schedule = schedule_plan(*case.given)
    # r0.0 pulls rows 0:2 from rank 1, whose tiles 0 and 1 make them.
    (slot,) = {slot for target, slot in map(tuple, schedule.signals.values) if target == 0}
    assert schedule.op_waits.row(0) == [(slot, 2)]
    raising = [
        at
        for at, (target, _) in zip(schedule.signals.owner, schedule.signals.values, strict=True)
        if target == 0
    ]
    assert [schedule.order[1, at - 4] for at in raising] == [0, 1]


def test_operations_that_need_the_same_tiles_share_a_slot() -> None:
    case = scatter("all_reduce_two_shot", 2, m=4, split=2)
    schedule = schedule_plan(*case.given)
    gathers = [row for row in range(case.plan.num_ops) if case.plan.row(row).dst.tensor == "out"]
    mine = [row for row in gathers if case.plan.row(row).rank == 0]
    waits = {schedule.op_waits.row(row)[0] for row in mine}
    assert len(mine) == 4
    assert len(waits) == 1  # pieces of one row are made by the same tiles of two rows


def test_landings_are_numbered_by_destination() -> None:
    case = scatter("reduce_scatter_direct", 3, m=6)
    schedule = schedule_plan(*case.given)
    assert schedule.num_landings.tolist() == [2, 2, 2]
    rank = case.plan.columns.dst_rank
    for r in range(3):
        assert schedule.landing[rank == r].tolist() == [0, 1]
    last = schedule.at(0, 5)
    assert schedule.addends.row(last) == [(0,), (1,)]


def test_a_reduction_away_from_tiles_does_not_land() -> None:
    y, z = Tensor("y", (4, 4), "float32", True), Tensor("z", (4, 4), "float32", True)
    box = Box.full((4, 4))
    made, sums = Chunk("y", box), Chunk("z", box)
    ops = [
        [P2P(0, 0, 1, made, sums, (ComputeDep(0, made),), reduce="sum")],
        [P2P(1, 1, 0, sums, sums, (OpDep(0, 0),))],
    ]
    initial = [Region(0, "y", box, True), Region(1, "z", box)]
    plan = build_plan("away", 2, [y, z], initial, [], ops)
    space = TileSpace((Axis("m", 4, 4), Axis("n", 4, 4)))
    accesses = {"y": Access("y", (4, 4), ("m", "n"), write=True)}
    schedule = schedule_plan(plan, space, accesses, AxisMap.of({"y": "y"}))
    assert schedule.landing.tolist() == [-1, -1]
    assert schedule.op_waits.row(1) == [(0, 1)]
    assert schedule.op_signals.row(0) == [(1, 0)]
    assert np.array_equal(schedule.num_landings, [0, 0])
