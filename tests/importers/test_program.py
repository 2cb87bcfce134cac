"""Imported collectives: what they refuse, and what their plans are."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from syncopate_jax.check.verify import verify
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import FormatError, InputError, UnsupportedError
from syncopate_jax.importers.program import ImportedCollective, ImportedProgram, Reader
from syncopate_jax.ir import presets
from syncopate_jax.ir.comm import OpDep
from syncopate_jax.ir.topology import Topology
from syncopate_jax.passes.expand_collectives import expand_collectives
from syncopate_jax.registry import importers
from tests.backends import own_kernels
from tests.importers.exchanges import assert_plan_right, assert_right
from tests.ops import cases

P = jax.P
PAIRS = ((0, 1), (2, 3))
RING = (((0, 1), (1, 2), (2, 3), (3, 0)),) * 3
RING_OF_3 = (((0, 1), (1, 2), (2, 0)),) * 2


def make(**changes: Any) -> ImportedCollective:
    given: dict[str, Any] = {
        "name": "c", "kind": "all_reduce", "num_ranks": 4, "groups": PAIRS, "shape": (4, 6),
        "dtype": "float32", "reduce": "sum",
    }  # fmt: skip
    return ImportedCollective(**(given | changes))


GATHER = {"kind": "all_gather", "reduce": "none", "concat_axis": 0}
WHOLE = ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"groups": ((0, 1, 2), (3,))},
        {"cuts": ((1, 3), (0, 2)), "produced": True},
        {"reduce": "max", "shape": (1,)},
        {"shape": (0, 6)},
        GATHER | {"groups": ((3, 0), (1, 2)), "concat_axis": 1, "cuts": ((0, 3),)},
        GATHER | {"groups": WHOLE, "steps": RING},
        GATHER | {"groups": WHOLE, "steps": RING, "cuts": ((0, 2), (1, 3)), "produced": True},
        {"kind": "reduce_scatter", "split_axis": 1, "produced": True},
        {"kind": "reduce_scatter", "split_axis": 1, "template": "reduce_scatter_ring"},
        {"kind": "all_to_all", "reduce": "none", "split_axis": 0, "concat_axis": 1},
        {"kind": "all_to_all", "reduce": "none", "split_axis": 0, "concat_axis": 0},
        {"kind": "broadcast", "reduce": "none", "groups": ((2, 0),), "produced": True},
        {"kind": "permute", "reduce": "none", "groups": ((0, 3), (1, 1)), "produced": True},
        {"kind": "permute", "reduce": "none", "groups": ((0, 3),), "shape": (1, 0)},
    ],
)
def test_plans_are_right(changes: dict[str, Any]) -> None:
    for seed in (None, 1, 2):
        assert_right(make(**changes), seed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "send"}, "send c: is none of all_gather, reduce_scatter"),
        ({"shape": ()}, "a scalar's shape must be given as (1,)"),
        ({"shape": (2**31,)}, "shape (2147483648,) has an extent beyond 2147483647"),
        ({"shape": (-1,)}, "shape (-1,) has a negative extent"),
        ({"shape": (2**20, 2**21)}, "elements, at most 1099511627776 fit"),
        ({"shape": (1,) * 65}, "its shape has 65 dimensions, at most 64 fit"),
        ({"groups": ((0, 1), (2,))}, "its groups: rank 3 is in no group"),
        ({"groups": ((0, 1), ())}, "its groups: a group is empty"),
        (GATHER | {"groups": ((0, 1, 2), (3,))}, "its groups: groups differ in size: [1, 3]"),
        ({"concat_axis": 0}, "concat dimension 0 does not fit shape (4, 6)"),
        (GATHER | {"concat_axis": 2}, "concat dimension 2 does not fit shape (4, 6)"),
        ({"kind": "reduce_scatter"}, "split dimension -1 does not fit"),
        ({"kind": "reduce_scatter", "split_axis": 1, "shape": (4, 5)}, "extent 5, which 2 ranks"),
        (GATHER | {"shape": (2**31 - 1, 1)}, "of its result, shape (4294967294, 1) has an"),
        (GATHER | {"shape": (2**20, 2**20)}, "of its result, shape (2097152, 1048576) has 2199"),
        ({"reduce": "none"}, "reduction 'none' does not fit"),
        (GATHER | {"reduce": "sum"}, "reduction 'sum' does not fit"),
        ({"cuts": ((0, 2), (0, 2))}, "a dimension is cut twice"),
        ({"cuts": ((2, 2),)}, "dimension 2 to cut is none of shape (4, 6)"),
        ({"cuts": ((0, 5),)}, "cannot be cut into 5 parts along 0"),
        ({"cuts": ((0, 99), (1, 99)), "shape": (99, 99)}, "is cut into more than 4096 parts"),
        (GATHER | {"cuts": ((0, 2),)}, "is scattered or joined, so it cannot be cut as well"),
        ({"steps": RING}, "only an all_gather can be done in steps"),
        (GATHER | {"groups": WHOLE, "steps": RING[:2]}, "do not bring every block of its group"),
        (GATHER | {"groups": PAIRS, "steps": RING}, "do not bring every block of its group"),
        (GATHER | {"groups": WHOLE, "steps": (((0, 1),),)}, "at each step every rank must send"),
        (GATHER | {"groups": WHOLE, "steps": (((0, 1), (0, 2)),)}, "a rank is source twice"),
        ({"kind": "permute", "groups": ((0, 1, 2),)}, "each pair needs a source and a target"),
        ({"kind": "permute", "groups": ((0, 4),)}, "target 4 is none of the 4 ranks"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        make(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        GATHER | {"groups": ((2, 0), (1, 3))},
        {"kind": "reduce_scatter", "split_axis": 1, "cuts": ((0, 2),), "produced": True},
        {"kind": "all_reduce", "produced": True},
        {"kind": "all_to_all", "reduce": "none", "split_axis": 0, "concat_axis": 1},
        {"kind": "all_to_all", "reduce": "none", "split_axis": 0, "concat_axis": 0},
        {"kind": "broadcast", "reduce": "none", "groups": ((2, 0),), "produced": True},
    ],
)
@pytest.mark.parametrize("topology", [presets.h200_nvlink(4), presets.preset("torus:2x2", 4)])
def test_synthesised_plans_are_right(changes: dict[str, Any], topology: Topology) -> None:
    """The third way to lower any collective: transfers for the links of a topology."""
    what = make(**changes)
    plan = expand_collectives(what.plan(), "synthesis", topology=topology)
    assert not plan.has_collectives()
    assert_plan_right(what, plan)


def test_pieces_of_a_ring_follow_each_other() -> None:
    """A piece waits for the same piece's hop before, and for no other."""
    plan = make(**GATHER, groups=WHOLE, steps=RING, cuts=((1, 2),)).plan()
    ops = list(plan.ops(1))
    assert [op.deps for op in ops] == [
        (), (), (OpDep(1, 0),), (OpDep(1, 1),), (OpDep(0, 2),), (OpDep(0, 3),), (OpDep(0, 4),),
        (OpDep(0, 5),),
    ]  # fmt: skip


