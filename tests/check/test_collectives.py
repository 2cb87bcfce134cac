"""Collectives: do the members agree, do the sizes fit, and what does each one move?"""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.collectives import find_instances, find_transfers
from syncopate_jax.check.report import Report
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.comm import OpDep
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from tests.check.small_plans import collective, found, goal, plan_of, push, region

HALF = ("x[0:2,0:6]", "x[2:4,0:6]")
WHOLE = ("x[0:4,0:6]", "x[0:4,0:6]")
PARTIAL = ("y[0:4,0:6]", "y[0:4,0:6]")
PAIR = (0, 1)


def pair(kinds, srcs, dsts, *, goals=(), initial=(), **more) -> Plan:
    """One collective of two ranks; a tuple gives each rank its own value."""
    each = [{k: v[r] if isinstance(v, tuple) else v for k, v in more.items()} for r in PAIR]
    kinds = (kinds, kinds) if isinstance(kinds, str) else kinds
    lists = [[collective(r, kinds[r], srcs[r], dsts[r], *PAIR, **each[r])] for r in PAIR]
    return plan_of(*lists, initial=list(initial), goals=list(goals))


def gather(**more) -> Plan:
    initial = [region(r, HALF[r]) for r in PAIR]
    goals = [goal(r, WHOLE[r]) for r in PAIR]
    more = {"concat_axis": 0} | more
    return pair("all_gather", HALF, WHOLE, initial=initial, goals=goals, **more)


def test_gather_in_place_is_right() -> None:
    assert found(gather()) == []


@pytest.mark.parametrize(
    ("more", "field", "own", "first"),
    [
        ({"reduce": ("none", "sum")}, "reduce", "sum", "none"),
        ({"channel": ("nic", "host")}, "channel", "host", "nic"),
        ({"concat_axis": (0, 1)}, "concat_axis", "1", "0"),
        ({"split_axis": (0, 1)}, "split_axis", "1", "0"),
    ],
)
def test_members_that_disagree(more: dict, field: str, own: str, first: str) -> None:
    assert found(gather(**more)) == [
        f"rank 1 op 0 [collective-mismatch]: is collective 0 over group (0, 1) with {field} "
        f"{own}, but r0.0 has {first}; members must agree and list collectives in one order"
    ]


def test_members_in_another_order() -> None:
    a = [collective(r, "broadcast", WHOLE[r], WHOLE[r], *PAIR) for r in PAIR]
    b = [collective(r, "all_gather", HALF[r], WHOLE[r], *PAIR, concat_axis=0) for r in PAIR]
    plan = plan_of([a[0], b[0]], [b[1], a[1]], initial=[], goals=[])
    text = "members must agree and list collectives in one order"
    assert found(plan)[0] == (
        "rank 1 op 0 [collective-mismatch]: is collective 0 over group (0, 1) with kind "
        f"all_gather, but r0.0 has broadcast; {text}"
    )


def test_tensors_that_differ() -> None:
    plan = pair("all_reduce", ("y[0:4,0:6]", "x[0:4,0:6]"), WHOLE, reduce="sum")
    assert found(plan)[0] == (
        "rank 1 op 0 [collective-mismatch]: is collective 0 over group (0, 1) with src tensor x, "
        "but r0.0 has y; members must agree and list collectives in one order"
    )


def test_member_that_lists_too_few() -> None:
    op = collective(0, "broadcast", WHOLE[0], WHOLE[0], *PAIR)
    assert found(plan_of([op, op], [], initial=[], goals=[])) == [
        "rank 1 [collective-count]: rank 1 lists 0 collectives over group (0, 1), but rank 0 "
        "lists 2; every member must list its part"
    ]


@pytest.mark.parametrize(
    ("kind", "reduce", "needs"),
    [("all_gather", "sum", "none"), ("all_reduce", "none", "sum or max")],
)
def test_reduction_that_does_not_fit(kind: str, reduce: str, needs: str) -> None:
    plan = pair(kind, WHOLE, PARTIAL, reduce=reduce, concat_axis=0)
    assert found(plan) == [
        f"rank 0 op 0 [collective-reduce]: {kind} has reduce {reduce}, needs {needs}"
    ]


def test_axis_that_does_not_exist() -> None:
    assert found(gather(concat_axis=2)) == [
        "rank 0 op 0 [collective-axis]: all_gather has concat_axis 2, needs one of the 2 "
        "dimensions of x"
    ]


def sizes(plan: Plan) -> list[str]:
    return [text.partition(": ")[2] for text in found(plan) if "[collective-size]" in text]


def needs(kind: str, verb: str, got: tuple, wanted: tuple) -> str:
    return f"{kind} {verb} {got}, but the other members' boxes need {wanted}"


def test_sizes_of_a_gather() -> None:
    assert sizes(gather(concat_axis=1)) == [needs("all_gather", "writes", (4, 6), (2, 12))] * 2
    plan = pair("all_gather", (HALF[0], "x[2:4,0:5]"), WHOLE, concat_axis=0)
    assert sizes(plan) == [needs("all_gather", "reads", (2, 5), (2, 6))]


def test_sizes_of_a_scatter() -> None:
    given = {"split_axis": 0, "reduce": "sum"}
    plan = pair("reduce_scatter", PARTIAL, ("y[0:1,0:6]", "y[2:4,0:6]"), **given)
    assert sizes(plan) == [needs("reduce_scatter", "reads", (4, 6), (3, 6))] * 2
    plan = pair("reduce_scatter", PARTIAL, ("y[0:2,0:6]", "y[2:4,0:5]"), **given)
    assert sizes(plan) == [needs("reduce_scatter", "writes", (2, 5), (2, 6))]


