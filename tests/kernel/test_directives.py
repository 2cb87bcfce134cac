"""Directives: the grammar, what must be true of a kernel's syntax tree, and every error."""

from __future__ import annotations

import ast
import linecache
import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncopate_jax.errors import FormatError, InputError, SyncopateError
from syncopate_jax.kernel import directives, directives_tree
from syncopate_jax.kernel.annotated import Annotated
from syncopate_jax.kernel.directives import Place
from syncopate_jax.kernel.triton_kernel import triton_kernel

KERNEL = '''
def scaled(x_ptr, y_ptr, ROWS, COLUMNS, BLOCK, DEPTH):
    """A kernel with one of each directive."""
    # syncopate: axis r: extent=ROWS, tile=BLOCK
    # syncopate: axis c: count=COLUMNS
    # syncopate: axis k: extent=DEPTH, tile=BLOCK
    # syncopate: reads x_ptr[r, c, k] as x
    # syncopate: writes y_ptr[r, c] as y
    # syncopate: tiles one per program
    # syncopate: dispatch pid -> r=row, c=column
    pid = tl.program_id(0)
    blocks = tl.cdiv(ROWS, BLOCK)
    row = pid % blocks
    column = pid // blocks
    # syncopate: end dispatch
    total = 0.0
    # syncopate: reduce k=step
    for step in range(tl.cdiv(DEPTH, BLOCK)):
        total += tl.load(x_ptr + row + column + step)
    # syncopate: epilogue total
    tl.store(y_ptr + row, total)
    # syncopate: end epilogue
'''

PERSISTENT = """
def copied(x_ptr, y_ptr, N, BLOCK):
    # syncopate: axis n: extent=N, tile=BLOCK
    # syncopate: reads x_ptr[n]
    # syncopate: writes y_ptr[n]
    # syncopate: tiles persistent
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK), 8, num_stages=2):
        # syncopate: dispatch tile -> n=block
        block = tile
        # syncopate: end dispatch
        tl.store(y_ptr + block, tl.load(x_ptr + block))
"""


def read(text: str) -> Annotated:
    return directives_tree.read_source(text.lstrip("\n"), "kernel.py", 10)


def test_a_kernel_is_read() -> None:
    found = read(KERNEL)
    assert [axis.name for axis in found.axes] == ["r", "c", "k"]
    assert found.identifiers == ("pid",)
    assert found.variables == (("r", "row"), ("c", "column"))
    assert found.reduced == ("k",) and found.reduction is not None
    assert (found.reduction.step, found.reduction.end) == ("1", "tl.cdiv(DEPTH, BLOCK)")
    assert found.accumulator == "total" and found.loop is None and found.kept == ()
    assert [ast.unparse(s) for s in found.dispatch.inside][-1] == "column = pid // blocks"
    assert found.epilogue is not None and len(found.epilogue.inside) == 1


def test_a_persistent_kernel_is_read() -> None:
    found = read(PERSISTENT)
    assert found.loop is not None and found.tile == found.loop.body
    assert found.epilogue is None and found.reduction is None


def test_places_are_lines_of_the_file() -> None:
    (first, *_) = directives.parse(KERNEL.lstrip("\n"), "kernel.py", 10)
    assert (first.place.file, first.place.line, first.place.column) == ("kernel.py", 12, 4)


def test_directives_are_comments() -> None:
    """Taking them out changes nothing of the kernel's syntax tree."""
    stripped = directives.strip(KERNEL)
    assert "syncopate:" not in stripped and "A kernel with one" in stripped
    assert ast.dump(ast.parse(stripped)) == ast.dump(ast.parse(KERNEL))


def test_statements_that_do_not_follow_from_the_tile_are_kept() -> None:
    text = KERNEL.replace("    total = 0.0\n", "    total = 0.0 * blocks\n")
    assert [ast.unparse(s) for s in read(text).kept] == ["blocks = tl.cdiv(ROWS, BLOCK)"]


