"""Simulated times against what pencil and paper give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncopate_jax.check.simulate import compare, simulate
from syncopate_jax.errors import DeadlockError, InputError, UnsupportedError
from syncopate_jax.ir import presets
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import Collective, OpDep
from syncopate_jax.ir.plan import Plan, Tensor
from syncopate_jax.ir.topology import Topology, link_channel
from syncopate_jax.plans.all_gather_ring import all_gather_ring
from syncopate_jax.plans.all_gather_swizzle import all_gather_swizzle
from tests.check.small_schedules import (
    BANDWIDTH,
    LATENCY,
    OVERHEAD,
    channel,
    gather_schedule,
    plan_of,
    schedule_of,
    send,
    topology,
)


def once(size: float) -> float:
    return OVERHEAD + size / BANDWIDTH + LATENCY


def test_one_transfer() -> None:
    found = simulate(plan_of([send(0, 1, 500)], []), topology(2))
    assert found.op_start.tolist() == [0.0]
    assert found.makespan == once(500)


def test_empty_plan_takes_no_time() -> None:
    found = simulate(plan_of([], []), topology(2))
    assert found.makespan == 0.0
    assert found.links() == ()
    assert found.critical_path() == ()


def test_an_empty_chunk_still_costs_its_issue() -> None:
    assert simulate(plan_of([send(0, 1, 0)], []), topology(2)).makespan == once(0)


def test_a_queue_sends_one_at_a_time_and_overlaps_latency() -> None:
    found = simulate(plan_of([send(0, 1, 500), send(0, 1, 250)], []), topology(2))
    assert found.op_finish.tolist() == [once(500), 2 * OVERHEAD + 0.75 + LATENCY]


def test_two_transfers_into_one_port_share_it() -> None:
    found = simulate(plan_of([send(0, 2, 500)], [send(1, 2, 500)], []), topology(3))
    assert found.op_finish.tolist() == [once(1000)] * 2


def test_a_longer_transfer_speeds_up_when_its_rival_is_done() -> None:
    found = simulate(plan_of([send(0, 2, 500)], [send(1, 2, 1000)], []), topology(3))
    assert found.op_finish.tolist() == pytest.approx([once(1000), once(1500)])


def test_what_a_slow_link_cannot_use_goes_to_the_others() -> None:
    speeds = np.array([[0, 1, 1000], [1, 0, 200], [1, 1, 0]])
    slow = link_channel(
        "nvlink", speeds, latency=LATENCY, overhead=OVERHEAD, port_bandwidth=BANDWIDTH
    )
    found = simulate(
        plan_of([send(0, 2, 800)], [send(1, 2, 200)], []), Topology("slow", 3, (slow,))
    )
    assert found.op_finish.tolist() == pytest.approx([once(1000)] * 2)


def test_shares_are_max_min_through_chains_of_ports() -> None:
    # Ports in of rank 3: three flows, a third each. Port out of rank 2 carries one of them and one
    # to rank 4, which gets the other two thirds.
    plan = plan_of(
        [send(0, 3, 1000)], [send(1, 3, 1000)], [send(2, 3, 1000)], [], [send(2, 4, 2000, on=4)]
    )
    found = simulate(plan, topology(5))
    assert found.op_finish.tolist() == pytest.approx([once(3000)] * 4)


def test_pulls_from_one_rank_share_its_egress_port() -> None:
    plan = plan_of([], [send(0, 1, 500, on=1)], [send(0, 2, 500, on=2)])
    assert simulate(plan, topology(3)).op_finish.tolist() == [once(1000)] * 2


def test_ranks_that_share_a_port_share_its_capacity() -> None:
    shared = link_channel(
        "nic",
        np.full((4, 4), BANDWIDTH),
        latency=LATENCY,
        overhead=OVERHEAD,
        port_bandwidth=BANDWIDTH,
        port=np.array([0, 0, 1, 1]),
    )
    plan = plan_of([send(0, 2, 500, channel="nic")], [send(1, 3, 500, channel="nic")], [], [])
    found = simulate(plan, Topology("nodes", 4, (shared,)))
    assert found.op_finish.tolist() == [once(1000)] * 2


def test_two_channels_progress_side_by_side() -> None:
    both = Topology("two", 2, (channel(2), channel(2, "host", bandwidth=BANDWIDTH / 2)))
    plan = plan_of([send(0, 1, 1000), send(0, 1, 500, channel="host")], [])
    assert simulate(plan, both).op_finish.tolist() == [once(1000)] * 2


def test_a_local_copy_uses_no_port_unless_its_channel_says_so() -> None:
    plan = plan_of([send(0, 0, 500)], [send(1, 0, 500)])
    free = simulate(plan, topology(2, local_bandwidth=BANDWIDTH))
    assert free.op_finish.tolist() == [OVERHEAD + 0.5, once(500)]
    ported = simulate(plan, topology(2, local_bandwidth=BANDWIDTH, local_ports=True))
    assert ported.op_finish.tolist() == [once(1000)] * 2


def test_a_blocked_head_holds_up_its_queue() -> None:
    plan = plan_of([send(0, 1, 500, OpDep(1, 0)), send(0, 1, 500)], [send(1, 0, 1000)])
    found = simulate(plan, topology(2))
    first = once(1000)
    assert found.op_start.tolist() == [first, first + OVERHEAD + 0.5, 0.0]


@pytest.mark.parametrize("ranks", [2, 3, 8, 13])
def test_ring_takes_a_full_hop_a_step(ranks: int) -> None:
    plan = all_gather_ring(ranks, (ranks * 16, 256), axis=0)
    found = simulate(plan, presets.h200_nvlink(ranks))
    hop = presets.COPY_OVERHEAD + 16 * 256 * 2 / presets.H200_NVLINK_BANDWIDTH
    assert found.makespan == pytest.approx((ranks - 1) * (hop + presets.NVLINK_LATENCY), rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 8, 13])
def test_swizzle_hides_all_latencies_but_one(ranks: int) -> None:
    plan = all_gather_swizzle(ranks, (ranks * 16, 256), axis=0)
    found = simulate(plan, presets.h200_nvlink(ranks))
    hop = presets.COPY_OVERHEAD + 16 * 256 * 2 / presets.H200_NVLINK_BANDWIDTH
    assert found.makespan == pytest.approx((ranks - 1) * hop + presets.NVLINK_LATENCY, rel=1e-9)


def test_all_to_one_order_is_as_slow_as_the_port_it_crowds() -> None:
    ranks = 6
    crowded = [[send(s, r, 500, on=r) for s in range(ranks) if s != r] for r in range(ranks)]
    orderly = [[send((r + k) % ranks, r, 500, on=r) for k in range(1, ranks)] for r in range(ranks)]
    slow = simulate(plan_of(*crowded), topology(ranks, latency=0, overhead=0)).makespan
    fast = simulate(plan_of(*orderly), topology(ranks, latency=0, overhead=0)).makespan
    assert fast == pytest.approx((ranks - 1) * 0.5)
    assert slow > 1.5 * fast


def test_tiles_alone_take_rounds_of_workers() -> None:
    schedule = schedule_of(plan_of([], []), 5, workers=2)
    found = simulate(schedule.plan, topology(2), schedule, tile_seconds=0.5)
    assert found.tile_finish.tolist() == [[0.5, 0.5, 1.0, 1.0, 1.5]] * 2
    assert found.makespan == 1.5
    assert found.compute_alone().tolist() == [1.5, 1.5]
    assert found.compute_busy().tolist() == [1.25, 1.25]
    assert found.compute_idle().tolist() == [0.25, 0.25]
    assert found.exposed().tolist() == [0.0, 0.0]


def test_tile_seconds_are_by_linear_tile() -> None:
    schedule = schedule_of(plan_of([]), 3, order=[[2, 0, 1]])
    found = simulate(schedule.plan, topology(1), schedule, tile_seconds=np.array([1.0, 2.0, 4.0]))
    assert found.tile_finish.tolist() == [[4.0, 5.0, 7.0]]


def test_a_worker_does_its_share_of_the_flops() -> None:
    schedule = schedule_of(plan_of([]), 4, workers=2)
    found = simulate(schedule.plan, topology(1), schedule, tile_flops=200)
    assert found.makespan == pytest.approx(1.0)


def test_tile_waits_for_the_chunk_it_needs() -> None:
    plan = plan_of([send(0, 1, 500)], [])
    schedule = schedule_of(plan, 2, slots=1, waits={3: [(0, 1)]}, op_signals={0: [(1, 0)]})
    found = simulate(plan, topology(2), schedule, tile_seconds=0.5)
    assert found.tile_start.tolist() == [[0.0, 0.5], [0.0, once(500)]]
    assert found.makespan == once(500) + 0.5
    assert found.tile_op.tolist() == [[-1, -1], [-1, 0]]
    assert found.waits.tolist() == [[3, 0]]
    assert found.exposed().tolist() == pytest.approx([0.0, found.makespan - 1.0])


def test_a_wait_inside_the_reduction_loop_stops_the_tile_midway() -> None:
    plan = plan_of([send(0, 1, 500)], [])
    schedule = schedule_of(
        plan, 1, steps=4, slots=1, k_waits={1: [(3, 0, 1)]}, op_signals={0: [(1, 0)]}
    )
    found = simulate(plan, topology(2), schedule, tile_seconds=1.0)
    assert found.tile_start[1, 0] == 0.0
    assert found.makespan == once(500) + 0.25
    late = simulate(plan, topology(2), schedule, tile_seconds=4.0)
    assert late.makespan == 4.0


def test_a_wait_before_the_epilogue_holds_only_the_end() -> None:
    plan = plan_of([send(0, 1, 500)], [])
    schedule = schedule_of(plan, 1, slots=1, e_waits={1: [(0, 1)]}, op_signals={0: [(1, 0)]})
    found = simulate(plan, topology(2), schedule, tile_seconds=0.5)
    assert found.tile_start[1, 0] == 0.0
    assert found.makespan == once(500)


def test_an_operation_waits_for_the_tiles_that_raise_its_slot() -> None:
    plan = plan_of([send(0, 1, 500)], [])
    signals = {0: [(0, 0)], 1: [(0, 0)]}
    schedule = schedule_of(plan, 3, slots=1, signals=signals, op_waits={0: [(0, 2)]})
    found = simulate(plan, topology(2), schedule, tile_seconds=0.5)
    assert found.op_start.tolist() == [1.0]
    assert found.makespan == 1.0 + once(500)
    path = found.critical_path()
    assert [(step.rank, step.tile, step.op) for step in path] == [
        (0, 0, -1),
        (0, 1, -1),
        (0, -1, 0),
    ]
    assert str(path[-1]) == "rank 0 op 0: 1000000.00 to 1875000.00 us"
    assert str(path[0]) == "rank 0 tile 0: 0.00 to 500000.00 us"


def test_a_tile_stored_beside_the_next_is_told_of_late() -> None:
    """Two tiles of a worker: the first is told of midway through the second, that at its end."""
    plan = plan_of([send(0, 1, 500), send(0, 1, 250)], [])
    signals = {0: [(0, 0)], 1: [(0, 1)]}
    waits = {0: [(0, 1)], 1: [(1, 1)]}
    schedule = schedule_of(plan, 2, steps=4, slots=2, signals=signals, op_waits=waits)
    for lag, begins in ((0.0, 2.0), (0.75, 3.5), (1.0, 4.0)):
        found = simulate(plan, topology(2), schedule, tile_seconds=2.0, signal_lag=lag)
        assert found.op_start.tolist() == [begins, max(4.0, begins + OVERHEAD + 0.5)]
    with pytest.raises(InputError, match=r"signal_lag must be a share, from 0 to 1, found 1\.5"):
        simulate(plan, topology(2), schedule, tile_seconds=2.0, signal_lag=1.5)


def test_a_tile_that_waits_late_is_past_telling_of_the_one_before() -> None:
    """Both ranks add in their second tile what the other's first one sent."""
    plan = plan_of([send(0, 1, 500)], [send(1, 0, 500)])
    rows = {0: [(0, 0)], 2: [(1, 0)]}
    added = {1: [(1, 1)], 3: [(1, 1)]}
    schedule = schedule_of(
        plan,
        2,
        slots=2,
        signals=rows,
        op_waits={0: [(0, 1)], 1: [(0, 1)]},
        op_signals={0: [(1, 1)], 1: [(0, 1)]},
        e_waits=added,
    )
    found = simulate(plan, topology(2), schedule, tile_seconds=1.0, signal_lag=0.5)
    assert found.op_start.tolist() == [1.5, 1.5]
    assert found.makespan == 1.5 + once(500)