def test_sizes_of_a_reduction() -> None:
    plan = pair("all_reduce", PARTIAL, ("x[0:4,0:6]", "x[0:2,0:6]"), reduce="max")
    assert sizes(plan) == [needs("all_reduce", "writes", (2, 6), (4, 6))]
    plan = pair("broadcast", ("x[0:4,0:6]", "x[0:2,0:6]"), PARTIAL)
    assert sizes(plan) == [needs("broadcast", "reads", (2, 6), (4, 6))]


def test_sizes_of_an_exchange() -> None:
    given = {"split_axis": 1, "concat_axis": 0}
    plan = pair("all_to_all", HALF, ("y[0:4,0:3]", "y[0:4,3:5]"), **given)
    assert sizes(plan) == [needs("all_to_all", "reads", (2, 6), (2, 5))] * 2
    plan = pair("all_to_all", HALF, ("y[0:3,0:3]", "y[0:4,3:6]"), **given)
    assert sizes(plan) == [needs("all_to_all", "writes", (3, 3), (4, 3))]
    plan = pair("all_to_all", HALF, PARTIAL, split_axis=0, concat_axis=0)
    assert sizes(plan) == [needs("all_to_all", "writes", (4, 6), (2, 6))] * 2
    plan = pair("all_to_all", (HALF[0], "x[0:3,0:5]"), HALF, split_axis=0, concat_axis=0)
    assert needs("all_to_all", "reads", (3, 5), (3, 6)) in sizes(plan)


@pytest.mark.parametrize(
    ("kind", "srcs", "dsts", "more"),
    [
        ("all_gather", HALF[::-1], WHOLE, {"concat_axis": 0}),
        ("all_to_all", WHOLE, WHOLE, {"concat_axis": 0, "split_axis": 0}),
    ],
)
def test_boxes_that_meet_out_of_place(kind, srcs, dsts, more) -> None:
    expected = [
        f"rank {r} op 0 [self-overlap]: {kind} reads {srcs[r]} and writes {dsts[r]}; they may meet "
        "only where a rank's own piece stays in place"
        for r in PAIR
    ]
    assert found(pair(kind, srcs, dsts, **more)) == expected


def test_member_with_an_empty_share_takes_part() -> None:
    plan = pair(
        "all_gather", ("x[0:4,0:6]", "x[4:4,0:6]"), WHOLE, concat_axis=0,
        initial=[region(0, "x[0:4,0:6]")], goals=[goal(1, "x[0:4,0:6]")],
    )  # fmt: skip
    assert found(plan) == []


def test_member_that_sends_nothing_orders_nothing() -> None:
    """What waits for rank 0's part knows nothing about what rank 1, which sends nothing, did."""
    whole, pad = "x[0:4,0:6]", "y[0:4,0:6]"
    first = push(1, 0, pad, pad)
    parts = [
        collective(0, "all_gather", whole, "x[0:4,0:6]", *PAIR, concat_axis=0),
        collective(1, "all_gather", "x[4:4,0:6]", "x[0:4,0:6]", *PAIR, concat_axis=0,
                   deps=(OpDep(1, 0),)),
    ]  # fmt: skip
    last = push(0, 1, pad, "z[0:4,0:6]", deps=(OpDep(0, 0),))
    plan = plan_of(
        [parts[0], last], [first, parts[1]],
        initial=[region(0, whole), region(1, pad)],
        goals=[goal(1, whole), goal(1, "z[0:4,0:6]", 1, source=pad)],
        tensors=(Tensor("x", (4, 6)), Tensor("y", (4, 6), per_rank=True), Tensor("z", (4, 6))),
    )  # fmt: skip
    assert found(plan)[0] == (
        "rank 0 op 1 [race]: reads y[0:4,0:6] of rank 0, which r1.0 writes, and neither waits for "
        "the other; add a dependency"
    )


def test_transfers_of_an_uneven_exchange_along_one_axis() -> None:
    """Five rows of rank 0 and two of rank 1, cut as equally as can be."""
    tensors = (Tensor("s", (5,), per_rank=True), Tensor("r", (4,), per_rank=True))
    ops = [
        [collective(0, "all_to_all", "s[0:5]", "r[0:4]", *PAIR, split_axis=0, concat_axis=0)],
        [collective(1, "all_to_all", "s[0:2]", "r[0:3]", *PAIR, split_axis=0, concat_axis=0)],
    ]
    goals = [
        Goal(0, "r", Box((0,), (3,)), "s", (0,), (0,)),
        Goal(0, "r", Box((3,), (4,)), "s", (0,), (1,)),
        Goal(1, "r", Box((0,), (2,)), "s", (3,), (0,)),
        Goal(1, "r", Box((2,), (3,)), "s", (1,), (1,)),
    ]
    initial = [Region(0, "s", Box((0,), (5,))), Region(1, "s", Box((0,), (2,)))]
    plan = plan_of(*ops, initial=initial, goals=goals, tensors=tensors)
    assert found(plan) == []
    moved = find_transfers(plan, find_instances(plan, Report(plan)))
    rows = np.stack([moved.src_row, moved.dst_row, moved.src_lo[:, 0], moved.dst_lo[:, 0]], axis=1)
    assert rows.tolist() == [[0, 0, 0, 0], [0, 1, 3, 0], [1, 0, 0, 3], [1, 1, 1, 2]]
