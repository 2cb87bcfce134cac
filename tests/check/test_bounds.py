"""Indices that point nowhere and boxes that do not fit, each with its exact message."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from syncopate_jax.check.report import SHOWN
from syncopate_jax.check.verify import verify
from syncopate_jax.ir.columns import make_columns
from syncopate_jax.ir.comm import ComputeDep, OpDep
from syncopate_jax.ir.plan import Plan, Tensor
from tests.check.small_plans import (
    X,
    chunk,
    codes,
    found,
    goal,
    halves,
    move,
    plan_of,
    push,
    region,
    with_column,
)


def test_nothing_is_found_in_a_right_plan() -> None:
    assert found(halves()) == []


def test_rows_out_of_order_are_found_first() -> None:
    assert found(with_column(halves(), "rank", 0, 9)) == [
        "[unsorted]: rows must be sorted by rank; row 0 is of rank 9, row 1 of rank 1"
    ]


@pytest.mark.parametrize(
    ("column", "value", "limit"),
    [
        ("src_rank", 5, 2),
        ("dst_rank", -1, 2),
        ("kind", 9, 6),
        ("reduce", 3, 3),
        ("channel", 7, 1),
        ("origin", -2, 1),
        ("src_tensor", 2, 2),
        ("dst_tensor", -1, 2),
    ],
)
def test_index_out_of_range(column: str, value: int, limit: int) -> None:
    expected = (
        f"rank 0 op 0 [bad-index]: {column} is {value}, "
        f"but must be at least 0 and less than {limit}"
    )
    assert expected in found(with_column(halves(), column, 0, value))


def test_listing_rank_out_of_range() -> None:
    expected = "op 0 [bad-index]: rank is -3, but must be at least 0 and less than 2"
    assert expected in found(with_column(halves(), "rank", 0, -3))


def test_collective_without_group() -> None:
    expected = "rank 0 op 0 [bad-index]: group is -1, but must be at least 0 and less than 0"
    assert expected in found(with_column(halves(), "kind", 0, 1))


def test_transfer_listed_on_neither_end() -> None:
    op = move(0, 1, 1, "x[0:2,0:6]", "x[2:4,0:6]")
    assert found(halves(op)) == [
        "rank 0 op 1 [not-an-end]: rank 0 lists a transfer from rank 1 to rank 1; list it on its "
        "source (push) or its destination (pull)"
    ]


def test_collective_with_other_ends() -> None:
    plan = with_column(replace(halves(), groups=((0, 1),)), "kind", 0, 1)
    assert found(with_column(plan, "group", 0, 0)) == [
        "rank 0 op 0 [not-an-end]: a collective has src_rank 0 and dst_rank 1; both must be the "
        "rank that lists it, 0"
    ]


def test_groups_with_strangers_and_twins() -> None:
    assert found(halves(groups=((0, 4), (1, 1)))) == [
        "[bad-group]: group (0, 4) holds ranks [4]; the plan has 2 ranks",
        "[bad-group]: group (1, 1) holds ranks [1] more than once",
    ]


def test_rank_outside_its_own_group() -> None:
    plan = with_column(replace(halves(), groups=((1,),)), "kind", 0, 1)
    plan = with_column(with_column(plan, "group", 0, 0), "dst_rank", 0, 0)
    assert found(plan) == [
        "rank 0 op 0 [bad-group]: rank 0 takes part in a collective over (1,), which it is not "
        "in; list it on the ranks of the group"
    ]


@pytest.mark.parametrize(
    ("dep", "text"),
    [
        (OpDep(9, 0), "waits for r9.0, but the plan has 2 ranks"),
        (OpDep(1, 3), "waits for r1.3, but rank 1 lists only 1"),
        (OpDep(1, -1), "waits for r1.-1, but rank 1 lists only 1"),
    ],
)
def test_dependency_that_does_not_exist(dep: OpDep, text: str) -> None:
    plan = halves(push(0, 1, "x[0:2,0:6]", deps=(dep,)))
    assert found(plan) == [f"rank 0 op 1 [no-such-op]: {text}"]


@pytest.mark.parametrize("field", ["rank", "tensor"])
def test_compute_dependency_on_nothing(field: str) -> None:
    plan = halves(push(0, 1, "x[0:2,0:6]", deps=(ComputeDep(0, chunk("x[0:2,0:6]")),)))
    assert found(with_column(plan, f"cdep_{field}", 0, 6)) == [
        f"rank 0 op 1 [bad-index]: compute dependency {field} is 6, "
        "but must be at least 0 and less than 2"
    ]


def test_box_beyond_its_tensor() -> None:
    plan = with_column(halves(), "src_hi", 0, (5, 6))
    assert found(with_column(plan, "dst_hi", 0, (2, 7))) == [
        "rank 0 op 0 [out-of-bounds]: reads x[0:5,0:6], but x has shape (4, 6); keep the box "
        "inside the tensor",
        "rank 0 op 0 [out-of-bounds]: writes x[0:2,0:7], but x has shape (4, 6); keep the box "
        "inside the tensor",
        "rank 0 op 0 [shape-mismatch]: reads x[0:5,0:6] but writes x[0:2,0:7]; both boxes of a "
        "transfer must have the same shape",
    ]


def test_box_before_its_tensor() -> None:
    plan = with_column(halves(), "src_lo", 0, (-1, 0))
    assert (
        "rank 0 op 0 [out-of-bounds]: reads x[-1:2,0:6], but x has shape (4, 6); keep the box "
        "inside the tensor"
    ) in found(plan)


def test_padding_counts_as_part_of_the_box() -> None:
    wide = Tensor("w", (2, 2, 2), "float32")
    plan = plan_of(
        [push(0, 1, "x[0:4,0:6]")],
        [],
        initial=[region(0, "x[0:4,0:6]")],
        goals=[goal(1, "x[0:4,0:6]")],
        tensors=(X, wide),
    )
    assert found(plan) == []
    assert found(with_column(plan, "src_hi", 0, (4, 6, 2)))[0] == (
        "rank 0 op 0 [out-of-bounds]: reads x[0:4,0:6,0:2], but x has shape (4, 6); keep the box "
        "inside the tensor"
    )


def test_empty_box() -> None:
    assert found(with_column(halves(), "dst_hi", 0, (0, 6)))[0] == (
        "rank 0 op 0 [empty-box]: writes x[0:0,0:6], which is empty; leave such operations out"
    )


def test_types_that_differ() -> None:
    plan = plan_of(
        [push(0, 1, "x[0:4,0:6]", "z[0:4,0:6]")],
        [],
        initial=[region(0, "x[0:4,0:6]")],
        goals=[goal(1, "z[0:4,0:6]", source="x[0:4,0:6]")],
        tensors=(X, Tensor("z", (4, 6), "int32")),
    )
    assert found(plan) == [
        "rank 0 op 0 [dtype-mismatch]: reads x of type float32 but writes z of type int32; "
        "communication converts nothing",
        "rank 1 [dtype-mismatch]: goal z[0:4,0:6] is of type int32, its source x of float32",
    ]


def test_local_copy_onto_itself() -> None:
    plan = plan_of(
        [push(0, 0, "x[0:3,0:6]", "x[1:4,0:6]")],
        initial=[region(0, "x[0:3,0:6]")],
        goals=[goal(0, "x[1:4,0:6]", source="x[0:3,0:6]")],
    )
    assert found(plan) == [
        "rank 0 op 0 [self-overlap]: copies x[0:3,0:6] onto x[1:4,0:6] of the same rank; the "
        "boxes of a local copy must not overlap"
    ]


def test_compute_dependency_boxes() -> None:
    for box, code, text in (
        ("x[0:2,0:9]", "out-of-bounds", "which is not inside the tensor of shape (4, 6)"),
        ("x[0:2,3:3]", "empty-box", "which is empty; leave such dependencies out"),
    ):
        plan = halves(push(0, 1, "x[0:2,0:6]", deps=(ComputeDep(0, chunk(box)),)))
        assert found(plan) == [
            f"rank 0 op 1 [{code}]: waits for the tiles of {box} on rank 0, {text}"
        ]


def test_many_findings_of_a_kind_are_counted() -> None:
    n = SHOWN + 7
    columns = make_columns(
        n, 1, src_rank=0, dst_rank=1, src_lo=np.zeros((n, 1)), src_hi=np.full((n, 1), 9),
        dst_lo=np.zeros((n, 1)), dst_hi=np.full((n, 1), 4),
    )  # fmt: skip
    plan = Plan("many", 2, (Tensor("t", (4,)),), (), (), columns)
    findings = [finding for finding in verify(plan) if finding.code == "out-of-bounds"]
    assert len(findings) == SHOWN + 1
    assert findings[-1].message == "and 7 more operations like the ones above"


def test_huge_numbers_overflow_nothing() -> None:
    big = 2**31 - 1
    plan = with_column(with_column(halves(), "src_lo", 0, (-big, -big)), "src_hi", 0, (big, big))
    assert codes(plan) == {"out-of-bounds", "shape-mismatch"}
