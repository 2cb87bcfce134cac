"""What plans begin and end with, told apart element by element, and gaps between boxes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from syncopate_jax.check import ends
from syncopate_jax.check.ends import difference, first_gap
from syncopate_jax.check.verify import verify
from syncopate_jax.errors import PlanError, UnsupportedError
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.plan import Plan
from syncopate_jax.plans.all_gather_swizzle import all_gather_swizzle
from syncopate_jax.plans.all_to_all_blocks import all_to_all_blocks
from syncopate_jax.plans.reduce_scatter_direct import reduce_scatter_direct
from tests.check.small_plans import halves, plan_of, region


def gather(ranks: int = 3, **changes: object) -> Plan:
    return all_gather_swizzle(ranks, (6, 4), dtype="float32", **changes)


def test_the_same_data_in_other_parts() -> None:
    plan = gather()
    parts = replace(
        plan,
        initial=tuple(replace(r, box=b) for r in plan.initial for b in r.box.split(1, 2)[::-1]),
        goals=tuple(replace(g, box=b) for g in plan.goals for b in g.box.split(0, 4)),
    )
    assert verify(parts) == ()
    assert difference(parts, plan, "this needs") == difference(plan, parts, "this needs") == ""


def test_tensors_go_by_their_places() -> None:
    assert difference(gather(tensor="other"), gather(), "this needs") == ""
    blocks = all_to_all_blocks(2, (4, 4), dtype="float32")
    assert difference(blocks, all_to_all_blocks(2, (4, 4), split=2), "this needs") == ""


def test_contributors_in_any_order() -> None:
    plan = reduce_scatter_direct(3, (6, 4))
    turned = replace(plan, goals=tuple(replace(g, ranks=g.ranks[::-1]) for g in plan.goals))
    assert difference(turned, plan, "this needs") == ""
    fewer = replace(plan, goals=(replace(plan.goals[0], ranks=(0, 2)), *plan.goals[1:]))
    assert difference(fewer, plan, "this needs") == (
        "rank 0 has the sum of y[0:2,0:4] over ranks (0, 2) in y[0:2,0:4], this needs the sum of "
        "y[0:2,0:4] over ranks (0, 1, 2)"
    )


def test_goals_that_are_not_asked_for() -> None:
    plan = gather()
    assert difference(plan, replace(plan, goals=plan.goals[:2]), "this needs") == (
        "rank 2 ends with x[0:6,0:4], this needs none there"
    )
    assert difference(gather(2), plan, "this needs") == "its number of ranks is 2, this needs 3"


def test_gaps_that_are_no_box() -> None:
    """The first of them is shown."""
    plan = gather()
    rows = [b for i, b in enumerate(Box.full((6, 4)).split(0, 6)) if i not in (1, 4)]
    goals = (*(replace(plan.goals[0], box=b) for b in rows), *plan.goals[1:])
    assert difference(replace(plan, goals=goals), plan, "this needs") == (
        "rank 0 ends without x[1:2,0:4], this needs it there"
    )


def test_who_produces() -> None:
    made, given = gather(produced=True), gather()
    assert difference(made, given, "this needs") == (
        "tiles of rank 0 produce x[0:2,0:4], this needs it to be there at the start"
    )
    assert difference(given, made, "this needs") == (
        "rank 0 is given x[0:2,0:4], this needs its tiles to produce it"
    )


def test_regions_that_make_no_sense() -> None:
    plan = halves()
    astray = replace(plan, initial=(*plan.initial, region(0, "x[3:9,0:6]")))
    with pytest.raises(PlanError, match=r"initial x\[3:9,0:6\] does not lie inside x"):
        difference(astray, plan, "this needs")


def test_too_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "MAX_ATOMS", 8)
    with pytest.raises(UnsupportedError, match="cut each other into 42 pieces, more than the 8"):
        difference(gather(), gather(), "this needs")


def test_plans_of_nothing() -> None:
    empty = plan_of([], [], initial=[], goals=[])
    assert difference(empty, empty, "this needs") == ""
    none = np.zeros((2, 2), np.int64)
    assert first_gap((4, 6), [], none, none) is None


@pytest.mark.parametrize("seed", range(40))
def test_gaps_are_those_of_a_mask(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, shape = 3, tuple(rng.integers(1, 6, size=rng.integers(1, 4)).tolist())
    ends_ = [np.sort(rng.integers(0, np.add(shape, 1), (ranks, 2, len(shape))), 1) for _ in "abcd"]
    frame, boxes = ends_[0], [
        (r, Box(tuple(one[r, 0].tolist()), tuple(one[r, 1].tolist())))
        for one in ends_[1:]
        for r in range(ranks)
    ]  # fmt: skip
    boxes += [(r, Box.full(shape)) for r in range(ranks) if rng.random() < 0.5]
    lacking = np.zeros((ranks, *shape), bool)
    for r in range(ranks):
        lacking[(r, *map(slice, *frame[r]))] = True
        for _, box in (pair for pair in boxes if pair[0] == r):
            lacking[(r, *box.slices)] = False
    gap = first_gap(shape, boxes, frame[:, 0], frame[:, 1])
    if gap is None:
        assert not lacking.any()
    else:
        rank, box = gap
        assert box.size and lacking[(rank, *box.slices)].all()
        assert rank == np.flatnonzero(lacking.any(axis=tuple(range(1, lacking.ndim))))[0]
