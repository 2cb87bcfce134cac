"""HLO and StableHLO text: every collective, every form, and one clear error for what is wrong."""

from __future__ import annotations

import re

import pytest

from syncopate_jax.errors import FormatError, UnsupportedError
from syncopate_jax.importers.hlo import import_hlo
from syncopate_jax.importers.program import ImportedCollective
from syncopate_jax.registry import importers
from tests.importers.exchanges import assert_right

ADD = "add { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = f32[] add(a, b)\n}\n"


def module(body: str, head: str = ", num_partitions=4", before: str = ADD) -> str:
    return (
        f"HloModule m{head}\n{before}ENTRY e {{\n  p = f32[4,8]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


def one(body: str, **more: str) -> ImportedCollective:
    (found,) = import_hlo(module(body, **more)).collectives
    return found


def test_is_in_the_registry() -> None:
    assert importers.get("hlo")(module("  r = f32[4,8] copy(p)")).collectives == ()


GROUPS = "replica_groups={{0,1},{2,3}}, channel_id=1, use_global_device_ids=true"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (f"  r = f32[8,8] all-gather(p), dimensions={{0}}, {GROUPS}", "all_gather"),
        (f"  r = f32[4,16] all-gather(f32[4,8]{{1,0}} %p), dimensions={{1}}, {GROUPS}",
         "all_gather"),
        (f"  r = f32[2,8] reduce-scatter(p), dimensions={{0}}, to_apply=add, {GROUPS}",
         "reduce_scatter"),
        (f"  ROOT %r = f32[4,8]{{1,0:T(8,128)}} all-reduce(%p), to_apply=%add, {GROUPS}",
         "all_reduce"),
        ("  r = f32[4,8] all-to-all(p), dimensions={1}, replica_groups={{0,1},{2,3}}, "
         "channel_id=1", "all_to_all"),
        ("  r = f32[4,8] collective-permute(p), source_target_pairs={{0,1},{1,2},{3,3}}, "
         "channel_id=2", "permute"),
        ("  r = f32[4,8] collective-broadcast(p), replica_groups={{1,0},{2}}, channel_id=2",
         "broadcast"),
    ],
)  # fmt: skip
def test_every_collective(body: str, kind: str) -> None:
    found = one(body)
    assert found.kind == kind
    assert dict(found.notes)["computation"] == "e"
    assert dict(found.notes)["line"] == str(2 + ADD.count("\n") + 2)
    assert_right(found)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("  s = (f32[4,8], f32[16,8]) all-gather-start(p), dimensions={0}, channel_id=1, "
         "replica_groups={{0,1,2,3}}, use_global_device_ids=true\n"
         "  r = f32[16,8] all-gather-done(s)", "all_gather"),
        ("  s = f32[4,8] all-reduce-start(p), to_apply=add, channel_id=1, "
         "replica_groups=[1,4]<=[4], use_global_device_ids=true\n"
         "  r = f32[4,8] all-reduce-done(s)", "all_reduce"),
        ("  s = (f32[4,8], f32[4,8], u32[], u32[]) collective-permute-start(p), channel_id=1, "
         "source_target_pairs={{0,1},{1,0}}\n"
         "  r = f32[4,8] collective-permute-done(s)", "permute"),
        ("  s = ((f32[4,8]), f32[1,8], s32[]) reduce-scatter-start(p), dimensions={0}, "
         "to_apply=add, channel_id=1, replica_groups={}, use_global_device_ids=true\n"
         "  r = f32[1,8] reduce-scatter-done(s)", "reduce_scatter"),
    ],
)  # fmt: skip
def test_pairs_of_start_and_done(body: str, kind: str) -> None:
    found = one(body)
    assert found.kind == kind
    assert_right(found)


def test_a_collective_in_a_computation_that_an_async_start_calls() -> None:
    inner = (
        "wrapped { q = f32[4,8] parameter(0)\n"
        "  ROOT g = f32[16,8] all-gather(q), dimensions={0}, replica_groups={{0,1,2,3}}, "
        "channel_id=1, use_global_device_ids=true\n}\n"
    )
    body = (
        "  s = ((f32[4,8]), f32[16,8], s32[]) async-start(p), calls=wrapped\n"
        "  r = f32[16,8] async-done(s), calls=wrapped"
    )
    found = one(body, before=inner)
    assert dict(found.notes)["computation"] == "wrapped"
    assert_right(found)


