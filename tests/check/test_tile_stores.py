"""Tiles that send themselves: the same data moves, each tile's when that tile is done."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.engine import transfer_bytes
from syncopate_jax.check.simulate import simulate
from syncopate_jax.check.tile_stores import tile_stores
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir.schedule import Schedule
from syncopate_jax.ir.topology import Topology, uniform_channel
from syncopate_jax.passes.schedule_plan import schedule_plan
from tests.passes.matmul_cases import Case, N, gather, scatter

RATE, LATENCY, TILE = 16.0, 0.5, 4.0  # bytes a second and seconds


def both(case: Case, workers: int = 1) -> tuple[Schedule, Schedule]:
    schedule = schedule_plan(*case.given, workers=workers)
    return schedule, tile_stores(schedule, *case.given[1:])


def topology(ranks: int) -> Topology:
    channel = uniform_channel(
        "nvlink", ranks, bandwidth=RATE, latency=LATENCY, local_bandwidth=RATE
    )
    return Topology("t", ranks, (channel,))


@pytest.mark.parametrize(
    ("template", "ranks", "m"),
    [
        ("reduce_scatter_direct", 2, 12),
        ("reduce_scatter_direct", 3, 12),
        ("all_reduce_two_shot", 2, 8),
        ("all_reduce_two_shot", 3, 18),
    ],
)
def test_the_same_bytes_move_between_the_same_ranks(template: str, ranks: int, m: int) -> None:
    whole, cut = both(scatter(template, ranks, m, split=2))
    assert cut.plan.num_ops > whole.plan.num_ops
    found = []
    for plan in (whole.plan, cut.plan):
        c = plan.columns
        moved = np.zeros((ranks, ranks, 2))
        away = c.src_rank != c.dst_rank
        ends = c.src_rank[away], c.dst_rank[away], c.dst_tensor[away]
        np.add.at(moved, ends, transfer_bytes(plan)[away])
        found.append(moved.tolist())
    assert found[0] == found[1]
    # Both end, whatever the number of workers: what waited for a chunk waits for all its tiles.
    for workers in (1, 2, 5):
        schedule = both(scatter(template, ranks, m, split=2), workers)[1]
        timeline = simulate(schedule.plan, topology(ranks), schedule, tile_seconds=TILE)
        assert np.isfinite(timeline.makespan)


def test_only_the_last_tile_is_left_to_send() -> None:
    """Two ranks, one worker, four tiles for the peer and four of its own: sending hides."""
    case = scatter("reduce_scatter_direct", 2, m=8, tiles=(2, 2, 5), dtype="float32")
    whole, cut = both(case)
    bytes_a_tile = 2 * 2 * 4
    late = simulate(whole.plan, topology(2), whole, tile_seconds=TILE)
    early = simulate(cut.plan, topology(2), cut, tile_seconds=TILE)
    assert late.op_finish.tolist() == [4 * TILE + 4 * bytes_a_tile / RATE + LATENCY] * 2
    assert early.op_finish[:4].tolist() == [
        (i + 1) * TILE + bytes_a_tile / RATE + LATENCY for i in range(4)
    ]
    # All tiles of the peer have landed before the first epilogue that adds one is reached.
    assert early.makespan == 8 * TILE


def test_sums_are_sent_by_the_tiles_that_made_them() -> None:
    case = scatter("all_reduce_two_shot", 2, m=8, tiles=(2, 2, 5), dtype="float32")
    _, cut = both(case)
    found = simulate(cut.plan, topology(2), cut, tile_seconds=TILE)
    sums = cut.plan.columns.dst_tensor == 1
    assert sums.sum() == 2 * 4 and N == 4  # what stays is no transfer
    # The last tile's sum leaves when the tile is done.
    assert found.makespan == pytest.approx(8 * TILE + 16 / RATE + LATENCY)


def test_refuses_what_no_tile_writes_and_what_is_pulled() -> None:
    with pytest.raises(UnsupportedError, match="sends what no tile writes; tiles can only push"):
        both(gather("all_gather_swizzle", 2, m=4))
    with pytest.raises(UnsupportedError, match="is pulled; tiles can only push their own results"):
        both(scatter("reduce_scatter_direct", 2, m=8, mode="pull"))


def test_one_rank_sends_nothing() -> None:
    _, cut = both(scatter("reduce_scatter_direct", 1, m=4))
    assert cut.plan.num_ops == 0
    whole, cut = both(scatter("all_reduce_two_shot", 1, m=4))
    assert (whole.plan.num_ops, cut.plan.num_ops) == (1, 0)
    assert simulate(cut.plan, topology(1), cut, tile_seconds=TILE).makespan == 4 * TILE