MALFORMED = {
    "unknown": ("wait m", "no directive is called 'wait'; known: axis, reads"),
    "axis without colon": ("axis m", "axis needs 'axis NAME: extent=…, tile=…', found 'axis m'"),
    "axis field": ("axis m: size=M", "axis m: needs extent=, count= or tile=, found 'size=M'"),
    "axis field twice": ("axis m: extent=M, extent=M", "axis m: extent is given twice"),
    "axis both": ("axis m: extent=M, count=M", "give either extent (elements) or count (tiles)"),
    "axis name": ("axis 3: extent=M", "needs a name, found '3'"),
    "expression": ("axis m: extent=M +", "needs an arithmetic expression, found 'M +'"),
    "call": ("axis m: extent=max(M, 2)", "an expression is + - * // % and cdiv"),
    "cdiv": ("axis m: extent=cdiv(M)", "cdiv takes two arguments, found 'cdiv(M)'"),
    "float": ("axis m: extent=1.5", "an expression is + - * // % and cdiv"),
    "long": (f"axis m: extent={'1+' * 200}1", "at most 200 characters"),
    "reads": ("reads x_ptr", "reads needs 'reads POINTER[axis, …]'"),
    "comma": ("reads x_ptr[m,,k]", "nothing stands before or after a comma in 'm,,k'"),
    "tiles": ("tiles sometimes", "tiles are 'persistent' or 'one per program', found 'sometimes'"),
    "arrow": ("dispatch pid", "dispatch needs 'dispatch VARIABLE -> AXIS=VARIABLE', found 'pid'"),
    "map": ("dispatch pid -> m", "dispatch: needs AXIS=VARIABLE, found 'm'"),
    "map twice": ("dispatch pid -> m=a, m=b", "dispatch: axis m is mapped twice"),
    "reduce": ("reduce k", "reduce needs 'reduce AXIS=VARIABLE', found 'k'"),
    "end": ("end tile", "end is of dispatch or epilogue, found 'tile'"),
}


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_directive_is_named_by_file_and_line(case: tuple[str, str]) -> None:
    text, message = case
    with pytest.raises(FormatError) as caught:
        directives.parse(f"\n# syncopate: {text}\n", "k.py", 5)
    assert str(caught.value).startswith("k.py:6: ") and message in str(caught.value)


def test_a_prefix_without_its_colon_is_an_error() -> None:
    with pytest.raises(FormatError, match=r"k.py:1: a directive begins with '# syncopate:'"):
        directives.parse("# syncopate axis m: extent=M\n", "k.py")


def test_a_text_that_is_no_python_is_an_error() -> None:
    with pytest.raises(FormatError, match=r"k.py:3: no Python source"):
        directives.parse("(", "k.py", 3)
    with pytest.raises(FormatError, match=r"k.py:3: no Python source"):
        directives_tree.read_source("def f(:\n", "k.py", 3)
    with pytest.raises(FormatError, match=r"k.py:3: needs the source of one function"):
        directives_tree.read_source("x = 1\n", "k.py", 3)


