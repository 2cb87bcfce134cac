"""Directives: structured comments that say how a local kernel walks its tiles (paper section 5.2).

A directive is a comment line inside the kernel. It changes nothing when the kernel runs alone::

    directive = "# syncopate:" (axis | access | tiles | dispatch | reduce | epilogue | end)
    axis      = "axis" NAME ":" field {"," field}        exactly one of extent and count
    field     = ("extent" | "count" | "tile") "=" EXPRESSION       extent and tile in elements
    access    = ("reads" | "writes") POINTER "[" dim {"," dim} "]" ["as" NAME]
    dim       = NAME | ":"                               the axis it follows, or taken whole
    tiles     = "tiles" ("persistent" | "one per program")
    dispatch  = "dispatch" VARIABLE {"," VARIABLE} "->" map {"," map}
    map       = NAME "=" VARIABLE                        axis = the variable that holds its index
    reduce    = "reduce" NAME {"," NAME} "=" VARIABLE    on the line above its loop
    epilogue  = "epilogue" [VARIABLE]                    what partial results are added to
    end       = "end" ("dispatch" | "epilogue")

An EXPRESSION is arithmetic (``+ - * // %`` and ``cdiv``) over the kernel's parameters. ``tile`` is
1 where it is left out. Dimensions of an access are in memory order, last one contiguous. The
variables left of ``->`` identify the tile; ``dispatch`` and ``end dispatch`` enclose the statements
that compute the variables to its right from them.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from syncopate_jax.errors import FormatError

PREFIX = "syncopate:"
LONGEST = 200  # characters of an expression: a tree that deep is walked without trouble
NAME = re.compile(r"[A-Za-z_]\w*\Z")
WORDS = ("axis", "reads", "writes", "tiles", "dispatch", "reduce", "epilogue", "end")
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a directive stands: ``column`` counts from 0 in ``line`` of ``file``."""

    file: str
    line: int
    column: int = 0

    def error(self, text: str) -> FormatError:
        """An error that names the place."""
        return FormatError(f"{self.file}:{self.line}: {text}")


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of the tile space; ``extent`` or ``count`` is empty."""

    place: Place
    name: str
    extent: str
    count: str
    tile: str


@dataclass(frozen=True, slots=True)
class Access:
    """How tiles touch what ``pointer`` points to; None is a dimension taken whole."""

    place: Place
    pointer: str
    dims: tuple[str | None, ...]
    operand: str
    write: bool


@dataclass(frozen=True, slots=True)
class Tiles:
    """Whether a program walks several tiles or computes one."""

    place: Place
    persistent: bool


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Start of the statements that turn ``identifiers`` into an index along each axis."""

    place: Place
    identifiers: tuple[str, ...]
    axes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """The loop on the next line walks ``axes``, the first slowest."""

    place: Place
    axes: tuple[str, ...]
    variable: str


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Start of the statements that store a tile; ``accumulator`` may be empty."""

    place: Place
    accumulator: str


@dataclass(frozen=True, slots=True)
class End:
    """End of a region."""

    place: Place
    what: str


Directive = Axis | Access | Tiles | Dispatch | Reduce | Epilogue | End


def parse(source: str, file: str = "<kernel>", first_line: int = 1) -> tuple[Directive, ...]:
    """The directives of a source text, in order.

    Args:
      source: Python source, such as of one function.
      file, first_line: where it comes from, for messages.

    Raises:
      FormatError: the text is no Python, or a directive is malformed; with file and line.
    """
    found = []
    for line, column, text in _comments(source, file, first_line):
        place = Place(file, line, column)
        body = text.removeprefix("#").strip()
        if body.startswith(PREFIX):
            found.append(_directive(place, body.removeprefix(PREFIX).strip()))
        elif re.match(r"syncopate\b", body):
            raise place.error(f"a directive begins with '# {PREFIX}', found {text.strip()!r}")
    return tuple(found)


def strip(source: str) -> str:
    """The source without the lines that hold nothing but a directive."""
    lines = source.splitlines(keepends=True)
    for line, column, text in _comments(source, "<kernel>", 1):
        alone = not lines[line - 1][:column].strip()
        if alone and text.removeprefix("#").strip().startswith(PREFIX):
            lines[line - 1] = ""
    return "".join(lines)


def evaluate(text: str, arguments: Mapping[str, Any], place: Place) -> int:
    """The value of an EXPRESSION.

    Raises:
      FormatError: a name has no integer value, a divisor is 0, or the result is negative.
    """
    value = _value(ast.parse(text, mode="eval").body, arguments, place)
    if value < 0:
        raise place.error(f"{text} is {value}; sizes are at least 0")
    return value


def names_in(text: str) -> set[str]:
    """The names an EXPRESSION uses, ``cdiv`` and ``tl.cdiv`` aside."""
    nodes = ast.walk(ast.parse(text, mode="eval"))
    return {node.id for node in nodes if isinstance(node, ast.Name)} - {"cdiv", "tl"}


def _value(node: ast.expr, arguments: Mapping[str, Any], place: Place) -> int:
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        value = arguments.get(node.id)
        if not isinstance(value, int):
            raise place.error(f"{node.id} must be an integer argument of the kernel, is {value!r}")
        return int(value)
    if isinstance(node, ast.BinOp):
        left, right = (_value(side, arguments, place) for side in (node.left, node.right))
        if right == 0 and isinstance(node.op, ast.FloorDiv | ast.Mod):
            raise place.error(f"{ast.unparse(node)} divides by 0")
        return OPERATORS[type(node.op)](left, right)
    assert isinstance(node, ast.Call)  # the parser let nothing else through
    over, by = (_value(side, arguments, place) for side in node.args)
    if by == 0:
        raise place.error(f"{ast.unparse(node)} divides by 0")
    return -(-over // by)


def _comments(source: str, file: str, first_line: int) -> Iterator[tuple[int, int, str]]:
    """Line (counted from ``first_line``), column and text of every comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    try:
        for token in tokens:
            if token.type == tokenize.COMMENT:
                yield token.start[0] + first_line - 1, token.start[1], token.string
    except (tokenize.TokenError, SyntaxError) as error:
        raise FormatError(f"{file}:{first_line}: no Python source: {error}") from error


