"""Tiles and transfers as one sequence a rank: everything once, nothing before what it needs."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from syncopate_jax.backends.in_order import SENT, START, WAIT, sequence
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import DeadlockError, UnsupportedError
from syncopate_jax.ir.schedule import Rows, Schedule
from syncopate_jax.registry import templates
from tests.backends import own_kernels


def gathering(ranks: int = 3, template: str = "all_gather_swizzle", **options: Any) -> Schedule:
    rows = 4 * ranks
    plan = templates.get(template)(ranks, (rows, 4), dtype="float32")
    kernel = own_kernels.scale(rows, 4)
    return fuse(kernel, plan, {"x": "x"}, axis_name="t", backend="xla", **options).work.schedule


def reducing(ranks: int = 3, template: str = "reduce_scatter_direct", **options: Any) -> Schedule:
    rows = 4 * ranks
    plan = templates.get(template)(ranks, (rows, 6), dtype="float32", tensor="y", **options)
    kernel = own_kernels.product(rows, 3, 6, 2, has_addend=True)
    return fuse(kernel, plan, {"y": "out"}, axis_name="t", backend="xla").work.schedule


SCHEDULES = [
    gathering(),
    gathering(split=2),
    gathering(template="all_gather_ring"),
    gathering(4, template="all_gather_double_ring"),
    gathering(4, template="all_gather_mesh"),
    reducing(),
    reducing(template="reduce_scatter_ring"),
    reducing(template="all_reduce_two_shot"),
    reducing(template="all_reduce_two_shot", most_listed=1),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.plan.name}-{s.plan.num_ops}")
def test_who_knows_that_all_have_begun(schedule: Schedule) -> None:
    """In these plans data comes from every rank, directly or through others."""
    assert all(found.heard_all for found in sequence(schedule))


def test_ranks_that_do_not_know_that_all_have_begun() -> None:
    """Along the chain of a broadcast, each hears of those before it."""
    assert [found.heard_all for found in sequence(gathering(template="broadcast"))] == [
        False, False, True,
    ]  # fmt: skip
    assert [found.heard_all for found in sequence(gathering(1))] == [True]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.plan.name}-{s.plan.num_ops}")
def test_every_operation_is_started_sent_and_waited_for_once(schedule: Schedule) -> None:
    c = schedule.plan.columns
    for rank, found in enumerate(sequence(schedule)):
        flat = found.flat(schedule.num_steps)
        listed = np.flatnonzero(c.rank == rank).tolist()
        landing = np.flatnonzero(c.dst_rank == rank).tolist()
        remote = [row for row in listed if c.dst_rank[row] != rank]
        for code, rows in ((START, listed), (WAIT, landing), (SENT, remote)):
            assert sorted(row for kind, row in flat if kind == code) == rows
        begun = [row for code, row in flat if code == START]
        assert begun == sorted(begun)  # one channel keeps its order
        place = {instruction: i for i, instruction in enumerate(flat)}
        assert all(place[START, row] < place[SENT, row] for row in remote)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.plan.name}-{s.plan.num_ops}")
def test_nothing_starts_before_what_it_needs(schedule: Schedule) -> None:
    """Of each operation, the operations its plan names come first where they land here."""
    plan = schedule.plan
    c = plan.columns
    needed = c.dep_row(plan.num_ranks)
    owner = c.dep_owner()
    checked = 0
    for rank, found in enumerate(sequence(schedule)):
        place = {one: i for i, one in enumerate(found.flat(schedule.num_steps))}
        for row, dep in zip(owner.tolist(), needed.tolist(), strict=True):
            if c.rank[row] == rank and c.dst_rank[dep] == rank:
                assert place[WAIT, dep] < place[START, row]
                checked += 1
        for tile, instructions in enumerate(found.after):
            early = {row for code, row in instructions if code == START}
            waits = {row: schedule.op_waits.row(row) for row in early}
            assert all(waits.values()), f"tile {tile} starts what needed no tile"
    assert checked or not len(needed)


def test_a_tile_order_in_which_no_rank_can_go_on() -> None:
    """Each rank waits, before its first tile, for the sum that its peer makes after its last."""
    schedule = gathering(2)
    plan = schedule.plan
    needs = Rows.of([[(slot, 1) for slot in range(schedule.num_slots[r])] for r in (0, 1)], 2)
    waits = Rows.of(
        [
            needs.row(at // schedule.num_tiles) if at % schedule.num_tiles == 0 else []
            for at in range(2 * schedule.num_tiles)
        ],
        2,
    )
    stuck = dataclasses.replace(
        schedule, waits=waits, k_waits=Rows.of([[]] * (2 * schedule.num_tiles), 3),
        op_waits=Rows.of([[(0, 1)]] * plan.num_ops, 2),
    )  # fmt: skip
    sequence(schedule)
    with pytest.raises(
        DeadlockError,
        match=r"in this tile order no rank can go on: rank 0 waits for rank 1 op 0 \(push .*\); "
        r"rank 1 waits for .*; "
        r"use a plan of one hop, such as all_gather_swizzle, in which no rank hands on what its "
        r"tiles wait for, or backend 'xla'",
    ):
        sequence(stuck)


def test_waits_for_what_lands_elsewhere() -> None:
    schedule = gathering(2)
    signals = Rows.of([[(0, 0)] for _ in range(schedule.plan.num_ops)], 2)
    with pytest.raises(
        UnsupportedError, match=r"an operation whose data lands on rank 1: rank 0 op 0 \(push .*\);"
    ):
        sequence(dataclasses.replace(schedule, op_signals=signals))


def test_waits_for_tiles_of_another_rank() -> None:
    schedule = reducing(2)
    tiles = 2 * schedule.num_tiles
    signals = Rows.of([[(1, 0)] if at == 0 else [] for at in range(tiles)], 2)
    text = "rank 1 waits for tiles of rank 0; a core that computes and communicates in order pushes"
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        sequence(dataclasses.replace(schedule, signals=signals))