DISPATCH = "    # syncopate: dispatch pid -> r=row, c=column\n"
END = "    # syncopate: end dispatch\n"
FALSE = {
    "no dispatch": (DISPATCH, "", "kernel scaled has no dispatch directive"),
    "dispatch twice": (DISPATCH, DISPATCH * 2, "dispatch is given twice, first in line 18"),
    "axis twice": (
        "axis c: count=COLUMNS",
        "axis r: count=COLUMNS",
        "axis r is given twice, first",
    ),
    "size": ("extent=ROWS", "extent=LINES", "LINES is no parameter of scaled; its parameters are"),
    "pointer": ("reads x_ptr", "reads z_ptr", "z_ptr is no parameter of scaled"),
    "pointer twice": (
        "writes y_ptr[r, c] as y",
        "writes x_ptr[r] as y",
        "pointer x_ptr is given tw",
    ),
    "operand twice": ("[r, c] as y", "[r, c] as x", "operand x is given twice, first in line 15"),
    "no result": ("writes y_ptr", "reads y_ptr", "kernel scaled has no writes directive"),
    "axis of access": (
        "x_ptr[r, c, k]",
        "x_ptr[r, z, k]",
        "x_ptr follows axis z, which is not giv",
    ),
    "open": (END, "", "dispatch does not close: 'end dispatch' is missing below"),
    "empty": (DISPATCH, DISPATCH + END, "dispatch encloses no statement"),
    "end alone": (END, END * 2, "'end dispatch' closes nothing"),
    "other block": (
        "        total += tl.load(x_ptr + row + column + step)\n",
        "        total += tl.load(x_ptr + row + column + step)\n"
        "        # syncopate: end epilogue\n",
        "'end epilogue' closes nothing",
    ),
    "unmapped": ("r=row, c=column", "r=row", "axis c is neither mapped by dispatch nor reduced"),
    "unassigned": (
        "c=column",
        "c=line",
        "dispatch maps axis c to line, which is not assigned betw",
    ),
    "no such axis": (
        "c=column",
        "z=column",
        "dispatch maps axis z, which is not given; axes: r, c",
    ),
    "one variable": ("c=column", "c=row", "dispatch maps two axes to row"),
    "identifier": (
        "dispatch pid",
        "dispatch number",
        "the tile is identified by number, which is n",
    ),
    "stale": (
        "total = 0.0",
        "total = 0.0 * pid",
        "pid follows from the program's number, as the tile's",
    ),
    "reduced and mapped": (
        "reduce k=step",
        "reduce r=step",
        "axis r is reduced and mapped by disp",
    ),
    "reduced axis": ("reduce k=step", "reduce z=step", "reduce names axis z, which is not given"),
    "reduced twice": ("reduce k=step", "reduce k, k=step", "reduce names axis k twice"),
    "variable": ("reduce k=step", "reduce k=k", "reduce names k, the loop's variable is step"),
    "no loop": (
        "    total = 0.0\n",
        "    # syncopate: reduce k=step\n    total = 0.0\n",
        "reduce is g",
    ),
    "not a loop": (
        "    # syncopate: reduce k=step\n",
        "    # syncopate: reduce k=step\n    total = 1.0\n",
        "reduce must stand on the line above a loop of the tile",
    ),
    "no range": (
        "in range(tl.cdiv(DEPTH, BLOCK))",
        "in steps(3)",
        "the reduction must be 'for NAME",
    ),
    "start": ("range(tl.cdiv(DEPTH, BLOCK))", "range(1, 4)", "must start at 0, it starts at 1"),
    "written along": ("y_ptr[r, c]", "y_ptr[r, k]", "y_ptr is written along reduced axis k"),
    "no store": ("tl.store(y_ptr + row, total)", "total += 1", "epilogue encloses no tl.store"),
    "accumulator": (
        "epilogue total",
        "epilogue sum",
        "epilogue adds to sum, which is not assigned",
    ),
    "tiles twice": (
        "    # syncopate: tiles one per program\n",
        "    # syncopate: tiles one per program\n    # syncopate: tiles persistent\n",
        "tiles is given twice, first in line 17",
    ),
    "persistent": (
        "one per program",
        "persistent",
        "dispatch must stand in a 'for' loop at the top",
    ),
    "return": (
        "    total = 0.0\n",
        "    total = 0.0\n    return\n",
        "a tile's statements may not ret",
    ),
    "indentation": (
        DISPATCH,
        DISPATCH.replace("    #", "  #"),
        "is indented by 2, as no statement",
    ),
    "inside": (
        "    total = 0.0\n",
        "    total = (\n    # syncopate: epilogue total\n    0.0)\n",
        "epilogue is given twice",
    ),
}


@pytest.mark.parametrize("case", FALSE.values(), ids=FALSE.keys())
def test_a_false_directive_is_named_by_file_and_line(case: tuple[str, str, str]) -> None:
    old, new, message = case
    assert old in KERNEL
    with pytest.raises(FormatError) as caught:
        read(KERNEL.replace(old, new))
    assert message in str(caught.value) and str(caught.value).startswith("kernel.py:")


def test_a_directive_inside_a_statement_is_an_error() -> None:
    text = KERNEL.replace(
        "    # syncopate: end dispatch\n    total = 0.0\n",
        "    total = (\n    # syncopate: end dispatch\n    0.0)\n",
    )
    with pytest.raises(FormatError, match="the directive stands inside a statement"):
        read(text)


