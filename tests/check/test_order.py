"""Cycles of operations that wait for each other, and the order of those that do not."""

from __future__ import annotations

import numpy as np

from syncopate_jax.check.collectives import find_instances, find_transfers
from syncopate_jax.check.order import find_levels, happens_before
from syncopate_jax.check.reach import Reach
from syncopate_jax.check.report import Report
from syncopate_jax.ir.comm import OpDep
from syncopate_jax.ir.plan import Plan, Tensor
from tests.check.small_plans import collective, found, goal, halves, plan_of, push, region, relay

ENDS = {
    "initial": [region(0, "x[0:2,0:6]"), region(1, "x[2:4,0:6]")],
    "goals": [goal(0, "x[0:4,0:6]"), goal(1, "x[0:4,0:6]")],
}


def test_two_operations_that_wait_for_each_other() -> None:
    plan = plan_of(
        [push(0, 1, "x[0:2,0:6]", deps=(OpDep(1, 0),))],
        [push(1, 0, "x[2:4,0:6]", deps=(OpDep(0, 0),))],
        **ENDS,
    )
    assert found(plan) == [
        "rank 0 op 0 [deadlock]: r0.0 waits for r1.0; r1.0 waits for r0.0; break this cycle"
    ]


def test_an_operation_that_waits_for_itself() -> None:
    plan = plan_of(
        [push(0, 1, "x[0:2,0:6]", deps=(OpDep(0, 0),))], [push(1, 0, "x[2:4,0:6]")], **ENDS
    )
    assert found(plan) == ["rank 0 op 0 [deadlock]: r0.0 waits for r0.0; break this cycle"]


def crossed(channel: str) -> Plan:
    """The first operation of rank 0 waits for the second of rank 1, whose first waits for it."""
    return plan_of(
        [
            push(0, 1, "x[0:1,0:6]", deps=(OpDep(1, 1),)),
            push(0, 1, "x[1:2,0:6]", channel=channel),
        ],
        [
            push(1, 0, "x[2:3,0:6]", deps=(OpDep(0, 1),)),
            push(1, 0, "x[3:4,0:6]"),
        ],
        **ENDS,
    )


def test_issue_order_blocks_a_channel() -> None:
    assert found(crossed("nvlink")) == [
        "rank 0 op 0 [deadlock]: r0.0 waits for r1.1; r1.1 is issued on channel nvlink after r1.0; "
        "r1.0 waits for r0.1; r0.1 is issued on channel nvlink after r0.0; break this cycle"
    ]


def test_channels_progress_side_by_side() -> None:
    assert found(crossed("nic")) == []


def test_collectives_of_two_groups_in_crossed_order() -> None:
    """Each pair is listed in one order, but the three orders make a ring."""
    parts = {
        (rank, pair): collective(rank, "broadcast", "x[0:4,0:6]", "x[0:4,0:6]", *pair)
        for pair in ((0, 1), (1, 2), (2, 0))
        for rank in pair
    }
    plan = plan_of(
        [parts[0, (0, 1)], parts[0, (2, 0)]],
        [parts[1, (1, 2)], parts[1, (0, 1)]],
        [parts[2, (2, 0)], parts[2, (1, 2)]],
        initial=[],
        goals=[],
    )
    assert found(plan)[0] == (
        "rank 0 op 1 [deadlock]: r0.1 is issued on channel nvlink after r0.0, which meets r1.1 in "
        "a broadcast; r1.1 is issued on channel nvlink after r1.0, which meets r2.1 in a "
        "broadcast; r2.1 is issued on channel nvlink after r2.0, which meets r0.1 in a broadcast; "
        "break this cycle"
    )


def test_levels_follow_the_longest_path() -> None:
    tail, head = np.array([0, 0, 1, 2]), np.array([1, 2, 2, 3])
    assert find_levels(5, tail, head).tolist() == [0, 1, 2, 3, 0]


def test_levels_end_at_a_cycle() -> None:
    tail, head = np.array([0, 1, 2, 2]), np.array([1, 2, 1, 3])
    assert find_levels(5, tail, head).tolist() == [0, -1, -1, -1, 0]


def test_order_of_a_relay() -> None:
    plan = relay(deps=(OpDep(0, 0),))
    order = happens_before(plan, [], find_transfers(plan, []))
    assert order.level.tolist() == [0, 1]
    assert (order.tail.tolist(), order.head.tolist()) == ([0], [1])


def test_a_collective_follows_what_its_senders_wait_for() -> None:
    """In a broadcast only the root sends, so that another member's wait orders nobody else."""
    before = [push(r, r, "y[0:4,0:6]", "z[0:4,0:6]") for r in range(2)]
    parts = [
        collective(r, "broadcast", "x[0:4,0:6]", "x[0:4,0:6]", 0, 1, deps=(OpDep(r, 0),))
        for r in range(2)
    ]
    tensors = tuple(Tensor(name, (4, 6)) for name in "xyz")
    plan = plan_of([before[0], parts[0]], [before[1], parts[1]], initial=[], goals=[],
                   tensors=tensors)  # fmt: skip
    instances = find_instances(plan, Report(plan))
    reach = Reach(happens_before(plan, instances, find_transfers(plan, instances)))
    first, second = np.array([0, 0, 2, 2]), np.array([1, 3, 1, 3])
    assert reach.before(first, second).tolist() == [True, True, False, True]


def test_a_thousand_collectives_need_no_deadlock() -> None:
    part = [collective(r, "broadcast", "x[0:4,0:6]", "x[0:4,0:6]", 0, 1) for r in range(2)]
    plan = plan_of([part[0]] * 1000, [part[1]] * 1000, initial=[], goals=[])
    assert not any("[deadlock]" in text for text in found(plan))


def test_halves_have_no_edges() -> None:
    order = happens_before(halves(), [], find_transfers(halves(), []))
    assert order.level.tolist() == [0, 0]
    assert order.entry.tolist() == [0, 1]