def test_a_signal_to_another_rank_takes_its_latency() -> None:
    plan = plan_of([], [])
    schedule = schedule_of(plan, 1, slots=1, signals={0: [(1, 0)]}, waits={1: [(0, 1)]})
    fast = Topology("fast", 2, (), 1.0)
    slow = Topology("slow", 2, (), 1.0, signal_latency=0.25)
    assert simulate(plan, fast, schedule, tile_seconds=1.0).makespan == 2.0
    assert simulate(plan, slow, schedule, tile_seconds=1.0).makespan == 2.25


@pytest.mark.parametrize("tile", [0.5, 0.125, 0.03125])
def test_fused_gather_matmul_is_the_longer_side_plus_its_fill(tile: float) -> None:
    ranks, per_chunk, size = 4, 4, 375
    schedule = gather_schedule(ranks, per_chunk, size, workers=2)
    found = compare(schedule, topology(ranks), tile_seconds=tile)
    hop = OVERHEAD + size / BANDWIDTH
    chunk = per_chunk / 2 * tile
    assert found.compute == pytest.approx(ranks * chunk)
    assert found.communication == pytest.approx((ranks - 1) * hop + LATENCY)
    finish = chunk
    for step in range(1, ranks):
        finish = max(finish, step * hop + LATENCY) + chunk
    assert found.fused == pytest.approx(finish)
    assert found.bound <= found.fused <= found.bound + max(chunk, hop) + LATENCY
    assert found.unfused == pytest.approx(found.compute + found.communication)
    assert found.speedup == pytest.approx(found.unfused / found.fused)
    assert 0 <= found.hidden <= 1


