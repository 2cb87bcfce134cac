"""The text form: exact round trips, what it looks like, and every message of the reader."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.columns import Columns
from syncopate_jax.ir.comm import P2P, Collective, ComputeDep, OpDep
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ir.text import from_text, to_text
from syncopate_jax.plans.all_gather_ring import all_gather_ring
from tests.check.random_plans import random_plan
from tests.golden.compare import golden

HEAD = "plan p ranks 2\ntensor x [4] float32\n"
OP = "r0.0 push x[0:2] -> r1 x[0:2] on nvlink\n"


def full_plan() -> Plan:
    """A plan that uses everything the grammar has."""
    x, y = Tensor("x", (4, 8)), Tensor("y", (2, 2, 2), "float32", per_rank=True)
    part, block = Chunk("x", Box((0, 0), (2, 8))), Chunk("y", Box.full((2, 2, 2)))
    whole = Chunk("x", x.box)
    tiles = ComputeDep(1, part)
    return build_plan(
        "everything at once",
        3,
        [x, y, Tensor("scalar", ())],
        [Region(0, "x", part.box, True), Region(2, "scalar", Box((), ()))],
        [
            Goal(1, "x", part.box),
            Goal(0, "y", block.box, ranks=(0, 1, 2)),
            Goal(1, "y", block.box, ranks=(0, 2), reduce="max"),
            Goal(2, "x", Box((2, 0), (4, 2)), "x", (0, 4), (2, 0)),
        ],
        [
            [
                P2P(0, 0, 1, part, part, (OpDep(2, 0), tiles), "sum", "nic", "template(a=1)"),
                P2P(0, 2, 0, part, part, origin="user.py:3 # twice"),
                P2P(0, 0, 0, part, part, channel="copy engine", origin=" spaced\n"),
                P2P(0, 1, 2, part, part, reduce="max", origin='"quoted"'),
            ],
            [],
            [
                Collective(2, "all_to_all", block, block, (2, 0, 1), (), "none", "nic", 0, 2),
                Collective(2, "all_gather", part, whole, (), concat_axis=0),
                Collective(2, "all_reduce", whole, whole, (0, 1, 2), (tiles,), "sum"),
            ],
        ],
    )


def test_text_of_everything() -> None:
    text = to_text(full_plan())
    assert text == golden("ir/everything.txt", text)
    assert from_text(text) == full_plan()


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_random_plans_read_back_the_same(seed: int) -> None:
    plan = random_plan(seed)
    assert from_text(to_text(plan)) == plan


def test_tables_that_are_not_in_order_of_use_are_kept() -> None:
    plan = replace(
        full_plan(),
        channels=("nic", "nvlink", "copy engine", "unused"),
        origins=(*full_plan().origins[::-1], "x y"),
        groups=((0, 1), *full_plan().groups),
    )
    text = to_text(plan)
    assert "channel unused\n" in text and "group 0:2\n" in text and 'origin "x y"\n' in text
    assert from_text(text) == plan


def test_plans_without_operations_read_back_the_same() -> None:
    empty = build_plan("none", 2, [], [], [], [[], []])
    assert to_text(empty) == "plan none ranks 2\n"
    assert from_text(to_text(empty)) == empty
    wide = empty.with_columns(
        Columns(
            **{
                name: np.zeros((0, 3), np.int32) if column.ndim == 2 else column
                for name in Columns.__slots__
                for column in [getattr(empty.columns, name)]
            }
        )
    )
    assert to_text(wide) == "plan none ranks 2 dims 3\n"
    assert from_text(to_text(wide)) == wide


def test_written_by_hand() -> None:
    text = """
        # Ranks interleave, channel and origin are left out.
        plan mine ranks 2
        tensor x [4] float32   # a shared tensor
        initial r0 x[0:4] produced

        r0.0 push x[0:2] -> r1 x[0:2]
        r1.0 pull r0 x[2:4] -> x[2:4] after compute(r0 x[2:4]) on nic  # by hand
        r0.1 copy x[0:2] -> x[2:4] after r0.0 r1.0
        goal r1 x[0:4]
        goal r0 x[0:2] over 0:2 sum
    """
    plan = from_text(text)
    box = Box((2,), (4,))
    assert plan.op(1, 0) == P2P(
        1, 0, 1, Chunk("x", box), Chunk("x", box), (ComputeDep(0, Chunk("x", box)),), "none",
        "nic", "by hand",
    )  # fmt: skip
    assert plan.op(0, 1).deps == (OpDep(0, 0), OpDep(1, 0))
    summed = Goal(0, "x", Box((0,), (2,)), ranks=(0, 1), reduce="sum")
    assert plan.goals == (Goal(1, "x", Box((0,), (4,))), summed)


def test_repeated_names_cannot_be_written() -> None:
    plan = replace(full_plan(), origins=("a", "b", "a"))
    with pytest.raises(InputError, match=r"origins \('a', 'b', 'a'\) repeat; text cannot tell"):
        to_text(plan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: found no plan, needs a line 'plan NAME ranks N'"),
        ("tensor x [4] float32", "line 1: found 'tensor', needs the plan's line"),
        ("plan", "line 1: found the end of the line, needs the plan's name"),
        ("plan p rank 2", "line 1: found 'rank', needs 'ranks'"),
        ("plan p ranks two", "line 1: found 'two', needs a number of ranks"),
        ("plan p ranks 0", "line 1: found 0 ranks, needs 1 to 1048576"),
        ("plan p ranks 9999999999", "line 1: found 9999999999, needs a number of at most"),
        ("plan p ranks 2 dims 65", "line 1: found 65 dims, needs at most 64"),
        ("plan p ranks 2 more", "line 1: found 'more', needs the end of the line"),
        ('plan "p\\q" ranks 2', "line 1: found .* needs a JSON string .*escape"),
        (HEAD + "tensor x [4] float32", "line 3: found a second tensor 'x', needs another name"),
        (HEAD + "tensor y 4 float32", r"line 3: found '4', needs a shape such as \[4,8\]"),
        (HEAD + "tensor y [4] float12", "line 3: tensor y: dtype 'float12' is not one of"),
        (HEAD + "tensor 1y [4] float32", "line 3: tensor: name '1y' must be an identifier"),
        (HEAD + "initial x[0:4]", r"line 3: found 'x\[0:4\]', needs a rank such as r0"),
        (HEAD + "initial r0 y[0:4]", "line 3: found tensor 'y', needs one of .* above: x"),
        (HEAD + "initial r0 x[0-4]", "line 3: found .*, needs a chunk such as"),
        (HEAD + "initial r0 x[0:4,0:1]", r"line 3: found .* with 2 dimensions, needs 1 as"),
        (HEAD + "initial r0 x[4:0]", "line 3: box: needs 0 <= lo <= hi, found lo=\\(4,\\)"),
        (HEAD + "initial r0 x[0:3000000000]", "line 3: found 3000000000, needs a number of at"),
        (HEAD + "goal r0 x[0:4] from z", "line 3: found tensor 'z', needs one of the tensors"),
        (HEAD + "goal r0 x[0:4] at [1,2]", r"line 3: found offset \[1, 2\], needs 1 numbers"),
        (HEAD + "goal r0 x[0:4] over 0:2:4", "line 3: found '0:2:4', needs ranks such as 0:4,7"),
        (HEAD + "goal r0 x[0:4] over 4:2", "line 3: found '4:2', needs rising ranges of at most"),
        (HEAD + "goal r0 x[0:4] over 0:2000000", "line 3: found '0:2000000', needs rising"),
        (HEAD + "goal r0 x[0:4] over 0:2 min", "line 3: found 'min', needs the end of the line"),
        (HEAD + "goal r0 x[0:4] over none max", "line 3: found 'max', needs the end of the line"),
        (HEAD + "channel a\nchannel a", "line 4: found a second channel 'a', needs each channel"),
        (HEAD + "group 0:2\ngroup 0,1", r"line 4: found a second group \(0, 1\), needs each"),
        (HEAD + "rank 0", "line 3: found 'rank', needs tensor, initial, goal, channel, group"),
        (HEAD + "r2.0 copy", "line 3: found rank 2, needs a rank below 2"),
        (HEAD + "r0.1 copy", "line 3: found operation r0.1, needs r0.0 next"),
        (HEAD + "r0.0 send x[0:4]", "line 3: found 'send', needs one of push, pull, copy, move"),
        (HEAD + "r0.0 push x[0:2] to r1", "line 3: found 'to', needs '->'"),
        (HEAD + "r0.0 copy x[0:2] -> x[2:4] after on nic", "line 3: found nothing, needs a dep"),
        (HEAD + "r0.0 copy x[0:2] -> x[2:4] after r1", "line 3: found 'r1', needs a dependency"),
        (HEAD + 'r0.0 copy x[0:2] -> x[2:4] # "open', "line 3: found .* needs a JSON string"),
        (HEAD + OP + OP, "line 4: found operation r0.0, needs r0.1 next"),
        (HEAD + "r0.0 all_reduce x[0:2] -> x[0:2] split 0", "line 3: found 'split', needs 'over'"),
        (HEAD + "r0.0 all_gather x[0:2] -> x[0:4] over 0:2 concat x", "'x', needs an axis"),
        ("plan p ranks 2 dims 0\ntensor x [4] float32", "plan p: boxes of 0 dimensions, a tensor"),
    ],
)
def test_says_where_text_is_wrong(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        from_text(text)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damaged_text_gives_format_errors_only(data: st.DataObject) -> None:
    text = to_text(full_plan())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        skip = data.draw(st.integers(0, 12))
        text = (
            text[:at] + data.draw(st.text(max_size=4) | st.sampled_from(text)) + text[at + skip :]
        )
    try:
        plan = from_text(text)
    except FormatError as error:
        assert str(error)
    else:
        assert from_text(to_text(plan)) == plan


def test_a_plan_prints_as_its_text() -> None:
    plan = full_plan()
    assert f"{plan}\n" == to_text(plan)
    assert str(plan.goals[3]) == "r2 x[2:4,0:2] from x at [0,4] over 2,0"


def test_a_large_plan_prints_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = all_gather_ring(128, (128, 4))
    monkeypatch.setattr(Plan, "row", None)  # no operation is made for it
    assert str(plan) == (
        "plan all_gather_ring ranks 128\n"
        "tensor x [128,4] bfloat16\n"
        "# 128 initial regions, 128 goals, 16256 operations: syncopate_jax.ir.text.to_text "
        "writes them"
    )