def test_several_arrays_in_one_collective() -> None:
    body = (
        "  q = bf16[3] convert(p)\n"
        f"  r = (f32[4,8], bf16[3]) all-reduce(p, q), to_apply=add, {GROUPS}\n"
        "  x = f32[4,8] get-tuple-element(r), index=0"
    )
    found = import_hlo(module(body)).collectives
    assert [(c.name, c.shape, c.dtype) for c in found] == [
        ("r#0", (4, 8), "float32"),
        ("r#1", (3,), "bfloat16"),
    ]
    for collective in found:
        assert_right(collective)


def test_an_exchange_of_one_array_for_each_member() -> None:
    body = (
        "  q = f32[4,8] copy(p)\n  r = (f32[4,8], f32[4,8]) all-to-all(p, /*index=1*/ q), "
        "replica_groups={{0,2},{1,3}}, channel_id=1"
    )
    found = one(body)
    assert (found.shape, found.split_axis, found.concat_axis) == ((2, 4, 8), 0, 0)
    assert_right(found)


def test_replicas_without_channels() -> None:
    """Numbers are replicas: 0 and 1 of each of the two partitions."""
    body = "  r = f32[4,8] all-reduce(p), replica_groups={{0,1}}, to_apply=add"
    found = one(body, head=", replica_count=2, num_partitions=2")
    assert found.groups == ((0, 2), (1, 3))
    both = one(body + ", channel_id=1", head=", replica_count=2, num_partitions=2")
    assert both.groups == ((0, 1, 2, 3),)


def test_scalars_and_types_that_plans_lack() -> None:
    body = "  c = pred[] constant(true)\n  r = pred[] all-reduce(c), to_apply=or, replica_groups={}"
    before = (
        "or { a = pred[] parameter(0)\n b = pred[] parameter(1)\n ROOT c = pred[] or(a, b)\n}\n"
    )
    found = one(body, before=before, head=", replica_count=4")
    assert (found.shape, found.dtype, found.reduce) == ((1,), "bool", "or")
    with pytest.raises(UnsupportedError, match="plans reduce by sum or max, this one by or"):
        found.plan()
    moved = one("  c = u32[6] iota(), iota_dimension=0\n  r = u32[24] all-gather(c), "
                "dimensions={0}, replica_groups={}", head=", replica_count=4")  # fmt: skip
    assert moved.plan().tensors[0].dtype == "int32"
    odd = one("  c = c64[6] constant({...})\n  r = c64[24] all-gather(c), dimensions={0}, "
              "replica_groups={}", head=", replica_count=4")  # fmt: skip
    with pytest.raises(UnsupportedError, match="all_gather r: plans have no dtype c64; known: "):
        odd.plan()


def test_computations_with_properties_and_branches() -> None:
    before = ADD.replace("}\n", '}, execution_thread="main"\n')
    body = (
        "  i = s32[] constant(1)\n  r = f32[4,8] conditional(i, p, p), "
        "branch_computations={%add, add}, sharding={replicated}"
    )
    assert import_hlo(module(body, before=before)).collectives == ()


def test_a_sharding_of_a_collective_is_kept() -> None:
    body = f"  r = f32[4,8] all-reduce(p), to_apply=add, {GROUPS}, sharding={{manual}}"
    assert dict(one(body).notes)["sharding"] == "{manual}"


def test_what_no_plan_expresses_is_listed_with_the_reason() -> None:
    found = import_hlo(module("  t = token[] after-all()\n  r = f32[4] recv(t), channel_id=3"))
    assert found.skipped == (("r", "sends and receives name no partner in the text"),)
    assert "r: left alone, sends and receives name no partner" in str(found)


# A contraction next to a collective

DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def pair(body: str) -> str:
    found = exchanged(body)
    assert bool(found.pair) != bool(found.alone)
    return f"{found.operator} {found.pair}" if found.pair else ""


def exchanged(body: str) -> ImportedCollective:
    """The one collective that is no permutation."""
    (found,) = [c for c in import_hlo(module(body)).collectives if c.kind != "permute"]
    return found


GATHER = f"  g = f32[8,8] all-gather(p), dimensions={{0}}, {GROUPS}\n"