def test_compare_with_nothing_to_hide() -> None:
    found = compare(schedule_of(plan_of([]), 0), topology(1), tile_seconds=1.0)
    assert (found.unfused, found.speedup, found.hidden) == (0.0, 1.0, 1.0)


def test_links_carry_what_the_plan_moves() -> None:
    found = simulate(plan_of([send(0, 1, 500), send(0, 1, 500)], [send(1, 0, 250)]), topology(2))
    first, second = found.links()
    assert (first.channel, first.src_rank, first.dst_rank, first.bytes) == ("nvlink", 0, 1, 1000)
    assert first.utilisation == pytest.approx(1.0 / found.makespan)
    assert second.busy == 0.25
    summary = found.summary()
    assert summary["bytes"] == 1250
    assert summary["busiest_link"]["utilisation"] == first.utilisation


def test_critical_path_follows_dependencies_and_queues() -> None:
    plan = plan_of([send(0, 1, 500)], [send(1, 2, 500, OpDep(0, 0)), send(1, 2, 500)], [])
    path = simulate(plan, topology(3)).critical_path()
    assert [(step.rank, step.op) for step in path] == [(0, 0), (1, 0), (1, 1)]
    assert path[-1].finish == pytest.approx(once(500) + 2 * OVERHEAD + 1.0 + LATENCY)


