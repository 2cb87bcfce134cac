"""JSON files of plans: exact round trips, and one FormatError for whatever is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.serial import from_json, load, save, to_json
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.all_gather_ring import all_gather_ring
from syncopate_jax.plans.all_reduce_two_shot import all_reduce_two_shot
from syncopate_jax.plans.collective import collective
from tests.check.random_plans import random_plan
from tests.golden.compare import golden

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def small_tree() -> dict[str, Any]:
    """A plan's JSON tree with operations, both kinds of dependency, goals with a source."""
    tree: dict[str, Any] = json.loads(to_json(all_reduce_two_shot(2, (2, 2))))
    return tree


def test_format() -> None:
    text = json.dumps(json.loads(to_json(all_gather_ring(2, (3,), produced=True))), indent=1) + "\n"
    assert text == golden("ir/all_gather_ring.json", text)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_random_plans_read_back_the_same(seed: int) -> None:
    plan = random_plan(seed)
    assert from_json(to_json(plan)) == plan


def test_files_read_back_the_same(tmp_path: Path) -> None:
    plan = replace(all_gather_ring(4, (7, 3), split=2), name="naïve ring ✓")
    save(plan, tmp_path / "ring.json")
    assert load(str(tmp_path / "ring.json")) == plan


def test_numbers_of_numpy_are_written_too() -> None:
    plain = all_reduce_two_shot(2, (4, 2))
    whole = Box(tuple(np.array([0, 0])), tuple(np.array([4, 2])))
    goals = tuple(replace(goal, box=whole, rank=np.int64(goal.rank)) for goal in plain.goals)
    assert to_json(replace(plain, goals=goals)) == to_json(plain)


def test_a_file_of_text_is_read_too(tmp_path: Path) -> None:
    plan = all_gather_ring(4, (7, 3), split=2)
    (tmp_path / "ring.txt").write_text(f"# by hand\n{to_text(plan)}")
    assert load(tmp_path / "ring.txt") == plan


@pytest.mark.parametrize("form", [to_json, to_text])
def test_a_byte_order_mark_is_no_part_of_a_plan(
    tmp_path: Path, form: Callable[[Plan], str]
) -> None:
    plan = all_gather_ring(2, (4, 3))
    (tmp_path / "plan").write_text(form(plan), encoding="utf-8-sig")
    assert load(tmp_path / "plan") == plan


def test_goals_that_do_not_say_how_they_reduce_are_sums() -> None:
    tree = small_tree()
    assert [goal.pop("reduce") for goal in tree["goals"]] == ["sum", "sum"]
    assert from_json(json.dumps(tree)) == all_reduce_two_shot(2, (2, 2))
    plan = all_reduce_two_shot(2, (2, 2), reduce="max")
    assert from_json(to_json(plan)).goals == plan.goals