@pytest.mark.parametrize(
    ("between", "wanted"),
    [
        ("  r = f32[8,8] dot(g, g2), " + DOT, "[all_gather lhs b over ranks + dot]"),
        ("  r = f32[8,8] dot(g2, g), " + DOT, "[all_gather rhs a over ranks + dot]"),
        ("  c = bf16[8,8] convert(g)\n  r = f32[8,8] dot(c, g2), " + DOT,
         "[all_gather lhs b over ranks + dot]"),
        ("  t = f32[8,8] transpose(g), dimensions={1,0}\n  r = f32[8,8] dot(t, g2), " + DOT,
         "[all_gather lhs a over ranks + dot]"),
        ("  t = f32[8,2,4] bitcast(g)\n  u = f32[8,8] bitcast(t)\n  r = f32[8,8] dot(u, g2), "
         + DOT, "[all_gather lhs b over ranks + dot]"),
        ("  t = f32[4,2,8] bitcast(g)\n  r = f32[4,2,8] dot(t, g2), lhs_contracting_dims={2}, "
         "rhs_contracting_dims={0}", "[all_gather lhs b over ranks + dot]"),
        ("  t = f32[64] reshape(g)\n  u = f32[8,8] reshape(t)\n  r = f32[8,8] dot(u, g2), " + DOT,
         "[all_gather lhs b over ranks + dot]"),
        # In memory as it was, so that rows are columns.
        ("  t = f32[8,8]{0,1} copy(g)\n  u = f32[8,8]{1,0} bitcast(t)\n  r = f32[8,8] dot(u, g2), "
         + DOT, "[all_gather lhs a over ranks + dot]"),
    ],
)  # fmt: skip
def test_a_gather_before_a_contraction(between: str, wanted: str) -> None:
    other = "  g2 = f32[8,8] constant({...})\n"
    assert pair(other + GATHER + between) == f"all_gather_matmul {wanted}"


def test_a_gather_of_several_arrays_before_a_contraction() -> None:
    """Each array of the collective has users of its own."""
    body = (
        "  k = f32[8,8] constant({...})\n"
        f"  g = (f32[8,8], f32[8,8]) all-gather(p, p), dimensions={{0}}, {GROUPS}\n"
        "  a = f32[8,8] get-tuple-element(g), index=0\n"
        "  b = f32[8,8] get-tuple-element(g), index=1\n"
        f"  r = f32[8,8] dot(b, k), {DOT}\n  s = f32[8,8] add(a, a)"
    )
    first, second = import_hlo(module(body)).collectives
    assert (first.operator, second.operator) == ("", "all_gather_matmul")


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        ("  r = f32[8,8] dot(g, g2), " + DOT + "\n  s = f32[8,8] add(g, g2)",
         "read by dot r, add s; one"),
        ("  s = f32[8,8] add(g, g2)\n  r = f32[8,8] dot(s, g2), " + DOT,
         "goes into add s, no contraction"),
        ("  t = f32[2,4,8] reshape(g)\n  u = f32[4,8,2] transpose(t), dimensions={1,2,0}\n"
         "  v = f32[4,16] reshape(u)\n  g3 = f32[16,8] constant({...})\n"
         "  r = f32[4,8] dot(v, g3), " + DOT,
         "its blocks are not those of one dimension of dot r"),
        ("  t = f32[64] reshape(g)\n  u = f32[5,13] reshape(t)\n  r = f32[5,8] dot(u, g2), " + DOT,
         "into reshape u, no"),
        ("  ROOT r = f32[8,8] copy(g)", "its result is that of the computation around it"),
        ("  t = f32[8,4] copy(g)\n  r = f32[8,8] dot(t, g2), " + DOT, "into copy t, no"),
        ("  t = f32[8,8] transpose(g), dimensions={0,0}\n  r = f32[8,8] dot(t, g2), " + DOT,
         "into transpose t, no"),
        ("  r = f32[9,8] dot(g, g2), " + DOT, "dot r has another shape"),
        ("  r = f32[8,8] dot(g, g2), lhs_contracting_dims={1}, rhs_contracting_dims={7}",
         "dot r is not understood"),
        ("\n".join(["  c0 = f32[8,8] copy(g)",
                   *(f"  c{i} = f32[8,8] copy(c{i - 1})" for i in range(1, 70)),
                   "  r = f32[8,8] dot(c69, g2), " + DOT]),
         "no contraction is within 64 operations"),
    ],
    ids=["used twice", "sum between", "ranks not slowest", "no such reshape", "no contraction",
         "a copy of another shape", "no transposition", "a product of another shape",
         "no such dimension", "too far"],
)  # fmt: skip
def test_decoys(between: str, reason: str) -> None:
    found = exchanged("  g2 = f32[8,8] constant({...})\n" + GATHER + between)
    assert found.pair is None and reason in found.alone
    assert str(found).endswith(f"groups of 2 [no operator: {found.alone}]")