def test_simulation_is_repeatable() -> None:
    schedule = gather_schedule(5, 7, 333, workers=3)
    runs = [simulate(schedule.plan, topology(5), schedule, tile_seconds=0.1) for _ in range(2)]
    assert np.array_equal(runs[0].op_finish, runs[1].op_finish)
    assert np.array_equal(runs[0].tile_finish, runs[1].tile_finish)
    assert np.array_equal(runs[0].cause, runs[1].cause)


def test_progress_counts_up_to_the_whole() -> None:
    ranks = 160
    calls: list[tuple[int, int]] = []
    plan = all_gather_swizzle(ranks, (ranks, 8))
    simulate(plan, presets.h200_nvlink(ranks), progress=lambda *call: calls.append(call))
    assert calls
    assert all(0 < done <= total == plan.num_ops for done, total in calls)


def test_cycle_of_operations_is_a_deadlock() -> None:
    plan = plan_of([send(0, 1, 1, OpDep(1, 0)), send(0, 1, 1)], [send(1, 0, 1, OpDep(0, 0))])
    with pytest.raises(DeadlockError) as error:
        simulate(plan, topology(2))
    assert str(error.value) == (
        "simulate small: no progress after 0 of 3 operations and 0 of 0 tiles; waiting:\n"
        "  rank 0 op 0 (nvlink, 1 behind it) waits for rank 1 op 0\n"
        "  rank 1 op 0 (nvlink) waits for rank 0 op 0"
    )