def test_names_of_plans_differ_and_origins_say_where_from() -> None:
    parts = (make(notes=(("line", "7"),)), make(name="c"), make(name="%c/"), make(name="c_1"))
    plans = ImportedProgram("p", "hlo", 4, parts).plans()
    assert [plan.name for plan in plans] == ["c", "c_1", "c_2", "c_1_1"]
    assert plans[0].origins == ("c line=7",)
    expanded = expand_collectives(plans[0])
    assert expanded.origins[0].endswith("for c line=7")


def test_plans_that_would_be_too_long() -> None:
    ranks = tuple(range(4096))
    gather = make(**GATHER, num_ranks=4096, groups=(ranks,))
    with pytest.raises(UnsupportedError, match="among 4096 ranks lists 16781312 transfers and goa"):
        gather.plan()
    assert make(num_ranks=4096, groups=(ranks,)).plan().num_ops == 4096


def test_names_of_any_length() -> None:
    plan = make(name="." + "x" * 99 + "-" + "y" * 5000).plan()
    assert plan.name == "x" * 99

    def refuse(text: str) -> ImportedProgram:
        raise FormatError(f"line 3: names {text}, which is none")

    with pytest.raises(FormatError, match=r"^line 3: names z+ … z+, which is none$") as refusal:
        Reader(refuse, "nothing")("z" * 10**6)
    assert len(str(refusal.value)) < 802


