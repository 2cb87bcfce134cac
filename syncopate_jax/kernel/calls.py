"""What a kernel calls: Triton's functions, by whatever name, and helpers, which are looked into."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncopate_jax.errors import InputError

UNKNOWN = object()
DESCRIBED = ("tl.make_tensor_descriptor", "tl.load_tensor_descriptor")
COUNTS_PROGRAMS = ("tl.program_id", "tl.num_programs")


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """The calls of one function.

    Attributes:
      known: what names mean that the function does not assign, see ``captured``. What is called
        goes by its spelling where this does not say.
    """

    known: Mapping[str, Any]

    def value(self, node: ast.expr) -> Any:
        """What an expression means before the kernel runs, or ``UNKNOWN``."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            return owner if owner is UNKNOWN else getattr(owner, node.attr, UNKNOWN)
        return UNKNOWN

    def name(self, call: ast.Call) -> str:
        """``tl.load`` for Triton's ``load``; what is not known goes by its spelling, and what is
        known to be another's by none."""
        found = self.value(call.func)
        if found is UNKNOWN:
            return ast.unparse(call.func)
        return f"tl.{found.__name__}" if _is_tritons(found) else ""

    def is_range(self, node: ast.expr) -> bool:
        """Whether it is a ``range`` of Python's or Triton's."""
        return (
            isinstance(node, ast.Call)
            and self.name(node) in ("range", "tl.range", "tl.static_range")
            and 1 <= len(node.args) <= 3
            and not any(isinstance(arg, ast.Starred) for arg in node.args)
        )

    def is_loop(self, statement: ast.stmt) -> bool:
        """Whether it is a loop for Triton; a static one is written out."""
        if isinstance(statement, ast.For) and isinstance(statement.iter, ast.Call):
            return self.name(statement.iter) != "tl.static_range"
        return isinstance(statement, ast.While)

    def is_descriptor_store(self, call: ast.Call) -> bool:
        """Whether the copy unit stores; a tensor's method of that name is taken for one too."""
        word = self._method(call)
        return (
            self.name(call) == "tl.store_tensor_descriptor"
            or word in ("store", "scatter")
            or word.startswith("atomic_")
        )

    def is_descriptor_use(self, call: ast.Call) -> bool:
        """Whether a descriptor is made or loaded from, wherever it comes from."""
        return self.name(call) in DESCRIBED or self._method(call) in ("load", "gather")

    def _method(self, call: ast.Call) -> str:
        """The name of a method of what only the running kernel knows."""
        func = call.func
        if not isinstance(func, ast.Attribute) or self.value(func) is not UNKNOWN:
            return ""
        return "" if self.name(call).startswith("tl.") else func.attr

    def reached(self, nodes: Sequence[ast.AST]) -> Iterator[tuple[Calls, ast.Call]]:
        """The calls in ``nodes`` and in all helpers that these lead to, with whose they are.

        Raises:
          InputError: a helper's source cannot be found.
        """
        seen: set[Any] = set()
        todo: list[tuple[Calls, Sequence[ast.AST]]] = [(self, nodes)]
        while todo:
            calls, trees = todo.pop()
            for node in (node for tree in trees for node in ast.walk(tree)):
                if isinstance(node, ast.Call):
                    yield calls, node
                    for helper in set(_helpers(calls.value(node.func))) - seen:
                        seen.add(helper)
                        tree = _tree(helper)
                        todo.append((Calls(captured(helper)), [tree]))

    def helper(self, call: ast.Call) -> tuple[Calls, ast.FunctionDef] | None:
        """The calls and the syntax tree of the helper that is called, None for all else.

        Raises:
          InputError: a helper's source cannot be found.
        """
        value = self.value(call.func)
        found = [] if inspect.isclass(value) else _helpers(value)
        return (Calls(captured(found[0])), _tree(found[0])) if found else None

    def axes_of_programs(self, nodes: Sequence[ast.AST]) -> set[int]:
        """Axes of the grid that ``nodes`` ask for a program's number, or their count."""
        found = (
            c._axis(call) for c, call in self.reached(nodes) if c.name(call) in COUNTS_PROGRAMS
        )
        return set(found)

    def _axis(self, call: ast.Call) -> int:
        """0 too where it is not known."""
        given = [*call.args, *(k.value for k in call.keywords if k.arg == "axis")]
        value = given[0].value if given and isinstance(given[0], ast.Constant) else None
        return value if isinstance(value, int) else 0


def inner_function(kernel: Any) -> Any:
    """The Python function inside ``triton.jit``, ``autotune`` and ``heuristics``, or None."""
    while kernel is not None and not inspect.isfunction(kernel):
        kernel = getattr(kernel, "fn", None)
    return kernel


def captured(function: Any) -> dict[str, Any]:
    """What the names mean that a function does not assign: its module's, and those around it."""
    own = function.__code__.co_varnames
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return {name: value for name, value in names.items() if name not in own}


def _is_tritons(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] == "triton"


def _helpers(value: Any) -> list[Any]:
    """The functions behind a value that is called: its own, or what a class has under ``jit``."""
    if value is UNKNOWN or _is_tritons(value):
        return []
    values = [value]
    if inspect.isclass(value):
        values = [v for v in vars(value).values() if hasattr(v, "fn")]
    return [found for found in map(inner_function, values) if found is not None]


@functools.cache
def _tree(function: Any) -> ast.FunctionDef:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise InputError(
            f"{function.__qualname__}, which a kernel calls: its source was not found ({error}); "
            f"define it in a file or a notebook's cell"
        ) from error
    assert isinstance(tree, ast.FunctionDef)
    return tree