def test_tile_and_operation_that_wait_for_each_other() -> None:
    plan = plan_of([send(0, 1, 1)], [])
    schedule = schedule_of(
        plan,
        2,
        slots=2,
        waits={0: [(1, 1)], 2: [(0, 2)]},
        signals={1: [(0, 0)], 3: [(0, 1)]},
        op_waits={0: [(0, 1)]},
        op_signals={0: [(1, 0)]},
    )
    with pytest.raises(DeadlockError) as error:
        simulate(plan, topology(2), schedule, tile_seconds=1.0)
    assert str(error.value) == (
        "simulate small: no progress after 0 of 1 operations and 0 of 4 tiles; waiting:\n"
        "  rank 0 op 0 (nvlink) waits for slot 0 of rank 0 to reach 1, now 0 "
        "(to be raised by rank 0 tile 1 (position 1))\n"
        "  rank 0 tile 0 (position 0) waits for slot 1 of rank 0 to reach 1, now 0 "
        "(to be raised by rank 1 tile 1 (position 1))\n"
        "  rank 1 tile 0 (position 0) waits for slot 0 of rank 1 to reach 2, now 0 "
        "(to be raised by rank 0 op 0)"
    )


def test_a_wait_that_nothing_satisfies() -> None:
    schedule = schedule_of(plan_of([]), 1, slots=1, waits={0: [(0, 1)]})
    with pytest.raises(DeadlockError, match=r"now 0 \(nothing is left to raise it\)"):
        simulate(schedule.plan, topology(1), schedule, tile_seconds=1.0)


def test_many_stuck_are_counted_not_listed() -> None:
    ranks = 20
    ops = [[send(r, (r + 1) % ranks, 1, OpDep((r + 1) % ranks, 0))] for r in range(ranks)]
    with pytest.raises(DeadlockError, match="… and 8 more"):
        simulate(plan_of(*ops), topology(ranks))


def test_a_missing_link_names_the_way_round() -> None:
    plan = plan_of([], *([[]] * 7), [send(8, 0, 10)], *([[]] * 7))
    with pytest.raises(InputError) as error:
        simulate(plan, presets.nodes(2, 8))
    assert str(error.value) == (
        "simulate small: rank 8 op 0 travels r8 to r0 on channel nvlink, where topology nodes_2x8 "
        "has no link (1 such operations); use nic or host: templates have channel= for all that "
        "they send, and the hierarchical ones outer_channel= for what goes between the nodes= that "
        "they are given"
    )
    with pytest.raises(InputError, match="nothing joins them: relay the data"):
        simulate(plan_of([send(0, 2, 10)], [], [], []), presets.ring(4))