def _directive(place: Place, text: str) -> Directive:
    word, _, rest = text.partition(" ")
    read = _READERS.get(word)
    if read is None:
        raise place.error(f"no directive is called {word!r}; known: {', '.join(WORDS)}")
    return read(place, rest.strip())


def _axis(place: Place, text: str) -> Axis:
    name, colon, rest = text.partition(":")
    fields: dict[str, str] = {}
    if not colon:
        raise place.error(f"axis needs 'axis NAME: extent=…, tile=…', found 'axis {text}'")
    for part in _commas(place, rest):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or key not in ("extent", "count", "tile"):
            raise place.error(
                f"axis {name.strip()}: needs extent=, count= or tile=, found {part!r}"
            )
        if key in fields:
            raise place.error(f"axis {name.strip()}: {key} is given twice")
        fields[key] = _expression(place, value.strip())
    if ("extent" in fields) == ("count" in fields):
        raise place.error(f"axis {name.strip()}: give either extent (elements) or count (tiles)")
    return Axis(
        place,
        _name(place, name),
        fields.get("extent", ""),
        fields.get("count", ""),
        fields.get("tile", "1"),
    )


def _access(write: bool) -> Callable[[Place, str], Access]:
    word = "writes" if write else "reads"

    def read(place: Place, text: str) -> Access:
        match = re.fullmatch(r"(\w+)\s*\[([^\[\]]*)\](?:\s+as\s+(\w+))?", text)
        if match is None:
            raise place.error(
                f"{word} needs '{word} POINTER[axis, …]', a dimension being an axis or ':', found "
                f"'{word} {text}'"
            )
        pointer, dims, operand = match.groups()
        axes = tuple(None if d == ":" else _name(place, d) for d in _commas(place, dims))
        return Access(place, _name(place, pointer), axes, _name(place, operand or pointer), write)

    return read


def _tiles(place: Place, text: str) -> Tiles:
    if text not in ("persistent", "one per program"):
        raise place.error(f"tiles are 'persistent' or 'one per program', found {text!r}")
    return Tiles(place, text == "persistent")


def _dispatch(place: Place, text: str) -> Dispatch:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise place.error(f"dispatch needs 'dispatch VARIABLE -> AXIS=VARIABLE', found {text!r}")
    pairs = [_pair(place, part) for part in _commas(place, right)]
    repeated = sorted({axis for axis, _ in pairs if [a for a, _ in pairs].count(axis) > 1})
    if repeated:
        raise place.error(f"dispatch: axis {repeated[0]} is mapped twice")
    identifiers = tuple(_name(place, part) for part in _commas(place, left))
    return Dispatch(place, identifiers, tuple(pairs))


def _reduce(place: Place, text: str) -> Reduce:
    left, equals, right = text.partition("=")
    if not equals:
        raise place.error(f"reduce needs 'reduce AXIS=VARIABLE', found {text!r}")
    axes = tuple(_name(place, part) for part in _commas(place, left))
    return Reduce(place, axes, _name(place, right))


def _epilogue(place: Place, text: str) -> Epilogue:
    return Epilogue(place, _name(place, text) if text else "")


def _end(place: Place, text: str) -> End:
    if text not in ("dispatch", "epilogue"):
        raise place.error(f"end is of dispatch or epilogue, found {text!r}")
    return End(place, text)


_READERS: dict[str, Callable[[Place, str], Directive]] = {
    "axis": _axis,
    "reads": _access(write=False),
    "writes": _access(write=True),
    "tiles": _tiles,
    "dispatch": _dispatch,
    "reduce": _reduce,
    "epilogue": _epilogue,
    "end": _end,
}


def _pair(place: Place, text: str) -> tuple[str, str]:
    axis, equals, variable = text.partition("=")
    if not equals:
        raise place.error(f"dispatch: needs AXIS=VARIABLE, found {text!r}")
    return _name(place, axis), _name(place, variable)


def _name(place: Place, text: str) -> str:
    name = text.strip()
    if not NAME.match(name):
        raise place.error(f"needs a name, found {name!r}")
    return name


def _commas(place: Place, text: str) -> list[str]:
    """Parts between commas outside brackets; none may be empty."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    parts = [part.strip() for part in parts]
    if not all(parts):
        raise place.error(f"nothing stands before or after a comma in {text!r}")
    return parts


def _expression(place: Place, text: str) -> str:
    if len(text) > LONGEST:
        raise place.error(f"an expression has at most {LONGEST} characters, found {len(text)}")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise place.error(f"needs an arithmetic expression, found {text!r}") from error
    _check_expression(place, tree, text)
    return text


def _check_expression(place: Place, node: ast.expr, text: str) -> None:
    """Raises FormatError unless all of the tree is arithmetic over names and integers."""
    if isinstance(node, ast.Name):
        return
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        parts = [node.left, node.right]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("cdiv", "tl.cdiv"):
        parts = node.args
        if len(parts) != 2 or node.keywords:
            raise place.error(f"cdiv takes two arguments, found {text!r}")
    else:
        raise place.error(
            f"an expression is + - * // % and cdiv over parameters and integers, found {text!r}"
        )
    for part in parts:
        _check_expression(place, part, text)
