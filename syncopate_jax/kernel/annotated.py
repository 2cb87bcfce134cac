"""An annotated kernel: its syntax tree, and which part of it each directive speaks of."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from syncopate_jax.kernel.calls import Calls
from syncopate_jax.kernel.directives import Access, Axis


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Statements ``start`` to ``stop`` of a block."""

    block: Sequence[ast.stmt]
    start: int
    stop: int

    @property
    def inside(self) -> Sequence[ast.stmt]:
        return self.block[self.start : self.stop]


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """The loop that walks ``axes``, the first slowest; its variable counts from 0 by ``step``.

    Attributes:
      step: source of what the variable rises by, ``1`` where it counts steps.
      end: source of where it stops.
    """

    loop: ast.For
    axes: tuple[str, ...]
    variable: str
    step: str
    end: str


@dataclass(frozen=True, slots=True, eq=False)
class Annotated:
    """A kernel's source with its directives, each bound to a part of the syntax tree.

    Attributes:
      file, first_line: where ``source`` comes from.
      source: the function's text, dedented.
      function: its tree; line numbers count from 1 in ``source``.
      axes: in the order in which tiles are numbered, row-major.
      dispatch: statements that compute the axes' variables.
      loop: the loop over tiles of a persistent kernel, else None.
      tile: the statements of a tile, those of ``dispatch`` among them.
      kept: statements of ``dispatch`` that do not depend on the tile and are used elsewhere.
      reduction: the loop inside a tile, or None.
      epilogue: the statements that store a tile, or None.
      accumulator: what partial results are added to, or empty.
      calls: what the kernel calls.
    """

    file: str
    first_line: int
    source: str
    function: ast.FunctionDef
    axes: tuple[Axis, ...]
    accesses: tuple[Access, ...]
    identifiers: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    dispatch: Region
    loop: ast.For | None
    tile: Sequence[ast.stmt]
    kept: tuple[ast.stmt, ...]
    reduction: Reduction | None
    epilogue: Region | None
    accumulator: str
    calls: Calls

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def parameters(self) -> tuple[str, ...]:
        return parameters(self.function)

    @property
    def reduced(self) -> tuple[str, ...]:
        """Axes that a tile walks."""
        return self.reduction.axes if self.reduction else ()


def parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    """Names of a function's parameters, in order."""
    given = function.args
    return tuple(arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs))


def assigned(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that are assigned anywhere in ``nodes``."""
    return {
        node.id
        for top in nodes
        for node in ast.walk(top)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def used(nodes: Sequence[ast.AST]) -> dict[str, int]:
    """Names that are read anywhere in ``nodes``, and the first line that does."""
    found: dict[str, int] = {}
    for top in nodes:
        for node in ast.walk(top):
            name = node.target if isinstance(node, ast.AugAssign) else node
            augmented = isinstance(node, ast.AugAssign)
            if isinstance(name, ast.Name) and (augmented or isinstance(name.ctx, ast.Load)):
                found[name.id] = min(found.get(name.id, name.lineno), name.lineno)
    return found


def blocks(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """Every block of statements and what it belongs to, outermost first."""
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield node, block