def test_collectives_must_be_expanded() -> None:
    whole, half = Chunk("x", Box((0,), (4,))), Chunk("x", Box((0,), (2,)))
    ops = [[Collective(r, "all_gather", half, whole, (0, 1), concat_axis=0)] for r in range(2)]
    plan = build_plan("gather", 2, [Tensor("x", (4,), "int8")], [], [], ops)
    with pytest.raises(UnsupportedError, match="simulate gather: takes transfers only; expand"):
        simulate(plan, topology(2))


def bad_rank() -> Plan:
    return plan_of([send(0, 5, 1)], [])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of([]), "topology round has 2 ranks, the plan has 1"),
        (bad_rank(), "row 0 is listed on rank 0 and travels r0 to r5, of 2 ranks; verify the plan"),
        (
            plan_of([send(0, 1, 1, OpDep(1, 7))], []),
            "rank 0 op 0 waits for r1.7, which does not exist; verify the plan",
        ),
        (
            plan_of([send(0, 1, 1, channel="nic")], []),
            "topology round: no channel 'nic'; its channels are nvlink",
        ),
    ],
)
def test_plans_that_do_not_fit(plan: Plan, message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(plan, topology(2))


def test_tile_costs_are_checked() -> None:
    plan = plan_of([], [])
    schedule = schedule_of(plan, 3)
    for costs, message in [
        ({}, "a schedule needs one of tile_seconds and tile_flops"),
        ({"tile_seconds": 1, "tile_flops": 1}, "needs one of tile_seconds and tile_flops"),
        ({"tile_seconds": -1}, "tile_seconds must be finite and not negative"),
        ({"tile_flops": float("nan")}, "tile_flops must be finite and not negative"),
        ({"tile_seconds": np.ones(4)}, r"tile_seconds has shape \(4,\), which does not broadcast"),
    ]:
        with pytest.raises(InputError, match=message):
            simulate(plan, topology(2), schedule, **costs)
    with pytest.raises(InputError, match="tile_seconds and tile_flops need a schedule"):
        simulate(plan, topology(2), tile_seconds=1.0)
    with pytest.raises(InputError, match="topology idle gives rank 0 no flops; pass tile_seconds"):
        simulate(plan, Topology("idle", 2, ()), schedule, tile_flops=1.0)


def test_arguments_of_other_kinds() -> None:
    plan: Any = plan_of([], [])
    with pytest.raises(InputError, match=r"simulate: plan needs a Plan, found 'a'; syncopate_jax"):
        simulate("a", topology(2))  # type: ignore[arg-type]
    with pytest.raises(
        InputError,
        match=r"simulate: topology needs a Topology, found 'h200'; syncopate_jax.ir.presets.preset"
        r"\(name, ranks\) makes one, such as 'h200'",
    ):
        simulate(plan, "h200")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="simulate: schedule needs a Schedule, found 3"):
        simulate(plan, topology(2), 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="compare: schedule needs a Schedule, found Plan"):
        compare(plan, topology(2))


def test_schedules_are_checked() -> None:
    plan = plan_of([send(0, 1, 1)], [])
    with pytest.raises(InputError, match="the schedule serves another plan"):
        simulate(plan_of([], []), topology(2), schedule_of(plan, 1), tile_seconds=1)
    for rows, message in [
        (
            {"waits": {0: [(3, 1)]}},
            "waits names slot 3 of rank 0, which has 1; verify the schedule",
        ),
        ({"signals": {1: [(2, 0)]}}, "signals names rank 2 of 2; verify the schedule"),
        ({"op_signals": {0: [(1, 1)]}}, "op_signals names slot 1 of rank 1, which has 1"),
    ]:
        with pytest.raises(InputError, match=message):
            simulate(plan, topology(2), schedule_of(plan, 1, slots=1, **rows), tile_seconds=1)
