"""Mercury's loop nests, as printed and as JSON: rings, gathers, exchanges and reductions."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from syncopate_jax.errors import FormatError, UnsupportedError
from syncopate_jax.importers.mercury import import_mercury
from syncopate_jax.ir.comm import P2P
from tests.importers.exchanges import assert_right

FIXTURES = Path(__file__).parents[1] / "fixtures" / "mercury"


def text(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text()


def pushes(name: str, rank: int) -> list[tuple[int, str]]:
    """Receiver and box of all that a rank sends in the first plan."""
    plan = import_mercury(text(name)).collectives[0].plan()
    ops = [op for op in plan.ops(rank) if isinstance(op, P2P) and op.src_rank != op.dst_rank]
    assert len(ops) == sum(op.src_rank != op.dst_rank for op in plan.ops(rank))
    return [(op.dst_rank, str(op.dst.box)) for op in ops]


def test_a_ring_hands_on_what_came_last() -> None:
    assert pushes("ring", 1) == [
        (2, "[0:2,16:32,0:8]"), (2, "[0:2,0:16,0:8]"), (2, "[0:2,48:64,0:8]"),
    ]  # fmt: skip


def test_a_ring_in_pieces_sends_the_blocks_of_its_loop() -> None:
    sent = pushes("ring_in_pieces", 0)
    assert len(sent) == 6
    assert sent[:2] == [(1, "[0:2,0:8,0:8]"), (1, "[0:2,8:16,0:8]")]


def test_a_double_ring_completes_the_inner_ring_before_a_step_of_the_outer() -> None:
    """On the mesh (2, 2) the inner ring is along its first dimension: ranks 0 and 2."""
    receivers = [receiver for receiver, _ in pushes("double_ring", 0)]
    assert receivers == [2] * 4 + [1] * 4 + [2] * 4


def test_other_ways_to_print_the_same() -> None:
    """NumPy's integers, and a target that is Python code."""
    plain = import_mercury(text("ring"))
    numpy = re.sub(r"size=16, min", "size=np.int64(16), min", text("ring"), count=1)
    assert import_mercury(numpy.replace("_y = y", "PyNode(_y) = y")) == plain


def test_reductions() -> None:
    gather, scatter = import_mercury(text("reduce_ring")).collectives
    assert (gather.kind, gather.shape) == ("all_gather", (2, 16, 8))
    assert (scatter.kind, scatter.shape, scatter.result) == (
        "reduce_scatter", (2, 64, 8), (2, 16, 8),
    )  # fmt: skip
    assert scatter.choose == {"reduce_scatter": ("reduce_scatter_ring", {})}
    (whole,) = import_mercury(text("all_reduce")).collectives
    assert (whole.kind, whole.reduce, whole.dtype) == ("all_reduce", "sum", "float32")
    assert whole.shape == (32, 24)


def test_a_reduction_of_their_own_is_left_to_them() -> None:
    own = text("all_reduce").replace("torch.add(part", "flash_reduce(part")
    (found,) = import_mercury(own).collectives
    with pytest.raises(UnsupportedError, match="this one by flash_reduce"):
        found.plan()


def nest(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / "nest.json").read_text())
    return found | changes


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
def test_a_collective_at_any_loop_level(kind: str, level: int) -> None:
    point = {"kind": kind, "buffer": "q", "axis": "Q", "mesh_dims": [0, 1], "level": level}
    point |= {"to_axis": "H"} if kind == "all_to_all" else {}
    (found,) = import_mercury(json.dumps(nest(communication=[point]))).collectives
    assert found.cuts == (((0, 2),) if level else ())
    assert dict(found.notes)["level"] == str(level)
    assert_right(found)


@pytest.mark.parametrize("inner", [0, 1])
@pytest.mark.parametrize("shape", [[2, 3], [3, 2], [1, 4]])
def test_double_rings_on_any_mesh(shape: list[int], inner: int) -> None:
    """Each rank gets each block once, whichever dimension the inner ring is along."""
    point = {
        "kind": "double_ring", "buffer": "kv", "axis": "KV", "mesh_dims": [inner, 1 - inner],
        "level": 1,
    }  # fmt: skip
    given = nest(mesh={"shape": shape}, communication=[point])
    (found,) = import_mercury(json.dumps(given)).collectives
    assert len(found.steps) == shape[0] * shape[1] - 1
    assert_right(found)
    first = dict(found.steps[0])
    stride = {0: shape[1], 1: 1}[inner if shape[inner] > 1 else 1 - inner]
    assert first[0] == stride


def test_loops_that_do_not_index_a_buffer_repeat_its_communication() -> None:
    axes = nest()["axes"] | {"Q": {"size": 8, "block": 2}}
    point = {"kind": "all_gather", "buffer": "kv", "axis": "KV", "mesh_dims": [0, 1], "level": 2}
    (found,) = import_mercury(json.dumps(nest(axes=axes, communication=[point]))).collectives
    assert dict(found.notes)["repeats"] == "4"


