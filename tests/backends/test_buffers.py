"""Where tensors live."""

from __future__ import annotations

import re

import numpy as np
import pytest

from syncopate_jax.backends import buffers
from syncopate_jax.errors import InputError
from syncopate_jax.kernel.axis_map import AxisMap, Binding
from tests.backends.works import gathering, reducing
from tests.check.small_plans import goal, plan_of, push, region


def test_a_gathered_operand() -> None:
    work = gathering()
    found = buffers.place_buffers(work.schedule.plan, work.axis_map, ("out",))
    shapes = {key: b.shape for key, b in found.items.items()}
    assert shapes == {("x", "input"): (4, 4), ("x", "gathered"): (8, 4)}
    assert found.origins["x"].tolist() == [[0, 0], [0, 0]]
    assert found.source(0).kind == "input" and found.destination(0).kind == "gathered"


def test_a_scattered_result() -> None:
    work = reducing()
    found = buffers.place_buffers(work.schedule.plan, work.axis_map, ("out",))
    shapes = {key: b.shape for key, b in found.items.items() if key[0] == "y"}
    assert shapes == {("y", "send"): (8, 6), ("y", "result"): (4, 6)}
    assert found.items["y", "result"].lo.tolist() == [[0, 0], [4, 0]]


def test_where_a_rank_without_a_goal_looks() -> None:
    """Its tiles read what it holds, and nothing need be right there but the origin."""
    plan = plan_of(
        [],
        [push(1, 0, "x[2:4,0:6]")],
        initial=[region(0, "x[0:2,0:6]"), region(1, "x[2:4,0:6]")],
        goals=[goal(0, "x[0:4,0:6]")],
    )
    found = buffers.place_buffers(plan, AxisMap.of({"x": "a"}), ())
    assert found.origins["x"].tolist() == [[0, 0], [2, 0]]
    held = found.items["x", "gathered"]
    assert (held.lo.tolist(), held.hi.tolist()) == ([[0, 0], [2, 0]], [[4, 6], [4, 6]])


def test_what_a_rank_starts_with_is_not_what_its_tiles_write() -> None:
    """Nobody hands over the first rows of y: they are neither an operand nor a result."""
    sent = push(0, 1, "y[0:2,0:6]")
    plan = plan_of(
        [sent],
        [],
        initial=[region(0, "y[0:2,0:6]"), region(0, "y[2:4,0:6]", True)],
        goals=[goal(1, "y[0:2,0:6]", 0)],
    )
    found = buffers.place_buffers(plan, AxisMap.of({"y": "out"}), ("out",))
    assert found.items["y", "send"].lo.tolist() == [[2, 0], [0, 0]]
    with pytest.raises(InputError, match=re.escape("no buffer for y [0:2, 0:6]; a box must")):
        found.source(0)


def test_data_that_no_operand_is() -> None:
    plan = plan_of(
        [push(0, 1, "y[0:2,0:6]", "x[0:2,0:6]")],
        [],
        initial=[region(0, "y[0:2,0:6]")],
        goals=[goal(1, "x[0:2,0:6]", source="y[0:2,0:6]")],
    )
    with pytest.raises(
        InputError,
        match=re.escape(
            "plan small: rank 0 starts with y[0:2,0:6], but the axis map binds y to no operand"
        ),
    ):
        buffers.place_buffers(plan, AxisMap.of({"x": "a"}), ())


def test_boxes_that_lie_nowhere() -> None:
    work = gathering()
    found = buffers.place_buffers(work.schedule.plan, work.axis_map, ("out",))
    with pytest.raises(
        InputError,
        match=re.escape("plan all_gather_swizzle: rank 0 has no buffer for x [4:9, 0:4]; a box"),
    ):
        found.find("x", ("input", "gathered"), 0, np.array([4, 0]), np.array([9, 4]))


def test_results_that_end_in_no_tensor() -> None:
    plan = plan_of([], initial=[region(0, "y[0:4,0:6]", True)], goals=[])
    with pytest.raises(
        InputError,
        match="plan small: goals made of tensor y lie in no tensor; the operator can return",
    ):
        buffers.result_tensor(plan, Binding("y", "out"))


def test_results_that_end_in_two_tensors() -> None:
    plan = plan_of(
        [],
        initial=[region(0, "y[0:4,0:6]", True)],
        goals=[
            goal(0, "y[0:4,0:6]", 0),
            goal(0, "x[0:4,0:6]", 0, source="y[0:4,0:6]"),
        ],
    )
    with pytest.raises(InputError, match=re.escape("made of tensor y lie in ['x', 'y']")):
        buffers.result_tensor(plan, Binding("y", "out"))