def test_a_contraction_before_a_reduction() -> None:
    other = "  w = f32[8,6] constant({...})\n  d = f32[4,6] dot(p, w), " + DOT + "\n"
    tail = f"dimensions={{1}}, to_apply=add, {GROUPS}"
    assert pair(f"{other}  r = f32[4,3] reduce-scatter(d), {tail}") == (
        "matmul_reduce_scatter [reduce_scatter out c over ranks + dot]"
    )
    turned = f"{other}  t = f32[6,4] transpose(d), dimensions={{1,0}}\n"
    assert pair(f"{turned}  r = f32[6,2] reduce-scatter(t), {tail}") == (
        "matmul_reduce_scatter [reduce_scatter out b over ranks + dot]"
    )
    twice = f"{other}  r = f32[4,6] all-reduce(d), to_apply=add, {GROUPS}\n  s = f32[4,6] copy(d)"
    assert pair(twice) == ""


# An all-to-all of one array a member, next to a contraction

OTHER = "  w = f32[4,6] constant({...})\n"
PAIR = "channel_id=1, replica_groups={{0,1},{2,3}}"
SLICES = (
    "  s0 = f32[4,4] slice(p), slice={[0:4], [0:4]}\n"
    "  s1 = f32[4,4] slice(p), slice={[0:4], [4:8]}\n"
)
SENT = (
    f"  a = (f32[4,4], f32[4,4]) all-to-all(s0, s1), {PAIR}\n"
    "  a0 = f32[4,4] get-tuple-element(a), index=0\n"
    "  a1 = f32[4,4] get-tuple-element(a), index=1\n"
)
JOINED = "  c = f32[8,4] concatenate(a0, a1), dimensions={0}\n"
USED = f"  r = f32[8,6] dot(c, w), {DOT}"


def test_an_exchange_of_slices_before_a_contraction() -> None:
    wanted = "all_to_all_matmul [all_to_all lhs b to a over ranks + dot]"
    assert pair(OTHER + SLICES + SENT + JOINED + USED) == wanted
    behind = (
        "  c = f32[4,8] concatenate(a0, a1), dimensions={1}\n  d = f32[4,2,4] bitcast(c)\n"
        "  e = f32[2,4,4] transpose(d), dimensions={1,0,2}\n  f = f32[8,4] bitcast(e)\n"
    )
    assert pair(OTHER + SLICES + SENT + behind + USED.replace("(c,", "(f,")) == wanted


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("concatenate(a0, a1)", "concatenate(a1, a0)"),
        ("concatenate(a0, a1)", "concatenate(a0, a0)"),
        ("index=1", "index=0"),
        (USED, USED + "\n  z = f32[4,4] negate(a1)"),
        (USED, USED + "\n  z = f32[8,4] negate(c)"),
        ("  c = f32[8,4] concatenate(a0, a1), dimensions={0}", "  c = f32[8,4] pad(a0, a1)"),
        ("dimensions={0}", "dimensions={}"),
    ],
    ids=["other order", "one twice", "one array", "a part used", "all used", "no join", "no axis"],
)
def test_an_exchange_that_no_contraction_takes_whole(old: str, new: str) -> None:
    text = OTHER + SLICES + SENT + JOINED + USED
    assert text.count(old) == 1
    assert pair(text.replace(old, new)) == ""


@pytest.mark.parametrize("extents", ["4,0", "24"])
def test_extents_that_do_not_fit_are_no_pair(extents: str) -> None:
    """As damaged text has them: the arrays that are joined, or that are sent, have others."""
    behind = JOINED + "  d = f32[2,4,4] bitcast(c)\n  e = f32[8,4] bitcast(d)\n"
    text = OTHER + SLICES + SENT + behind + USED.replace("(c,", "(e,")
    assert pair(text) == "all_to_all_matmul [all_to_all lhs b to a over ranks + dot]"
    for damaged in (
        text.replace("f32[4,4], f32[4,4]", f"f32[{extents}], f32[{extents}]"),
        text.replace("f32[8,4] concatenate", f"f32[{extents}] concatenate"),
    ):
        assert damaged != text and pair(damaged) == ""


PRODUCT = "  w = f32[8,8] constant({...})\n  p2 = f32[4,8] dot(p, w), " + DOT + "\n"