def test_dimensions_sharded_over_more_than_the_ring_are_left_alone() -> None:
    point = {"kind": "ring", "buffer": "kv", "axis": "KV", "mesh_dims": [0], "level": 0}
    found = import_mercury(json.dumps(nest(communication=[point])))
    assert found.collectives == ()
    assert found.skipped[0][1].startswith("dimension 2 of kv is sharded over mesh dimensions")


def test_rings_of_very_many_ranks_are_left_alone() -> None:
    point = {"kind": "ring", "buffer": "kv", "axis": "KV", "mesh_dims": [0], "level": 0}
    buffers = nest()["buffers"]
    buffers["kv"]["specs"][2] = [0]
    given = nest(mesh={"shape": [65536]}, buffers={"kv": buffers["kv"]}, communication=[point])
    found = import_mercury(json.dumps(given))
    assert found.collectives == ()
    reason = "a ring of 65536 ranks on a mesh of 65536 is 4294901760 transfers, at most 1048576 fit"
    assert found.skipped == (("kv:ring.0", reason),)


def changed(path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(nest())
    *way, last = path.split("/")
    at: Any = found
    for step in way:
        at = at[int(step) if step.isdigit() else step]
    if value is ...:
        del at[last]
    else:
        at[int(last) if last.isdigit() else last] = value
    return found


POINT = "communication/0"
JSON = [
    (changed("mesh/shape", [0]), "mercury.mesh.shape[0]: found 0, needs an integer in 1..65536"),
    (changed("mesh/shape", []), "mercury.mesh.shape: found [], needs 1 to 65536 devices"),
    (changed("mesh/devices", [0, 1, 2, 2]), "needs the 4 device numbers from 0 on, each once"),
    (changed("axes/B/block", 3), "mercury.axes.B.block: found 3, needs an integer in 1..2"),
    (changed("loops/0/types", "x"), "loops[0].types: found \"x\", needs a letter of s, r, m"),
    (changed("loops/0/axes", ["Z"]), "loops[0].axes[0]: found \"Z\", needs one of B, Q, KV, H"),
    (changed("buffers/q/shape", [2, 8, 4]), "needs shape, axes and specs of one length"),
    (changed("buffers/q/specs", ["R", [0], [0], "R"]), "needs each mesh dimension at most once"),
    (changed("buffers/q/specs", ["R", [2], "R", "R"]), "found 2, needs an integer in 0..1"),
    (changed(f"{POINT}/kind", "send"), "needs one of ring, double_ring, all_gather"),
    (changed(f"{POINT}/kind", ...), "has no 'kind'; needs kind, buffer, mesh_dims, level, axis"),
    (changed(f"{POINT}/mesh_dims", [1]), "needs 2 different mesh dimensions, the innermost"),
    (changed(f"{POINT}/mesh_dims", [1, 1]), "needs 2 different mesh dimensions, the innermost"),
    (changed(f"{POINT}/level", 4), "level: found 4, needs an integer in 0..3"),
    (changed(f"{POINT}/buffer", "x"), "buffer: found \"x\", needs one of q, kv, o"),
    (changed(f"{POINT}/axis", "Q"), "communication[0]: axis 'Q' is bound to no dimension of"),
    (changed("communication/4/mesh_dims", [0]) | {"buffers": nest()["buffers"] | {
        "o": nest()["buffers"]["o"] | {"specs": ["R", [0], "R"]}}},
     "o is sharded over what it is reduced over, [0]"),
    (changed("communication/2/level", 3) | {"axes": nest()["axes"] | {
        "KV": {"size": 8, "block": 2}}},
     "loop KV runs over blocks of dimension 2 of kv, which is communicated whole inside it"),
    (changed("buffers/q/shape", [2, 8, 3, 3]), "dimension 2 has extent 3, which 4 ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), JSON, ids=range(len(JSON)))
def test_malformed_json(given: Any, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        import_mercury(json.dumps(given))


def sub(pattern: str, by: str, name: str = "ring", count: int = 1) -> Callable[[], str]:
    """A printed program with something replaced."""

    def make() -> str:
        found, times = re.subn(pattern, by, text(name), count=count)
        assert times
        return found

    return make


PRINTED = [
    (sub("Program", "Proram"), "line 1, column 1: found 'Proram', needs 'Program'"),
    (sub(r"size=16", "size=0"), "mercury: line 6: needs size=N, an integer of at least 1"),
    (sub(r"size=64, min_block_size=16", "size=62, min_block_size=16"),
     "line 7: axis C of 62, 4 cards and blocks of 16 does not fit"),
    (sub(r"name=C", "name=R"), "line 7: axis R is defined twice"),
    (sub(r"ring_comm=\[\], ", ""), "line 6: axis R needs ring_comm=[…]"),
    (sub(r"name=R, size", "size"), "line 6: needs name=NAME"),
    (sub("types=ss", "types=s"), "grid over B, R needs a letter of s, r, m for each axis"),
    (sub(r"Grid\(B, R", "Grid(B, Z"), "grid over Z, which is no axis"),
    (sub("X: Buffer", "X: Bufer"), "line 9: needs Buffer(…)"),
    (sub(r"shape=\[2, 16, 8\], ", ""), "buffer x needs shape=[…] and axes=[…]"),
    (sub(r"specs=R, \(S, \[0\]\), R", "s=R"), "buffer x needs shard_spec=ShardingSpec("),
    (sub(r"specs=R, \(S, \[0\]\), R", "specs=R, (S, []), R"), "buffer x needs R or (S, [mesh"),
    (sub(r"specs=R, \(S, \[0\]\), R", "specs=R"), "buffer x needs shape, axes and specs of one"),
    (sub(r"shape=\[2, 16, 8\]", "shape=[2, 0, 8]"), "buffer x needs extents above 0, or axes"),
    (sub(r"\['B'\], \['R'\]", "['B'], ['Z']"), "buffer x is bound to Z, which is no axis"),
    (sub("torch.bfloat16", "torch.complex64"), "buffer x needs a known dtype and a name of its"),
    (sub(r"shape=\(4,\)", "shape=4"), "needs DeviceMesh(devices=[…], shape=(…))"),
    (sub(r"\[0, 1, 2, 3\]", "[0, 1, 2, 2]"), "mesh (4,) needs the devices from 0 on, each once"),
    (sub(r"\[0, 1, 2, 3\]", "[1, 0, 2, 3]"), "buffers lie on different meshes"),
    (sub("_x = x", "_x = w"), "line 17: 'w' is no buffer; known: x, y, z"),
    (sub("write_back=False", "write_back=True"), "a load of y cannot write back"),
    (sub("write_back=False", "write_back=9"), "a ring needs write_back"),
    (sub("RingComm", "Comm"), "needs RingComm(…)"),
    (sub("shard_dim=0", "shard_dim=R"), "a ring needs axis=Axis(…) that is defined, and shard_dim"),
    (sub("shard_dim=0", "shard_dim=1"), "ring yC of 4 cards along dimension 1 of mesh (4,)"),
    (sub("num_cards=4", "num_cards=2"), "ring yC of 2 cards along dimension 0 of mesh (4,)"),
    (sub(r"axis=Axis\(name='C'", "axis=Axis(name='B'"), None),
    (sub(r"axis=Axis\(name='C'", "axis=Axis(name='R'"), "rings of y along 0 of its dimensions"),
    (sub(r" \[RingComm.*\]\n", " []\n"), "axes name ring yC, which no line has; was the file cut?"),
    (sub("name='yC'", "name='yD'"), "axes name ring yC, which no line has"),
    (sub(r"ring_comm=\['yC'\]", "ring_comm=[]", count=1), "ring yC is named by no axis"),
    (sub(r"    z\[.*\n", ""), "line 11: buffer z is written, but no line stores it"),
    (sub(r"= _acc \[\]", "= _acc"), "the rings in '[' and ']', last on the line"),
    (sub(r"= _acc \[\]", "= _acc [] x"), "found 'x', needs the end of the line"),
    (sub(r"z\[(.*)\] = _acc \[\]", r"z = _acc []"), "'_acc' is no buffer"),
    (sub("_x = x", "_x = x + x"), "found '+', needs '[' and what is indexed"),
    (sub(r"size=16", "size=PyNode(n)"), "line 6: needs size=N, an integer of at least 1"),
    (sub(r"PyNode\(_acc = None\)", "1 + 2"), "an axis, a buffer, a grid, a load, a store"),
    (sub(r"\[0\]", "[0, 0]", "all_reduce", 9), "has no different dimensions [0, 0]"),
    (sub(r"with shard_dim=\[0\]", "with shard_dim=[1]", "all_reduce"),
     "mesh (4,) has no different dimensions [1]"),
    (sub(r"z\[(.*)\] = _acc \[\]", r"z[\1] = _acc [RingComm(axis=Axis(name='C'), num_cards=4, "
         "name='yC', shard_dim=0, write_back=False)]"), "a ring of what is stored to z is not"),
    (sub(r"(?s)  X: Buffer.*", ""), "the program has no buffer on a mesh"),
    (sub(r"(?s)  C: Buffer.*", "", "all_reduce"), "the program stores nothing; was the file cut?"),
    (sub(r"_y = y\[(.*?)\] \[(RingComm.*?False\))\]", r"_y = y[\1] [\2, \2, \2]"),
     "3 rings inside each other; at most two are read"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), PRINTED, ids=range(len(PRINTED)))
def test_malformed_print(make: Callable[[], str], message: str | None) -> None:
    if message is None:  # a ring along another dimension that is not sharded over it
        found = import_mercury(make())
        assert found.skipped and not found.collectives
        return
    with pytest.raises(FormatError, match=re.escape(message)):
        import_mercury(make())


def test_empty() -> None:
    with pytest.raises(FormatError, match="mercury: the file is empty"):
        import_mercury(" \n")