def test_a_missing_file_is_not_a_malformed_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "bad.json: plan file: is not UTF-8"),
        (b"{", "bad.json: plan file: is not JSON"),
        (b"plan p", "bad.json: .*line 1"),
        (b" \n", "bad.json: plan file: is empty"),
        (b"[]", "bad.json: plan file: the file: found a list of 0, needs an object"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(FormatError, match=message):
        load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deep for a plan"),
        ('{"format": NaN}', "found NaN, needs integers only"),
        ('{"format": -Infinity}', "found -Infinity, needs integers only"),
        ('{"format": 1, "format": 2}', 'key "format" appears twice in one object'),
        ("1" * 5000, "is not JSON"),
        ('"text"', 'the file: found "text", needs an object'),
    ],
)
def test_refuses_text(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        from_json(text)


def _set(*path: Any) -> Callable[[Any], None]:
    """A change of a tree: the last of ``path`` is the value put where the rest leads."""
    *keys, last, value = path

    def change(tree: Any) -> None:
        for key in keys:
            tree = tree[key]
        tree[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("format", "other"), "format: found \"other\", needs 'syncopate-plan'"),
        (_set("version", 2), "version: found 2, needs 1, the only one"),
        (_set("version", True), "version: found true, needs 1"),
        (_set("name", 3), "name: found 3, needs a string"),
        (_set("num_ranks", 0), "num_ranks: found 0, needs an integer in 1..1048576"),
        (_set("num_ranks", 2**70), "num_ranks: found an integer of about 22 digits"),
        (_set("ndim", -1), "ndim: found -1, needs an integer in 0..64"),
        (_set("ndim", 3), r"columns.src_lo: found 12 numbers, needs 6 boxes of 3, so 18"),
        (_set("extra", 1), 'the file: found the key "extra", needs only format, version'),
        (lambda tree: tree.pop("goals"), "the file: found no 'goals', needs the keys format"),
        (_set("tensors", {}), "tensors: found an object of 0, needs a list"),
        (_set("tensors", 0, "shape", [2, 1.5]), r"tensors\[0\].shape\[1\]: found 1.5, needs"),
        (_set("tensors", 0, "per_rank", 1), r"tensors\[0\].per_rank: found 1, needs true or"),
        (_set("tensors", 0, "dtype", "float12"), "tensor y: dtype 'float12' is not one of"),
        (_set("tensors", 0, "name", "out"), r"tensor names repeat: \['out', 'out'\]"),
        (_set("initial", 0, "tensor", "z"), r"names no tensor of \['out', 'y'\]"),
        (_set("initial", 0, "rank", 2), r"initial\[0\].rank: found 2, needs 0..1"),
        (_set("initial", 0, "lo", [3, 3]), r"initial\[0\]: box: needs 0 <= lo <= hi"),
        (_set("initial", 0, "lo", [0]), r"initial\[0\]: box: lo has 1 dimensions, hi has 2"),
        (
            lambda tree: tree["initial"][0].update(lo=[0], hi=[1]),
            r"initial\[0\]: box \[0:1\] needs 2 dimensions, as y",
        ),
        (_set("goals", 0, "source", "z"), r"goals\[0\].source: found 'z', needs one of"),
        (_set("goals", 0, "source_lo", [1]), r"goals\[0\].source_lo: found \(1,\), needs 2 num"),
        (_set("goals", 0, "ranks", [0, 7]), r"goals\[0\].ranks: found rank 7, needs 0..1"),
        (_set("goals", 0, "reduce", 1), r"goals\[0\].reduce: found 1, needs a string"),
        (_set("goals", 0, "reduce", "min"), "rank 0: reduction 'min' is not one of sum, max"),
        (
            lambda tree: tree["goals"][0].update(ranks=[], reduce="max"),
            "of rank 0: is a max over no ranks",
        ),
        (_set("goals", 0, "over", 1), r'found the key "over", needs only rank.*, ranks, reduce'),
        (_set("groups", [[0, 5]]), r"groups\[0\]: found rank 5, needs 0..1"),
        (_set("channels", [1]), r"channels\[0\]: found 1, needs a string"),
        (_set("channels", []), r"columns.channel\[0\]: found 0, needs 0..-1"),
        (_set("columns", "rank", 0, -2), r"columns.rank\[0\]: found -2, needs an integer in -1"),
        (_set("columns", "rank", 0, True), r"columns.rank\[0\]: found true, needs an integer"),
        (_set("columns", "rank", 0, 1), "columns.rank: rows are not sorted by rank"),
        (_set("columns", "rank", "x"), 'columns.rank: found "x", needs a list of integers'),
        (_set("columns", "rank", [0]), r"columns.src_lo: found 12 numbers, needs 1 boxes of 2"),
        (_set("columns", "src_rank", 0, 2), r"columns.src_rank\[0\]: found 2, needs 0..1"),
        (_set("columns", "dep_rank", 0, -1), r"columns.dep_rank\[0\]: found -1, needs 0..1"),
        (_set("columns", "kind", 0, 6), r"columns.kind\[0\]: found 6, needs 0..5"),
        (_set("columns", "kind", 0, 1), r"columns.group\[0\]: found -1, needs the group of"),
        (
            _set("columns", "concat_axis", 0, 1),
            r"columns.concat_axis\[0\]: found 1, needs -1, as the operation is no collective",
        ),
        (_set("columns", "dst_tensor", 3, 2), r"columns.dst_tensor\[3\]: found 2, needs 0..1"),
        (_set("columns", "dep_start", []), "columns.dep_start: found an empty list, needs 7"),
        (_set("columns", "dep_start", 1, 9), "columns: dep_start must rise from 0 to 4"),
        (_set("columns", "kind", [0]), r"columns: kind has shape \(1,\), needs \(6,\)"),
        (_set("columns", "src_hi", 0, 0), r"box 0 is \[1, 0\] to \[0, 2\], needs 0 <= lo <= hi"),
        (_set("columns", "cdep_lo", 0, -1), r"columns.cdep_lo, cdep_hi: box 0 is \[-1, 0\]"),
        (_set("columns", "src_lo", 0, 2**31), r"columns.src_lo\[0\]: found 2147483648, needs"),
    ],
)
def test_names_the_field_at_fault(change: Callable[[Any], object], message: str) -> None:
    tree = small_tree()
    change(tree)
    with pytest.raises(FormatError, match=message):
        from_json(json.dumps(tree))


