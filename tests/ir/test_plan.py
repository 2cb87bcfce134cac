"""Plans as objects and as columns: the two views agree, and what each refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from syncopate_jax.errors import InputError
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.columns import Columns, make_columns
from syncopate_jax.ir.comm import P2P, Collective, ComputeDep, OpDep, Operation
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.plans.all_gather_ring import all_gather_ring

X, Y = Tensor("x", (4, 2)), Tensor("y", (3,), "float32", per_rank=True)
HALF, ROW = Chunk("x", Box((0, 0), (2, 2))), Chunk("y", Box((0,), (3,)))
FAR = Chunk("x", Box((0, 0), (2, 2**31)))
FARTHER = Chunk("x", Box((0, 2**70), (4, 2**70)))


def build(ops: list[list[Operation]], **changes: Any) -> Plan:
    return build_plan("p", len(ops), [X, Y], [], [], ops, **changes)


def test_objects_survive_the_columns() -> None:
    ops: list[list[Operation]] = [
        [
            P2P(0, 0, 1, HALF, HALF, (OpDep(1, 0), ComputeDep(1, ROW)), "sum", "nic", "o"),
            Collective(0, "all_to_all", ROW, ROW, (1, 0), (), "none", "host", 0, 0, "c"),
        ],
        [P2P(1, 1, 1, ROW, ROW)],
    ]
    plan = build(ops)
    assert [list(plan.ops(rank)) for rank in range(2)] == ops
    assert plan.op(0, 1) == ops[0][1]
    assert (plan.num_ops, plan.has_collectives()) == (3, True)
    assert plan.columns.src_size().tolist() == plan.columns.dst_size().tolist() == [4, 3, 3]
    assert plan.columns.dep_row(2).tolist() == [2]
    assert plan.columns.dep_owner().tolist() == plan.columns.cdep_owner().tolist() == [0]
    assert (X.itemsize, Y.itemsize, X.box) == (2, 4, Box((0, 0), (4, 2)))


def test_dependencies_on_nothing_have_no_row() -> None:
    deps = (OpDep(0, 1), OpDep(2, 0), OpDep(-1, 0), OpDep(1, -1), OpDep(0, 0))
    plan = build([[P2P(0, 0, 1, HALF, HALF, deps)], []])
    assert plan.columns.dep_row(2).tolist() == [-1, -1, -1, -1, 0]


def test_directions() -> None:
    ends = {(0, 1): "push", (1, 0): "pull", (0, 0): "copy"}
    for (src, dst), direction in ends.items():
        assert P2P(0, src, dst, HALF, HALF).direction == direction


def test_goal_tells_where_its_value_is() -> None:
    box = Box((2, 0), (4, 2))
    assert Goal(0, "x", box).source_chunk == Chunk("x", box)
    assert Goal(0, "x", box, "z", (0, 1)).source_chunk == Chunk("z", Box((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reduce": "min"}, r"goal x\[0:4,0:2\] of rank 0: reduction 'min' is not one of sum, max"),
        ({"ranks": (0, 1), "reduce": "none"}, "reduction 'none' is not one of sum, max"),
        ({"reduce": "max"}, r"goal x\[0:4,0:2\] of rank 0: is a max over no ranks; name the ranks"),
    ],
)
def test_goal_refuses(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Goal(0, "x", X.box, **wrong)
    assert Goal(0, "x", X.box, ranks=(0, 1), reduce="max").reduce == "max"


def test_tables_can_be_given() -> None:
    plan = build([[P2P(0, 0, 0, HALF, HALF)]], channels=("nic",), origins=("a",), ndim=3)
    assert (plan.channels, plan.origins, plan.columns.ndim) == (("nic", "nvlink"), ("a", ""), 3)


def test_plans_without_dimensions_can_be_built() -> None:
    scalar = Chunk("s", Box((), ()))
    ops = [[P2P(0, 0, 1, scalar, scalar)], []]
    plan = build_plan("p", 2, [Tensor("s", ())], [], [], ops)
    assert plan.columns.src_size().tolist() == [1]
    assert plan.op(0, 0).src == scalar


def test_plans_compare_by_every_field() -> None:
    plan, again = all_gather_ring(3, (6, 2)), all_gather_ring(3, (6, 2))
    assert plan == again and len({plan, again}) == 1
    assert plan.columns != 3 and plan != plan.columns
    assert plan != replace(plan, name="other")
    changed = replace(plan.columns, channel=plan.columns.channel + 1)
    assert plan != plan.with_columns(changed)
    assert plan.with_columns(changed, name="n") == replace(plan, name="n", columns=changed)
    assert plan != replace(plan, goals=plan.goals[1:])


def test_columns_cannot_be_written() -> None:
    plan = all_gather_ring(3, (6, 2))
    with pytest.raises(ValueError, match="read-only"):
        plan.columns.src_rank[0] = 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "a b"}, "tensor: name 'a b' must be an identifier"),
        ({"shape": (1, -2)}, r"tensor t: shape \(1, -2\) has a negative extent"),
        ({"shape": (2**31,)}, r"tensor t: shape \(2147483648,\) has an extent beyond 2147483647"),
        ({"shape": (2**20, 2**20, 2)}, r"tensor t: .* has 2199023255552 elements, at most 10995"),
        ({"shape": (1,) * 65}, "tensor t: its shape has 65 dimensions, at most 64 fit"),
        ({"dtype": "int4"}, "tensor t: dtype 'int4' is not one of bfloat16, float16"),
    ],
)
def test_tensor_refuses(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Tensor(**{"name": "t", "shape": (1,), **wrong})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_ranks": 0}, "plan p: needs at least 1 rank, found 0"),
        ({"tensors": (X, X)}, r"plan p: tensor names repeat: \['x', 'x'\]"),
        ({"channels": ("nic", "nic")}, r"plan p: channels repeat: \['nic', 'nic'\]"),
        (
            {"initial": (Region(0, "z", X.box),)},
            r"plan p: initial data z\[.*\] of rank 0 names no tensor of \['x'",
        ),
        ({"goals": (Goal(0, "z", X.box),)}, r"plan p: goal z\[.*\] of rank 0 names no tensor of"),
        ({"tensors": (X, Tensor("y", (1, 1, 1)))}, "boxes have 2 dimensions, a tensor has 3"),
    ],
)
def test_plan_refuses(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(build([[P2P(0, 0, 0, HALF, HALF)]]), **wrong)


def test_plan_has_what_it_has() -> None:
    plan = build([[P2P(0, 0, 0, HALF, HALF)]])
    assert plan.tensor("y") == Y
    with pytest.raises(InputError, match=r"plan p: no tensor 'z'; its tensors are \['x', 'y'\]"):
        plan.tensor("z")
    with pytest.raises(InputError, match="plan p: rank 0 has 1 operations, no 1"):
        plan.op(0, 1)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([[P2P(1, 0, 1, HALF, HALF)], []], "op 0 in the list of rank 0 says rank 1"),
        ([[P2P(0, 0, 1, Chunk("z", HALF.box), HALF)], []], r"no tensor 'z'; known: \['x', 'y'\]"),
        ([[P2P(0, 0, 1, HALF, Chunk("y", HALF.box))], []], r"has 2 dimensions, tensor y has 1"),
        ([[P2P(0, 0, 1, HALF, HALF, reduce="min")], []], "reduction 'min' is not one of none, sum"),
        (
            [[Collective(0, "gossip", ROW, ROW, (0,))], []],
            "kind 'gossip' is not one of p2p",
        ),
        (
            [[P2P(0, 0, 1, HALF, FAR)], []],
            rf"rank 0 op 0: x\[0:2,0:{2**31}\] has the number {2**31}, which is not in "
            rf"{1 - 2**31}..{2**31 - 1}",
        ),
        ([[P2P(0, 0, 1, FARTHER, HALF)], []], rf"{2**70}\] has the number {2**70}, which is"),
        ([[P2P(0, 0, 2**32 + 1, HALF, HALF)], []], f"op 0: it has the number {2**32 + 1}, which"),
        ([[Collective(0, "all_to_all", ROW, ROW, (0,), split_axis=2**31)], []], f"number {2**31},"),
        ([[P2P(0, 0, 1, HALF, HALF, (OpDep(0, 2**31),))], []], f"r0.{2**31} has the number"),
        ([[P2P(0, 0, 1, HALF, HALF, (ComputeDep(2**31, ROW),))], []], f"has the number {2**31},"),
        ([[P2P(0, 0, 1, HALF, HALF, (ComputeDep(0, FAR),))], []], f"op 0: x.* number {2**31}, wh"),
    ],
)
def test_builder_refuses(ops: list[list[Operation]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(ops)


def test_builder_counts_lists_and_dimensions() -> None:
    with pytest.raises(InputError, match="plan p: 3 ranks need as many lists, found 1"):
        build_plan("p", 3, [X], [], [], [[]])
    with pytest.raises(InputError, match="plan p: boxes of 1 dimensions, a tensor has 2"):
        build([[]], ndim=1)


def test_columns_refuse() -> None:
    box = np.zeros((2, 1), np.int32)
    given: dict[str, Any] = {"src_lo": box, "src_hi": box, "dst_lo": box, "dst_hi": box}
    with pytest.raises(InputError, match="columns: rows must be sorted by rank"):
        make_columns(2, 1, src_rank=np.array([1, 0]), dst_rank=0, **given)
    with pytest.raises(InputError, match=r"columns: kind has shape \(1,\), needs \(2,\)"):
        make_columns(2, 1, src_rank=0, dst_rank=0, kind=np.zeros(1), **given)
    columns = make_columns(2, 1, src_rank=0, dst_rank=0, **given)
    with pytest.raises(InputError, match="columns: dep_start must rise from 0 to 0"):
        replace(columns, dep_start=np.array([0, 1, 0]))
    assert set(Columns.__slots__) >= set(given)


@pytest.mark.parametrize("number", [2**31, 2**32 + 4, -(2**31), 2**70])
def test_columns_hold_32_bits(number: int) -> None:
    """Numbers beyond that were another number once they are stored."""
    box = np.zeros((2, 1), np.int32)
    boxes = {"src_lo": box, "src_hi": box, "dst_lo": box, "dst_hi": np.array([[1], [number]])}
    limits = f"is {number}, which is not in {1 - 2**31}..{2**31 - 1}"
    with pytest.raises(InputError, match=re.escape(f"columns: dst_hi[1, 0] {limits}")):
        make_columns(2, 1, src_rank=0, dst_rank=0, **boxes)
    boxes["dst_hi"] = box
    with pytest.raises(InputError, match=re.escape(f"columns: dst_rank[0] {limits}")):
        make_columns(2, 1, src_rank=0, dst_rank=number, **boxes)
