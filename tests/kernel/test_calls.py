"""What a kernel calls, by whatever name, and in helpers; and what of it tells programs apart."""

from __future__ import annotations

import ast
import linecache
from typing import Any

import pytest

pytest.importorskip("triton")

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.kernel import calls as calls_of
from syncopate_jax.kernel import directives_tree
from syncopate_jax.kernel.annotated import Annotated
from tests.kernel.test_directives import KERNEL, PERSISTENT

ALIASED = '''
import functools
from typing import NamedTuple

import triton
import triton.language as L
from triton.language import make_tensor_descriptor as described, program_id


@triton.jit
def number(axis):
    return L.program_id(axis)


@triton.jit
def block_of(ptr):
    return inner(ptr)


@triton.jit
def inner(ptr):
    return described(ptr, [8], [1], [8])


@triton.jit
def put(blocks, value):
    blocks.store([0], value)


@triton.jit
def again(x, n):
    return again(x, n - 1) if n else x


class Blocks(NamedTuple):
    x: int


def tl_range(*given):
    """No range of Triton's."""


def body(x_ptr, ACT):
{lines}
'''


def module(text: str, file: str) -> dict[str, Any]:
    """A module whose functions' sources are in ``linecache`` alone, as a notebook's are."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": file}
    exec(compile(text, file, "exec"), names)
    return names


def calls(line: str, **arguments: Any) -> tuple[Any, list[ast.Call], ast.stmt]:
    """What is known of the calls of a function with one statement, and all that it reaches."""
    text = ALIASED.replace("{lines}", f"    {line}")
    file = f"<{line}>"
    function = module(text, file)["body"]
    known = calls_of.Calls({**calls_of.captured(function), **arguments})
    (statement,) = ast.parse(line).body
    return known, list(known.reached([statement])), statement


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("L.load(x_ptr)", "tl.load"),
        ("program_id(0)", "tl.program_id"),
        ("triton.language.range(3)", "tl.range"),
        ("described(x_ptr, [8], [1], [8])", "tl.make_tensor_descriptor"),
        ("range(3)", "range"),
        ("blocks.store(3)", "blocks.store"),
        ("tl_range(3)", ""),
        ("L.cdiv(3, 2)", "tl.cdiv"),
    ],
)
def test_calls_go_by_what_they_mean(line: str, name: str) -> None:
    known, reached, _ = calls(line)
    assert known.name(reached[0][1]) == name


@pytest.mark.parametrize(
    ("line", "uses", "stores"),
    [
        ("q = L.load(x_ptr)", False, False),
        ("b = described(x_ptr, [8], [1], [8])", True, False),
        ("b = block_of(x_ptr)", True, False),  # two helpers away
        ("v = blocks.load([0])", True, False),  # from wherever
        ("put(b, 3)", False, True),
        ("L.store(x_ptr, 3)", False, False),
        ("L.store_tensor_descriptor(b, [0], 3)", False, True),
        ("y = again(Blocks(3).x, 2)", False, False),
        ("y = ACT(x_ptr)", True, False),  # a helper that is an argument
    ],
)
def test_descriptors_are_seen_wherever_they_are_made(line: str, uses: bool, stores: bool) -> None:
    helper = module(ALIASED.replace("{lines}", "    pass"), "<act>")["block_of"]
    _, reached, _ = calls(line, ACT=helper)
    assert any(known.is_descriptor_use(call) for known, call in reached) == uses
    assert any(known.is_descriptor_store(call) for known, call in reached) == stores


def test_numbers_of_programs_are_seen_in_helpers() -> None:
    for line, axes in {
        "p = L.program_id(axis=2)": {2},
        "p = number(1)": {0},  # which axis is not known
        "p = L.num_programs(0) + program_id(1)": {0, 1},
        "p = again(3, 2)": set(),
    }.items():
        known, _, statement = calls(line)
        assert known.axes_of_programs([statement]) == axes


def test_a_helper_without_source_is_named() -> None:
    names: dict[str, Any] = {}
    exec("def hidden(x): return x", names)
    with pytest.raises(InputError, match=r"hidden, which a kernel calls: its source was not found"):
        calls("y = ACT(x_ptr)", ACT=names["hidden"])


def test_loops_are_ranges_by_any_name() -> None:
    text = ALIASED + PERSISTENT.replace("tl.", "L.")
    found = directives_tree.read(module(text.replace("{lines}", "    pass"), "<loop>")["copied"])
    assert found.loop is not None


def test_names_around_a_function_are_known_too() -> None:
    def helper() -> None: ...

    def kernel(x_ptr: Any) -> Any:
        ast = x_ptr
        return helper, ast, pytest

    known = calls_of.captured(kernel)
    assert known["helper"] is helper and known["pytest"] is pytest
    assert "ast" not in known and "x_ptr" not in known


# --- what follows from a program's number ------------------------------------------------------


def read(text: str) -> Annotated:
    return directives_tree.read_source(text.lstrip("\n"), "kernel.py", 10)


DISPATCH = "    # syncopate: dispatch pid -> r=row, c=column\n"
END = "    # syncopate: end dispatch\n"
LOOP = "    for tile in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK), 8, num_stages=2):\n"
BEFORE = "    # syncopate: tiles persistent\n"
STORE = "        tl.store(y_ptr + block, tl.load(x_ptr + block))\n"
FOLLOWS = "follows from the program's number, as the tile's identifier does"
AHEAD = "what is done ahead of the tiles goes by the program's number"
STALE = {
    "derived ahead": (
        KERNEL,
        {DISPATCH: f"    at = tl.program_id(0) // 4\n{DISPATCH}", "total = 0.0": "total = at"},
        f"kernel.py:25: at {FOLLOWS}",
    ),
    "derived twice": (
        KERNEL,
        {
            DISPATCH: f"    first = tl.program_id(0)\n    at = first * 4\n{DISPATCH}",
            "x_ptr + row": "x_ptr + at",
        },
        f"kernel.py:29: at {FOLLOWS}",
    ),
    "derived in dispatch": (
        KERNEL,
        {
            DISPATCH: f"    first = tl.program_id(0)\n{DISPATCH}",
            END: f"    at = first * 4\n{END}",
            "total = 0.0": "total = at",
        },
        f"kernel.py:26: at {FOLLOWS}",
    ),
    "under a condition": (
        KERNEL,
        {
            DISPATCH: f"    at = 0\n    if tl.program_id(0) > 2:\n        at = 1\n{DISPATCH}",
            "total = 0.0": "total = at",
        },
        f"kernel.py:27: at {FOLLOWS}",
    ),
    "a pointer": (
        KERNEL,
        {DISPATCH: f"    y_ptr += tl.program_id(0)\n{DISPATCH}"},
        f"kernel.py:30: y_ptr {FOLLOWS}",
    ),
    "asked for in the tile": (
        KERNEL,
        {"total = 0.0": "total = tl.program_id(0)"},
        "kernel.py:24: the program's number, or how many there are, is asked for outside dispatch",
    ),
    "how many programs": (
        KERNEL,
        {"total = 0.0": "total = tl.num_programs(axis=0)"},
        "kernel.py:24: the program's number, or how many there are, is asked for outside dispatch",
    ),
    "early return": (
        KERNEL,
        {DISPATCH: f"    if tl.program_id(0) > 2:\n        return\n{DISPATCH}"},
        f"kernel.py:18: {AHEAD}",
    ),
    "a store ahead": (
        KERNEL,
        {DISPATCH: f"    tl.store(y_ptr + tl.program_id(0), 0)\n{DISPATCH}"},
        f"kernel.py:18: {AHEAD}",
    ),
    "another counter of tiles": (
        PERSISTENT,
        {
            BEFORE: f"    start = tl.program_id(0)\n    late = start - 8\n{BEFORE}",
            STORE: f"        late += 8\n{STORE}",
        },
        f"kernel.py:21: late {FOLLOWS}",
    ),
    "the loop's variable": (
        PERSISTENT,
        {STORE: STORE.replace("y_ptr + block", "y_ptr + tile")},
        f"kernel.py:19: tile {FOLLOWS}",
    ),
    "behind the loop": (
        PERSISTENT,
        {STORE: f"{STORE}    tl.store(y_ptr + tile, 0)\n"},
        f"kernel.py:20: tile {FOLLOWS}",
    ),
    "the tile before, ahead of dispatch": (
        PERSISTENT,
        {
            BEFORE: f"    block = 0\n{BEFORE}",
            LOOP: f"{LOOP}        last = block\n",
            STORE: STORE.replace("y_ptr + block", "y_ptr + last"),
        },
        "kernel.py:17: block is read ahead of dispatch, where it is of the tile before",
    ),
    "an axis of the grid by which tiles are told": (
        KERNEL,
        {"pid // blocks": "tl.program_id(1)", "total = 0.0": "total = tl.program_id(1)"},
        "kernel.py:24: the program's number, or how many there are",
    ),
    "such an axis, ahead": (
        KERNEL,
        {
            "dispatch pid ->": "dispatch pid, other ->",
            "    # syncopate: tiles one per program\n": "    other = tl.program_id(1)\n",
            "total = 0.0": "total = other",
        },
        f"kernel.py:24: other {FOLLOWS}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STALE.values(), ids=STALE.keys())
def test_what_follows_from_a_programs_number_stays_in_dispatch(
    case: tuple[str, dict[str, str], str],
) -> None:
    text, changes, message = case
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(FormatError) as caught:
        read(text)
    assert str(caught.value).startswith(message)


FRESH = {
    "zeros along another axis": (KERNEL, {"total = 0.0": "total = tl.program_id(1)"}),
    "zeros ahead": (
        PERSISTENT,
        {BEFORE: f"    none = tl.program_id(1)\n{BEFORE}", STORE: f"        a = none\n{STORE}"},
    ),
    "renewed": (
        KERNEL,
        {DISPATCH: f"    at = tl.program_id(0)\n    at = 1\n{DISPATCH}", "0.0": "0.0 + at"},
    ),
    "used in dispatch and the loop's header alone": (
        PERSISTENT,
        {BEFORE: f"    at = tl.program_id(0)\n{BEFORE}", "range(tl.program_id(0)": "range(at"},
    ),
    "the tile before, from what dispatch gave": (
        PERSISTENT,
        {BEFORE: f"    last = 0\n{BEFORE}", STORE: f"{STORE}        last = block\n    a = last\n"},
    ),
    "what dispatch maps": (KERNEL, {"total = 0.0": "total = row"}),
}  # fmt: skip


@pytest.mark.parametrize("case", FRESH.values(), ids=FRESH.keys())
def test_what_does_not_is_taken(case: tuple[str, dict[str, str]]) -> None:
    text, changes = case
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    assert read(text).name in ("scaled", "copied")
