"""A kernel's text and its syntax tree: statements printed as they were written, names exchanged."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from syncopate_jax.kernel.directives import PREFIX

INDENT = "    "


@dataclass(frozen=True, slots=True)
class Text:
    """Lines of a source whose nodes count lines from 1."""

    lines: tuple[str, ...]

    @classmethod
    def of(cls, source: str) -> Text:
        return cls(tuple(source.splitlines()))

    def statements(
        self, block: Sequence[ast.stmt], names: Mapping[str, str] | None = None
    ) -> list[str]:
        """The lines of neighbouring statements, at no indentation, comments above them included."""
        found: list[str] = []
        for number, statement in enumerate(block):
            above = block[number - 1].end_lineno if number else statement.lineno - 1
            found += self._comments(above or 0, statement)
            found += self._statement(statement, names or {})
        return found

    def _comments(self, above: int, statement: ast.stmt) -> list[str]:
        """Comment lines between two statements, directives left out."""
        between = [line.strip() for line in self.lines[above : statement.lineno - 1]]
        return [x for x in between if x.startswith("#") and not _is_directive(x)]

    def _statement(self, statement: ast.stmt, names: Mapping[str, str]) -> list[str]:
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        before = self.lines[first].encode()[: statement.col_offset].decode()
        after = self.lines[last - 1].encode()[statement.end_col_offset or 0 :].decode()
        if before.strip() or (after.strip() and not after.strip().startswith("#")):
            return ast.unparse(renamed(statement, names)).splitlines()
        lines = [line.encode() for line in self.lines[first:last]]
        for node, text in _exchanged(statement, names):
            at, end = node.lineno - 1 - first, (node.end_lineno or node.lineno) - 1 - first
            rest = lines[end][node.end_col_offset :]
            lines[at : end + 1] = [lines[at][: node.col_offset] + text.encode() + rest]
        kept = [line.decode() for line in lines if not _is_directive(line.decode().strip())]
        # Lines that continue another, and comments, may be indented less than the statement.
        return [line.removeprefix(before) for line in kept]


def renamed[T: ast.AST](node: T, names: Mapping[str, str]) -> T:
    """A copy of the tree with names exchanged."""
    found = copy.deepcopy(node)
    for inner in ast.walk(found):
        if isinstance(inner, ast.Name):
            inner.id = names.get(inner.id, inner.id)
    return found


def indented(lines: Iterable[str], depth: int = 1) -> list[str]:
    """Lines moved to the right by ``depth`` levels."""
    return [INDENT * depth + line if line.strip() else "" for line in lines]


def _exchanged(statement: ast.stmt, names: Mapping[str, str]) -> list[tuple[ast.expr, str]]:
    """Nodes to print otherwise, last in the text first, so that places of the others stay true.

    Names to exchange; and strings of several lines, which would change where lines are indented.
    """
    found: list[tuple[ast.expr, str]] = []
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and node.id in names:
            found.append((node, names[node.id]))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno:
            found.append((node, ast.unparse(renamed(node, names))))
        elif not _is_text(node):
            todo += ast.iter_child_nodes(node)
    return sorted(found, key=lambda one: (one[0].lineno, one[0].col_offset), reverse=True)


def _is_text(node: ast.AST) -> bool:
    """A docstring, which means nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_directive(line: str) -> bool:
    return line.startswith("#") and line.removeprefix("#").strip().startswith(PREFIX)


def fitted(line: str, width: int = 100) -> list[str]:
    """A line as several that are no wider than ``width``, where its outermost call can be split."""
    text = line.strip()
    indent = line[: len(line) - len(line.lstrip())]
    call = None if len(line) <= width else _outermost_call(text)
    if call is None:
        return [line]
    given = [*call.args, *call.keywords]
    parts = [ast.get_source_segment(text, part) or ast.unparse(part) for part in given]
    start = text.encode()[: call.func.end_col_offset].decode() + "("
    end = ")" + text.encode()[call.end_col_offset :].decode()
    joined = f"{indent}{INDENT}{', '.join(parts)}"
    if len(joined) <= width:
        return [indent + start, joined, indent + end]
    inner = [found for part in parts for found in fitted(f"{indent}{INDENT}{part},", width)]
    return [indent + start, *inner, indent + end]


def _outermost_call(text: str) -> ast.Call | None:
    """The widest call with arguments in a statement, a loop's header or an argument."""
    for form in (text, text + " pass", text.removesuffix(",")):
        try:
            tree = ast.parse(form)
        except SyntaxError:
            continue
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and (n.args or n.keywords)]
        one_line = [n for n in calls if n.lineno == n.end_lineno == 1]
        return max(one_line, key=lambda n: (n.end_col_offset or 0) - n.col_offset, default=None)
    return None
