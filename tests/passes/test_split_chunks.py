"""Splitting chunks: what becomes of dependencies, tiles and collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncopate_jax.check.verify import verify
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.comm import ComputeDep, OpDep
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.text import from_text, to_text
from syncopate_jax.passes.split_chunks import split_chunks
from syncopate_jax.plans.all_gather_ring import all_gather_ring
from syncopate_jax.plans.all_reduce_two_shot import all_reduce_two_shot
from syncopate_jax.plans.collective import collective
from syncopate_jax.plans.reduce_scatter_ring import reduce_scatter_ring
from tests.check.random_plans import random_plan
from tests.conformance.template import assert_sound
from tests.golden.compare import golden


def test_text() -> None:
    plan = all_reduce_two_shot(2, (4, 3))
    text = to_text(split_chunks(plan, 2))
    assert text == golden("passes/split_chunks.txt", text)


@pytest.mark.parametrize(("split", "axis"), [(3, 0), (2, 1)])
def test_split_plan_is_the_template_split_as_much(split: int, axis: int) -> None:
    whole = reduce_scatter_ring(4, (26, 5))
    fine = reduce_scatter_ring(4, (26, 5), split=split, split_axis=axis)
    pieces = split_chunks(whole, split, axis)
    assert pieces.with_columns(pieces.columns, origins=fine.origins) == fine


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), parts=st.integers(1, 5), axis=st.integers(0, 1))
def test_random_plans_stay_sound(seed: int, parts: int, axis: int) -> None:
    plan = random_plan(seed)
    try:
        split = split_chunks(plan, parts, axis)
    except UnsupportedError as error:
        assert plan.has_collectives() and "run expand_collectives first" in str(error)
    except InputError as error:
        assert f"axis {axis}, but its tensors have at most" in str(error)
    else:
        assert_sound(split)


def hand(ops: str) -> Plan:
    return from_text(
        "plan hand ranks 2\ntensor x [4] float32\ntensor y [4] float32\n"
        "tensor z [4] float32 per_rank\ntensor w [4] float32 per_rank\n" + ops
    )


def test_piece_waits_for_the_pieces_that_it_meets() -> None:
    plan = hand(
        "r0.0 push x[0:3] -> r1 x[0:3]\n"
        "r0.1 push x[3:4] -> r1 x[3:4]\n"
        "r1.0 push x[0:4] -> r0 y[0:4] after r0.0 r0.1\n"
    )
    split = split_chunks(plan, 2)
    assert [op.src.box.lo[0] for op in split.ops(0)] == [0, 2, 3]
    assert [op.deps for op in split.ops(1)] == [(OpDep(0, 0),), (OpDep(0, 1), OpDep(0, 2))]


def test_dependency_between_unrelated_chunks_is_on_every_piece() -> None:
    plan = hand("r0.0 push x[0:4] -> r1 x[0:4]\nr1.0 push z[0:4] -> r0 z[0:4] after r0.0\n")
    assert [op.deps for op in split_chunks(plan, 2).ops(1)] == [(OpDep(0, 0), OpDep(0, 1))] * 2


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("push x[0:4] -> r1 x[0:4]", "copy x[0:4] -> x[0:4]"),  # writes what was read
        ("push x[0:4] -> r1 x[0:4]", "push y[0:4] -> r1 x[0:4]"),  # writes what was written
    ],
)
def test_reuse_of_a_buffer_is_ordered_piece_by_piece(first: str, then: str) -> None:
    split = split_chunks(hand(f"r0.0 {first}\nr0.1 {then} after r0.0\n"), 2)
    assert [op.deps for op in split.ops(0)][2:] == [(OpDep(0, 0),), (OpDep(0, 1),)]


def test_order_through_another_place_is_lost_and_found_by_verification() -> None:
    plan = hand(
        "initial r0 z[0:4]\n"
        "goal r1 x[0:2] from z over 0\n"
        "goal r0 z[2:4] from z at [0] over 0\n"
        "goal r1 w[0:4] from z over 0\n"
        "r0.0 push z[0:4] -> r1 w[0:4]\n"
        "r1.0 push w[0:4] -> r0 y[0:4] after r0.0\n"
        "r1.1 copy w[0:2] -> x[0:2] after r0.0\n"
        "r0.1 copy y[0:2] -> z[2:4] after r1.0\n"
    )
    assert verify(plan) == ()
    assert "race" in {finding.code for finding in verify(split_chunks(plan, 2))}


def test_waits_for_tiles_shrink_to_the_piece() -> None:
    plan = hand(
        "r0.0 push x[0:4] -> r1 x[0:4] after "
        "compute(r0 x[0:3]) compute(r1 x[0:4]) compute(r0 y[0:4]) compute(r1 y[0:2])\n"
    )

    def chunks(index: int) -> list[tuple[int, str]]:
        deps = split_chunks(plan, 2).op(0, index).deps
        return [(dep.rank, str(dep.chunk)) for dep in deps if isinstance(dep, ComputeDep)]

    unrelated = [(0, "y[0:4]"), (1, "y[0:2]")]
    assert chunks(0) == [(0, "x[0:2]"), (1, "x[0:2]"), *unrelated]
    assert chunks(1) == [(0, "x[2:3]"), (1, "x[2:4]"), *unrelated]
    shorter = hand("r0.0 push x[0:4] -> r1 x[0:4] after compute(r0 x[0:1])\n")
    assert [len(op.deps) for op in split_chunks(shorter, 2).ops(0)] == [1, 0]


def test_what_does_not_exist_stays_missing() -> None:
    plan = hand("r0.0 push x[0:4] -> r1 x[0:4] after r1.7\n")
    assert [op.deps for op in split_chunks(plan, 2).ops(0)] == [(OpDep(1, 7),)] * 2


def test_only_the_named_tensor_is_cut() -> None:
    plan = hand("r0.0 push x[0:4] -> r1 x[0:4]\nr0.1 push z[0:4] -> r1 z[0:4]\n")
    split = split_chunks(plan, 4, -1, tensor="z")
    assert [str(op.src) for op in split.ops(0)] == [
        "x[0:4]", "z[0:1]", "z[1:2]", "z[2:3]", "z[3:4]",
    ]  # fmt: skip
    assert {op.src.box for op in split_chunks(plan, 1).ops(0)} == {Box((0,), (4,))}


def test_plans_without_operations_stay_as_they_are() -> None:
    plan = all_gather_ring(1, (4, 4))
    assert split_chunks(plan, 2) is plan


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_collective_is_cut_along_a_free_axis_only(kind: str) -> None:
    plan = collective(3, (6, 4), kind=kind)
    split = split_chunks(plan, 2, 1)
    assert split.num_ops == 6
    assert verify(split) == ()
    with pytest.raises(UnsupportedError, match=f"{kind} of rank 0 splits or concatenates axis 0"):
        split_chunks(plan, 2, 0)


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast"])
def test_collective_without_axes_is_cut_along_any(kind: str) -> None:
    for axis in (0, 1):
        split = split_chunks(collective(3, (6, 4), kind=kind), 3, axis)
        assert split.num_ops == 9
        assert verify(split) == ()


@pytest.mark.parametrize(
    ("ops", "arguments", "message"),
    [
        (
            "r0.0 all_reduce x[0:4] -> y[0:4] over 0:2 sum\n"
            "r1.0 all_reduce z[0:4] -> y[0:4] over 0:2 sum\n",
            {"tensor": "x"},
            r"all_reduce 0 over \(0, 1\) would be cut into 2 pieces by rank 0 but 1 by rank 1",
        ),
        (
            "r0.0 broadcast x[0:4] -> y[0:2] over 0:1\n",
            {},
            "broadcast of rank 0 reads 4 elements along axis 0 but writes 2",
        ),
    ],
)
def test_collectives_that_cannot_be_cut(ops: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        split_chunks(hand(ops), 2, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": 0}, "split_chunks of plan all_gather_ring: parts must be in 1..2147483647, fou"),
        ({"axis": 2}, "axis 2, but its tensors have at most 2 dimensions"),
        ({"axis": -1}, r"axis \(without tensor, counted from the front\) must be in 0"),
        ({"axis": 2, "tensor": "x"}, r"axis for tensor x 2 is not an axis of shape \(4, 4\)"),
        ({"tensor": "w"}, r"no tensor 'w'; its tensors are \['x'\]"),
    ],
)
def test_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_chunks(all_gather_ring(2, (4, 4)), **{"parts": 2, **arguments})


def test_a_million_pieces() -> None:
    plan = split_chunks(all_gather_ring(256, (1024, 8)), 4)
    assert plan.num_ops == 256 * 255 * 4
    assert np.array_equal(plan.columns.dep_row(256) >= 0, np.ones(256 * 254 * 4, bool))
