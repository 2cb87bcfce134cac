"""Frames: operand coordinates in those of a plan tensor."""

from __future__ import annotations

import numpy as np

from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.kernel.access import Access
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.frame import Frame, frames


def plan_of(initial: list[Region], goals: list[Goal]) -> Plan:
    return build_plan("small", 2, [Tensor("x", (8, 6))], initial, goals, [[], []])


def frame_of(plan: Plan, *dims: int, write: bool = False) -> Frame:
    shape = (4, 6) if dims in ((), (0, 1)) else (6, 4)
    access = Access("a", shape, (None, None), write)
    (found,) = frames(plan, AxisMap.of({"x": ("a", dims)}), {"a": access})
    return found


def test_a_tensor_that_is_read_starts_at_the_goals() -> None:
    boxes = [Box((4, 0), (6, 6)), Box((6, 2), (8, 6)), Box((1, 1), (1, 6))]
    goals = [Goal(0, "x", box) for box in boxes]
    plan = plan_of([Region(1, "x", Box((2, 0), (5, 6)))], goals)
    frame = frame_of(plan)
    assert frame.lo.tolist() == [[4, 0], [2, 0]]  # rank 1 has no goal: its initial region
    assert frame.hi.tolist() == [[8, 6], [5, 6]]
    assert frame.extent.tolist() == [[4, 6], [3, 6]]
    assert not frame.write


def test_a_tensor_that_is_written_starts_at_the_produced_regions() -> None:
    initial = [
        Region(0, "x", Box((0, 0), (2, 6))),
        Region(0, "x", Box((2, 1), (4, 6)), True),
        Region(0, "x", Box((4, 0), (5, 6)), True),
    ]
    frame = frame_of(plan_of(initial, [Goal(0, "x", Box((0, 0), (8, 6)))]), write=True)
    assert frame.lo.tolist() == [[2, 0], [0, 0]]
    assert frame.hi.tolist() == [[5, 6], [0, 0]]
    assert frame.extent.tolist() == [[3, 6], [0, 0]]


def test_boxes_are_moved_turned_and_cut() -> None:
    plan = plan_of([], [Goal(0, "x", Box((4, 2), (8, 6)))])
    frame = frame_of(plan, 1, 0)
    assert frame.order == (1, 0)
    rank = np.zeros(2, np.int64)
    lo = np.array([[0, 3, 0], [5, 0, 0]])  # padded by a dimension, as in the plan's columns
    hi = np.array([[6, 9, 1], [7, 2, 1]])
    low, high = frame.to_operand(rank, lo, hi)
    assert low.tolist() == [[1, 0], [0, 1]]
    assert high.tolist() == [[4, 2], [0, 3]]  # the second box has nothing left