def test_a_region_that_ends_in_another_block_is_an_error() -> None:
    text = KERNEL.replace("    # syncopate: end epilogue\n", "").replace(
        "    # syncopate: epilogue total\n    tl.store(y_ptr + row, total)\n",
        "    # syncopate: epilogue total\n    if total > 0:\n        tl.store(y_ptr + row, total)\n"
        "        # syncopate: end epilogue\n",
    )
    with pytest.raises(FormatError, match="'end epilogue' stands in another block than 'epilogue'"):
        read(text)


def test_tiles_in_a_loop_are_persistent() -> None:
    with pytest.raises(FormatError, match="one per program, but dispatch stands in a loop"):
        read(PERSISTENT.replace("persistent", "one per program"))
    with pytest.raises(FormatError, match="the loop over tiles must be 'for NAME in range"):
        read(PERSISTENT.replace("tl.range(tl.program_id(0)", "walk(tl.program_id(0)"))


def test_reduced_axes_come_in_the_order_of_their_tiles() -> None:
    text = KERNEL.replace("x_ptr[r, c, k]", "x_ptr[r, k, z]").replace(
        "    # syncopate: reads", "    # syncopate: axis z: count=COLUMNS\n    # syncopate: reads"
    )
    assert read(text.replace("reduce k=step", "reduce k, z=step")).reduced == ("k", "z")
    with pytest.raises(
        FormatError, match="reduce names z, k; give them in the order of their axes"
    ):
        read(text.replace("reduce k=step", "reduce z, k=step"))


# --- with arguments ----------------------------------------------------------------------------


def function(text: str, name: str, file: str) -> Any:
    """A function as a notebook's cell defines one: its source is in ``linecache`` alone."""
    text = textwrap.dedent(text)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {}
    exec(compile(text, file, "exec"), namespace)
    return namespace[name]


SIZES = {"ROWS": 10, "COLUMNS": 3, "BLOCK": 4, "DEPTH": 8}


def kernel(text: str = KERNEL, **arguments: Any) -> Any:
    made = function(text, "scaled", "<cell 1>")
    return triton_kernel(made, SIZES | arguments, out_dtypes={"y": "float32"})


def test_a_kernel_from_a_notebook_becomes_a_local_kernel() -> None:
    made = kernel()
    assert made.grid == (3, 3, 2) and made.operands == ("x",) and made.results == ("y",)
    space, accesses = made.read({"x": (10, 3, 8)})
    assert [(axis.extent, axis.tile, axis.reduction) for axis in space.axes] == [
        (10, 4, False), (3, 1, False), (8, 4, True)
    ]  # fmt: skip
    lo, hi = accesses["x"].boxes(space)
    assert lo[-1, -1].tolist() == [8, 2, 4] and hi[-1, -1].tolist() == [10, 3, 8]


def test_several_kernels_of_one_file_have_their_own_directives() -> None:
    made = function(KERNEL + PERSISTENT, "copied", "<cell 2>")
    assert directives_tree.read(made).name == "copied"
    with pytest.raises(FormatError, match=r"<cell 3>:\d+: no directive is called 'hold'"):
        directives_tree.read(
            function(KERNEL + PERSISTENT.replace("tiles pers", "hold pers"), "copied", "<cell 3>")
        )