def test_a_contraction_before_an_exchange_of_slices() -> None:
    text = PRODUCT + SLICES.replace("(p)", "(p2)") + SENT + JOINED
    assert pair(text) == "matmul_all_to_all [all_to_all out b to c over ranks + dot]"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("all-to-all(s0, s1)", "all-to-all(s1, s0)"),
        ("[0:4], [4:8]", "[0:4], [3:7]"),
        ("[0:4], [4:8]", "[0:4], [0:4]"),
        ("s1 = f32[4,4] slice(p2)", "s1 = f32[4,4] slice(p)"),
        (JOINED, JOINED + "  z = f32[4,8] negate(p2)\n"),
        (JOINED, JOINED + "  z = f32[4,4] negate(s1)\n"),
    ],
    ids=["other order", "overlapping", "one twice", "two arrays", "the whole used", "a part used"],
)
def test_slices_that_are_no_blocks_of_a_product(old: str, new: str) -> None:
    text = PRODUCT + SLICES.replace("(p)", "(p2)") + SENT + JOINED
    assert text.count(old) == 1
    assert pair(text.replace(old, new)) == ""


MALFORMED = [
    ("", "hlo: the file is empty"),
    ("HloModule", "hlo: line 1, column 10: found the end of the file, needs the module's name"),
    ("HloModule m, num_partitions=0\n", "1 to 65536 replicas times partitions"),
    ("HloModule m, num_partitions=99999999\n", "1 to 65536 replicas times partitions"),
    ("HloModule m\n" + ADD, "needs an ENTRY computation; was the file cut?"),
    ("HloModule m\n" + ADD + ADD, "another name than 'add', which a computation before has"),
    (module("}\nENTRY f {\n q = f32[] parameter(0)"), "one ENTRY computation"),
    (module("  r = f32[4,8] copy(q)"), "line 8, column 1: copy r names operand q, which is none"),
    (module("  p = f32[4,8] copy(p)"), "another name than 'p', which line 7 has"),
    (module("  r = f32[4,8] copy(p"), "column 1: found '}', needs ','"),
    (module("  r = f32[4,8 copy(p)"), "column 15: found 'copy', needs ','"),
    (module("  r = copy(p)"), "found ')', needs '['"),
    (module("  r = f32[4,-8] copy(p)"), "extents of 0 and more before this, found [4, -8]"),
    (module("  r = f32[4,4] parameter()"), "needs the number of the parameter before this"),
    (module("  r = f32[4,4] dot(p, p, p)\n"), "needs two operands of the dot before this, found 3"),
    (module("  r = f32[4,8] copy"), "needs the operands in '(' and ')'"),
    (module("  r = f32[4,8] copy(p), metadata="), "needs a value"),
    (module("  ROOT r = f32[4,8] copy(p)\n  ROOT s = f32[4,8] copy(p)"), "one ROOT in"),
    (module("  r = f32[4,8] while(p), body=nobody"), "while r names computation nobody"),
    (module("", before="add { }\n"), "needs instructions in computation add"),
    (module("  r = f32[8,8] all-gather(), dimensions={0}"), "all-gather r: has no operand"),
    (module(f"  r = f32[8,8] all-gather(p), {GROUPS}"), "needs all_gather_dim or dimensions"),
    (module(f"  r = f32[8,8] all-gather(p), dimensions={{0,1}}, {GROUPS}"), "needs one dimension"),
    (module(f"  r = f32[8,8] all-gather(p), dimensions={{2}}, {GROUPS}"),
     "concat dimension 2 does not fit shape (4, 8)"),
    (module(f"  r = f32[9,8] all-gather(p), dimensions={{0}}, {GROUPS}"),
     "over groups of 2 gives [8, 8], its type says [9, 8]"),
    (module(f"  r = f32[4,8] all-reduce(p), {GROUPS}"), "names no computation that reduces"),
    (module("  r = f32[4,8] all-reduce(p), to_apply=add, channel_id=1, "
            "use_global_device_ids=true, replica_groups={{0,1},{2,4}}"),
     "replica groups: rank 4 is none of the 4 ranks"),
    (module("  r = f32[4,8] all-reduce(p), to_apply=add, use_global_device_ids=maybe"),
     "true or false before this, found 'maybe'"),
    (module("  t = () tuple()\n  r = f32[4,8] all-reduce(t), to_apply=add"),
     "operand t has no array"),
    ("HloModule m\nStackFrames\n1 x", "line 3, column 3: found 'x', needs a bracket"),
    (module("  r = f32[4,8] collective-permute(p)"), "needs source_target_pairs"),
    (module("  r = f32[4,8] collective-permute(p), source_target_pairs={{0,1}}"),
     "target 4 is none of the 4 ranks"),
    (module("  r = f32[4,8] collective-permute(p), channel_id=1, "
            "source_target_pairs={{0,1},{2,1}}"), "a rank is target twice"),
    (module("  r = f32[4,8] collective-permute(p), channel_id=1, source_target_pairs={{0,7}}"),
     "target 7 is none of the 4 ranks"),
    (module("  r = f32[4,8] collective-permute(p), channel_id=1, source_target_pairs={{0}}"),
     "each pair needs a source and a target"),
    (module("  r = f32[2,8] reduce-scatter(p), dimensions={0}, to_apply=add, channel_id=1, "
            "use_global_device_ids=true, replica_groups={{0,1,2},{3}}"), "groups differ in size"),
    (module("  q = f32[5] copy(p)\n  r = (f32[4,8], f32[5]) all-to-all(p, q), "
            "replica_groups={{0,1},{2,3}}, channel_id=1"), "exchanges arrays of different types"),
    (module("  q = f32[4,8] copy(p)\n  r = (f32[4,8], f32[4,8]) all-to-all(p, q), channel_id=1"),
     "has 2 operands, its groups 4 members"),
    (module("  r = " + "(" * 200 + "f32[]"), "at most 100 levels of brackets"),
    (module("  r = f32[4,8] copy(p), sharding={(]}"), "needs brackets that match"),
    (module("  r = f32[4,8] copy(p), sharding={{a"), "found the end of the file, needs '}'"),
    ("HloModule m \"", "found '\"', which begins nothing known; is the file damaged?"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_hlo(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        import_hlo(text)


@pytest.mark.parametrize(
    ("root", "reduce"),
    [
        ("ROOT c = f32[] add(a, b)", "sum"),
        ("ROOT c = f32[] add(b, a)", "sum"),
        ("ROOT c = f32[] maximum(a, b)", "max"),
        ("ROOT c = f32[] minimum(a, b)", "minimum"),
        ("ROOT c = f32[] add(a, a)", "parameter then parameter then add"),
        ("d = f32[] add(a, b)\n ROOT c = f32[] multiply(d, a)",
         "parameter then parameter then add then multiply"),
    ],
)  # fmt: skip
def test_reductions_are_what_their_computation_does(root: str, reduce: str) -> None:
    """Only one operation on the two parameters is a sum or a maximum."""
    before = f"add {{ a = f32[] parameter(0)\n b = f32[] parameter(1)\n {root}\n}}\n"
    body = f"  r = f32[4,8] all-reduce(p), to_apply=add, {GROUPS}"
    found = one(body, before=before)
    assert found.reduce == reduce
    if reduce in ("sum", "max"):
        assert_right(found)
    else:
        with pytest.raises(UnsupportedError, match=f"this one by {reduce}"):
            found.plan()


@pytest.mark.parametrize(
    ("fused", "body"),
    [
        ("f { ROOT c = f32[8,8] constant({...})\n}\n",
         f"{GATHER}  r = f32[8,8] fusion(g), kind=kLoop, calls=f"),
        ("", f"{GATHER}  r = (f32[8,8], f32[8,8]) copy(g)"),
        ("f { q = f32[4,8] parameter(5)\n ROOT t = f32[4,8] copy(q)\n}\n",
         f"  d = f32[4,8] dot(p, w), {DOT}\n  t = f32[4,8] fusion(d), kind=kLoop, calls=f\n"
         f"  r = f32[4,8] all-reduce(t), to_apply=add, {GROUPS}"),
        ("", f"  c0 = f32[4,8] dot(p, w), {DOT}\n"
         + "\n".join(f"  c{i} = f32[4,8] copy(c{i - 1})" for i in range(1, 70))
         + f"\n  r = f32[4,8] all-reduce(c69), to_apply=add, {GROUPS}"),
    ],
    ids=["a fusion without the operand", "a copy to two", "a fusion of fewer", "too far"],
)  # fmt: skip
def test_no_pair_through(fused: str, body: str) -> None:
    weight = "  w = f32[8,8] constant({...})\n"
    (found,) = import_hlo(module(weight + body, before=ADD + fused)).collectives
    assert found.pair is None
    assert_right(found)