def test_operators() -> None:
    assert make().operator == ""
    assert str(make(cuts=((0, 2),))).endswith("groups of 2 sum in 2 along 0")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (jax.jit(lambda x: x + 1).lower(1.0), "Lowered"),
        (Path("step.hlo"), type(Path()).__name__),
        ({"name": "n"}, "dict"),
        (None, "NoneType"),
        (b"HloModule", "bytes"),
    ],
)
@pytest.mark.parametrize("name", ["hlo", "alpa", "domino", "mercury"])
def test_what_is_no_text(name: str, given: Any, shown: str) -> None:
    reader = importers.get(name)
    message = (
        f"importer of {reader.reads}: needs text, found {shown}; give what the .as_text() of a "
        f"lowered or compiled program returns, or pathlib.Path(name).read_text()"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        reader(given)


@pytest.mark.parametrize("name", ["hlo", "alpa", "domino", "mercury"])
def test_the_name_of_a_file_is_not_its_text(name: str, tmp_path: Path) -> None:
    there = tmp_path / "step"
    there.write_text("HloModule m")
    for given in (str(there), "step.hlo", "plan.json", "dumped/module.txt"):
        message = f"needs a file's text, found its name {given!r}; give pathlib.Path(name).read_tex"
        with pytest.raises(FormatError, match=re.escape(message)):
            importers.get(name)(given)
    with pytest.raises(FormatError) as found:
        importers.get(name)("step")
    assert "pathlib" not in str(found.value)


SCATTER = {"kind": "reduce_scatter", "split_axis": 0, "groups": ((2, 0, 1),), "num_ranks": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cuts": ((1, 2),)},
        {"groups": ((2, 0, 1),), "cuts": ((1, 3),)},
        {"steps": RING_OF_3},
        {"steps": RING_OF_3, "cuts": ((0, 2), (1, 2)), "produced": True},
    ],
)
def test_a_gather_on_one_tensor_is_an_operand(changes: dict[str, Any]) -> None:
    given = GATHER | {"num_ranks": 3, "groups": ((0, 1, 2),)} | changes
    plan = expand_collectives(make(**given).in_place("mine"))
    assert verify(plan) == ()
    assert (plan.name, [str(t) for t in plan.tensors]) == ("mine", ["x [12,6] float32"])
    assert plan.num_ops == 6 * math.prod(parts for _, parts in given.get("cuts", ()))
    if given.get("produced"):
        return  # by tiles that come before: no operand
    operator = fuse(own_kernels.scale(12, 6), plan, {"x": "x"}, axis_name="t", backend="remote_dma")
    x, s = np.arange(72.0).reshape(12, 6), np.arange(12.0)[:, None]
    found = _run(operator, P("t"), x, s)
    order = np.argsort(given["groups"][0])  # whose block of the tensor a rank has
    whole = x.reshape(3, 4, 6)[np.argsort(order)].reshape(12, 6)
    np.testing.assert_array_equal(found, np.tile(whole * s, (3, 1)))


def test_an_empty_gather_on_one_tensor_moves_nothing() -> None:
    given = GATHER | {"num_ranks": 3, "groups": ((0, 1, 2),), "shape": (0, 6), "steps": RING_OF_3}
    plan = make(**given).in_place()
    assert (verify(plan), plan.num_ops) == ((), 0)


def test_a_scatter_on_one_tensor_is_a_result() -> None:
    plan = expand_collectives(make(**SCATTER, shape=(6, 4)).in_place())
    assert [str(t) for t in plan.tensors] == ["x [6,4] float32 per_rank"]
    kernel = own_kernels.product(6, 5, 4, 2, has_addend=True)
    operator = fuse(kernel, plan, {"x": "out"}, axis_name="t", backend="remote_dma")
    x, w = np.arange(90.0).reshape(18, 5), np.arange(20.0).reshape(5, 4)
    found = _run(operator, P("t"), x, w)
    summed = sum(x.reshape(3, 6, 5)) @ w
    np.testing.assert_array_equal(found, summed.reshape(3, 2, 4)[[1, 2, 0]].reshape(6, 4))


def _run(operator: Any, first: Any, *arrays: Any) -> jax.Array:
    specs = {"in_specs": (first, P()), "out_specs": P("t")}
    fn = jax.shard_map(lambda *a: operator(*a)[0], mesh=cases.ranks_mesh(3), **specs)
    return jax.jit(fn)(*arrays)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "all_reduce c: has no plan on one tensor, which all_gather and reduce_scatter have"),
        (GATHER, "all_gather c: is of 2 groups, and an operand is exchanged among all ranks of its "
         "mesh axis; make it of a template for 2 ranks"),
        (SCATTER | {"dtype": "complex64", "shape": (6, 4)}, "plans have no dtype complex64"),
    ],
)  # fmt: skip
def test_what_has_no_plan_on_one_tensor(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        make(**changes).in_place()