@pytest.mark.parametrize("side", ["src_rank", "dst_rank"])
def test_a_collective_is_its_own_end(side: str) -> None:
    plan = collective(2, (4, 4))
    tree = json.loads(to_json(plan))
    assert from_json(json.dumps(tree)) == plan
    _set("columns", side, 0, 1)(tree)
    with pytest.raises(FormatError, match=rf"columns.{side}\[0\]: found 1, needs 0, the rank that"):
        from_json(json.dumps(tree))


def test_writes_nothing_that_it_could_not_read() -> None:
    plan = all_gather_ring(2, (4,))
    columns = replace(plan.columns, dst_rank=np.array([1, 7]))
    message = r"plan all_gather_ring cannot be saved: columns.dst_rank\[1\]: found 7, needs 0..1"
    with pytest.raises(InputError, match=message):
        to_json(plan.with_columns(columns))


def plans() -> tuple[Plan, ...]:
    return all_reduce_two_shot(2, (2, 2)), collective(2, (2,), kind="all_to_all")


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path in a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = [path] if path else []
    if isinstance(tree, (dict, list)):
        for key, value in items:
            found += (
                places(value, (*path, key)) if isinstance(value, (dict, list)) else [(*path, key)]
            )
    return found


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_damaged_trees_give_format_errors_only(data: st.DataObject) -> None:
    tree = json.loads(to_json(data.draw(st.sampled_from(plans()))))
    for _ in range(data.draw(st.integers(1, 3))):
        *keys, last = data.draw(st.sampled_from(places(tree)))
        inner = tree
        for key in keys:
            inner = inner[key]
        if data.draw(st.booleans()):
            inner[last] = data.draw(JSON | st.integers(-2, 8))
        else:
            del inner[last]
    assert_reads_or_refuses(json.dumps(tree))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_damaged_texts_give_format_errors_only(data: st.DataObject) -> None:
    text = to_json(data.draw(st.sampled_from(plans())))
    at = data.draw(st.integers(0, len(text)))
    skip = data.draw(st.integers(0, 9) | st.just(len(text)))
    assert_reads_or_refuses(text[:at] + data.draw(st.text(max_size=4)) + text[at + skip :])


@settings(deadline=None, max_examples=100)
@given(content=st.binary(max_size=64))
def test_random_bytes_give_format_errors_only(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "plan.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"plan\.json: "):
        load(path)


def assert_reads_or_refuses(text: str) -> None:
    """The text is refused with a FormatError, or is a plan that is written and read the same."""
    try:
        plan = from_json(text)
    except FormatError as error:
        assert str(error).startswith("plan file: ")
    else:
        assert from_json(to_json(plan)) == plan