WRONG = {
    "missing": ({"ROWS": None}, "ROWS must be an integer argument of the kernel, is None"),
    "unknown": ({"LINES": 3}, "LINES is none of its arguments: ROWS, COLUMNS, BLOCK, DEPTH"),
    "zero": ({"BLOCK": 0}, "axis r has tiles of 0 elements"),
    "negative": ({"ROWS": -1}, "ROWS is -1; sizes are at least 0"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_named(case: tuple[dict[str, Any], str]) -> None:
    arguments, message = case
    with pytest.raises(SyncopateError) as caught:
        kernel(**arguments)
    assert message in str(caught.value)


def test_arguments_that_are_left_out_are_named() -> None:
    made = function(KERNEL, "scaled", "<cell 1>")
    with pytest.raises(InputError, match="arguments COLUMNS, BLOCK, DEPTH are missing; a pointer"):
        triton_kernel(made, {"ROWS": 1}, out_dtypes={"y": "float32"})
    with pytest.raises(InputError, match="out_dtypes needs y, found none"):
        triton_kernel(made, SIZES, out_dtypes={})


def test_shapes_of_dimensions_taken_whole_are_asked_for() -> None:
    text = KERNEL.replace("x_ptr[r, c, k]", "x_ptr[r, :, k]")
    with pytest.raises(
        FormatError, match=r"x has a dimension ':', so its shape must be g"
    ) as caught:
        kernel(text)
    assert "triton_kernel(…, shapes={'x': (…)}), 3 extents in elements" in str(caught.value)
    made = function(text, "scaled", "<cell 1>")
    with pytest.raises(FormatError, match=r"x has 3 dimensions here, shapes= says \(3,\)"):
        triton_kernel(made, SIZES, out_dtypes={"y": "float32"}, shapes={"x": (3,)})


def test_a_loop_over_elements_rises_by_a_tile() -> None:
    text = KERNEL.replace("range(tl.cdiv(DEPTH, BLOCK))", "range(0, DEPTH, BLOCK)")
    assert kernel(text).grid == (3, 3, 2)
    with pytest.raises(FormatError, match="the loop over k rises by 2 = 2; it must rise by 1, or"):
        kernel(text.replace("DEPTH, BLOCK)", "DEPTH, 2)"))


def test_divisions_by_zero_are_named() -> None:
    place = Place("k.py", 3)
    for text in ("4 // N", "4 % N", "cdiv(4, N)", "tl.cdiv(4, N)"):
        with pytest.raises(FormatError, match=r"k.py:3: .* divides by 0"):
            directives.evaluate(text, {"N": 0}, place)
    assert directives.evaluate("cdiv(M, 4) * 2 - M % 3 + 1 // 2", {"M": 10}, place) == 5


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"a Triton kernel is a function under @triton.jit, found 3"
    ):
        directives_tree.plain_function(3)
    hidden = eval("lambda x_ptr: None")
    with pytest.raises(InputError, match="its source was not found"):
        directives_tree.read(hidden)


# --- fuzz --------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        "axis",
        "reads",
        "writes",
        "tiles",
        "dispatch",
        "reduce",
        "epilogue",
        "end",
        "m",
        "n",
        "k",
        "pid",
        "x_ptr",
        "y_ptr",
        "[",
        "]",
        "(",
        ")",
        ",",
        ":",
        "=",
        "->",
        "+",
        "//",
        "extent",
        "count",
        "tile",
        "as",
        "persistent",
        "one",
        "per",
        "program",
        "cdiv",
        "16",
        "0",
        "-",
        "*",
        "%",
        "syncopate:",
        "#",
        ";",
        "é",
    ]
)
LINES = st.one_of(
    st.lists(PIECES, max_size=10).map(" ".join),
    st.text(st.characters(blacklist_characters="\n\r\x00\x0c", blacklist_categories=["Cs"])),
)


@given(LINES)
def test_no_directive_crashes_the_parser(text: str) -> None:
    try:
        found = directives.parse(f"# syncopate: {text}\n")
    except SyncopateError:
        return
    assert len(found) == 1


@given(st.data())
def test_no_directive_crashes_the_reader(data: st.DataObject) -> None:
    """A kernel's own directives are dropped, repeated, replaced and moved."""
    lines = KERNEL.strip("\n").splitlines()
    own = [i for i, line in enumerate(lines) if "syncopate:" in line]
    for _ in range(data.draw(st.integers(1, 3))):
        at, to = data.draw(st.sampled_from(own)), data.draw(st.integers(1, len(lines) - 1))
        do = data.draw(st.sampled_from(["drop", "repeat", "replace", "move"]))
        line = lines[at]
        if do == "repeat":
            lines.insert(to, line)
        if do == "replace":
            lines[at] = f"    # syncopate: {data.draw(LINES)}"
        if do in ("drop", "move"):
            lines[at] = "    pass"
        if do == "move":
            lines[to] = lines[to] + "\n" + line
    try:
        found = directives_tree.read_source("\n".join(lines) + "\n")
    except SyncopateError:
        return
    assert found.name == "scaled"
