"""Initial regions and goals that lie nowhere or ask for what has no meaning."""

from __future__ import annotations

from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.plan import Goal, Region
from tests.check.small_plans import found, goal, halves, region


def test_initial_regions_outside() -> None:
    plan = halves(initial=(region(5, "x[0:2,0:6]"), region(1, "x[2:5,0:6]"), region(0, "x[0:2]")))
    assert found(plan) == [
        "[bad-index]: initial x[0:2,0:6] is on rank 5, but the plan has 2 ranks",
        "rank 1 [out-of-bounds]: initial x[2:5,0:6] does not lie inside x of shape (4, 6)",
        "rank 0 [out-of-bounds]: initial x[0:2] does not lie inside x of shape (4, 6)",
    ]


def test_goals_outside() -> None:
    plan = halves(
        goals=(
            Goal(-1, "x", Box((0, 0), (4, 6))),
            goal(0, "x[0:4,0:7]"),
            goal(0, "x[0:4,0:6]", source="x[1:5,0:6]"),
            Goal(0, "x", Box((0, 0), (4, 6)), source_lo=(0,)),
        )
    )
    assert found(plan) == [
        "[bad-index]: goal x[0:4,0:6] is on rank -1, but the plan has 2 ranks",
        "rank 0 [out-of-bounds]: goal x[0:4,0:7] does not lie inside x of shape (4, 6)",
        "rank 0 [out-of-bounds]: goal x[0:4,0:7] has its source at (0, 0) of x, where a box of "
        "shape (4, 7) does not lie inside x of shape (4, 6)",
        "rank 0 [out-of-bounds]: goal x[0:4,0:6] has its source at (1, 0) of x, where a box of "
        "shape (4, 6) does not lie inside x of shape (4, 6)",
        "rank 0 [out-of-bounds]: goal x[0:4,0:6] has its source at (0,) of x, where a box of "
        "shape (4, 6) does not lie inside x of shape (4, 6)",
    ]


def test_goals_without_meaning() -> None:
    plan = halves(
        goals=(
            Goal(0, "x", Box((0, 0), (4, 6)), "nope"),
            goal(0, "y[0:4,0:6]"),
            goal(0, "y[0:4,0:6]", 1, 1),
            goal(0, "y[0:4,0:6]", 4),
        )
    )
    assert found(plan) == [
        "rank 0 [bad-goal]: goal x[0:4,0:6] has source 'nope', which is no tensor of ['x', 'y']",
        "rank 0 [bad-goal]: goal y[0:4,0:6] has the per-rank source y but names no ranks; say "
        "whose data it is",
        "rank 0 [bad-goal]: goal y[0:4,0:6] reduces over ranks (1, 1); they must be distinct and "
        "less than 2",
        "rank 0 [bad-goal]: goal y[0:4,0:6] reduces over ranks (4,); they must be distinct and "
        "less than 2",
    ]


def test_empty_regions_and_goals_hold_and_ask_for_nothing() -> None:
    plan = halves()
    nothing = Box((1, 0), (1, 6))
    plan = halves(
        initial=(*plan.initial, Region(0, "x", nothing)),
        goals=(*plan.goals, Goal(0, "x", nothing)),
    )
    assert found(plan) == []
