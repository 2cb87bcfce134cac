"""Directives bound to the kernel's syntax tree: where each stands, and whether it is true there."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.kernel import directives as grammar
from syncopate_jax.kernel.annotated import (
    Annotated,
    Reduction,
    Region,
    assigned,
    blocks,
    parameters,
)
from syncopate_jax.kernel.calls import Calls, captured, inner_function
from syncopate_jax.kernel.directives import Access, Axis, Directive, Dispatch, Epilogue, Place
from syncopate_jax.kernel.stale_names import StaleNames


def plain_function(kernel: Any) -> Any:
    """The Python function inside ``triton.jit``, ``autotune`` and ``heuristics``.

    Raises InputError for what is no function, under none of these either.
    """
    function = inner_function(kernel)
    if function is None:
        raise InputError(f"a Triton kernel is a function under @triton.jit, found {kernel!r}")
    return function


def read(kernel: Any, arguments: Mapping[str, Any] | None = None) -> Annotated:
    """The annotated source of a kernel: of a file, a notebook's cell or an imported package.

    ``arguments`` are those that are compiled in, by parameter.

    Raises:
      InputError: the source, or that of a helper, cannot be found.
      FormatError: a directive is malformed or false; with file and line.
    """
    function = plain_function(kernel)
    file = function.__code__.co_filename
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise InputError(
            f"{function.__qualname__}: its source was not found ({error}); define the kernel in a "
            f"file or a notebook's cell"
        ) from error
    known = {**captured(function), **(arguments or {})}
    return read_source("".join(lines), file, max(first, 1), known)


def read_source(
    text: str, file: str = "<kernel>", first_line: int = 1, known: Mapping[str, Any] | None = None
) -> Annotated:
    """As ``read``, of a text; raises FormatError too unless it holds exactly one function.

    ``known`` is what names outside the function mean, and its arguments; calls go by their spelling
    where it does not say.
    """
    source = textwrap.dedent(text)
    found = grammar.parse(source, file, first_line)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise FormatError(f"{file}:{first_line}: no Python source: {error}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if len(functions) != 1 or len(tree.body) != 1:
        raise FormatError(f"{file}:{first_line}: needs the source of one function")
    calls = Calls(known or {})
    return _Binder(source, file, first_line, functions[0], found, calls).bind()


class _Binder:
    def __init__(
        self,
        source: str,
        file: str,
        first_line: int,
        function: ast.FunctionDef,
        found: tuple[Directive, ...],
        calls: Calls,
    ):
        self.source, self.file, self.first_line = source, file, first_line
        self.function, self.found = function, found
        self.params, self.calls = parameters(function), calls

    def bind(self) -> Annotated:
        axes, accesses = self._axes(), self._accesses()
        self._check_accesses(axes, accesses)
        dispatch = self._one(Dispatch)
        region = self._region(dispatch, "dispatch")
        loop, tile = self._tile(dispatch, region)
        self._check_map(dispatch, region, axes)
        reduction = self._reduction(dispatch, axes, tile)
        epilogue, accumulator = self._epilogue(tile)
        self._check_coverage(dispatch, axes, reduction, accesses)
        kept = self._kept(dispatch, region, loop)
        self._check_ends()
        self._check_returns(tile)
        return Annotated(
            self.file, self.first_line, self.source, self.function, axes, accesses,
            dispatch.identifiers, dispatch.axes, region, loop, tile, kept, reduction, epilogue,
            accumulator, self.calls,
        )  # fmt: skip

    def _line(self, node: ast.AST) -> int:
        return node.lineno + self.first_line - 1  # type: ignore[attr-defined]

    def _of[T](self, kind: type[T]) -> list[T]:
        return [directive for directive in self.found if isinstance(directive, kind)]

    def _one[T: Dispatch | Epilogue](self, kind: type[T]) -> T:
        found, word = self._of(kind), kind.__name__.lower()
        if not found:
            place = Place(self.file, self._line(self.function))
            raise place.error(f"kernel {self.function.name} has no {word} directive")
        if len(found) > 1:
            raise found[1].place.error(
                f"{word} is given twice, first in line {found[0].place.line}"
            )
        return found[0]

    # --- axes and accesses ---------------------------------------------------------------------

    def _axes(self) -> tuple[Axis, ...]:
        seen: dict[str, Axis] = {}
        for axis in self._of(Axis):
            if axis.name in seen:
                raise axis.place.error(
                    f"axis {axis.name} is given twice, first in line {seen[axis.name].place.line}"
                )
            for text in filter(None, (axis.extent, axis.count, axis.tile)):
                self._check_parameters(axis.place, grammar.names_in(text))
            seen[axis.name] = axis
        return tuple(seen.values())

    def _check_parameters(self, place: Place, names: set[str]) -> None:
        for name in sorted(names - set(self.params)):
            raise place.error(
                f"{name} is no parameter of {self.function.name}; its parameters are "
                f"{', '.join(self.params)}"
            )

    def _accesses(self) -> tuple[Access, ...]:
        found = self._of(Access)
        for one, other in itertools.combinations(found, 2):
            for what in ("pointer", "operand"):
                if getattr(one, what) == getattr(other, what):
                    raise other.place.error(
                        f"{what} {getattr(one, what)} is given twice, first in line "
                        f"{one.place.line}"
                    )
        return tuple(found)

    def _check_accesses(self, axes: Sequence[Axis], accesses: Sequence[Access]) -> None:
        known = [axis.name for axis in axes]
        for access in accesses:
            self._check_parameters(access.place, {access.pointer})
            for name in access.dims:
                if name is not None and name not in known:
                    raise access.place.error(
                        f"{access.pointer} follows axis {name}, which is not given; axes: "
                        f"{', '.join(known) or 'none'}"
                    )
        if not any(access.write for access in accesses):
            place = Place(self.file, self._line(self.function))
            raise place.error(f"kernel {self.function.name} has no writes directive")

    # --- regions -------------------------------------------------------------------------------

    def _at(self, place: Place) -> tuple[list[ast.stmt], int]:
        """The block a comment stands in, by its indentation, and the statement after it."""
        line = place.line - self.first_line + 1
        inner: tuple[int, list[ast.stmt]] | None = None
        for owner, block in blocks(self.function):
            head = getattr(owner, "lineno", 0)
            if (
                block[0].col_offset == place.column
                and head < line
                and (inner is None or head >= inner[0])
            ):
                inner = head, block
        if inner is None or self._cut_off(inner[1], line, place.column):
            raise place.error(
                f"the directive is indented by {place.column}, as no statement around it is"
            )
        for statement in inner[1]:
            if statement.lineno < line <= (statement.end_lineno or 0):
                raise place.error("the directive stands inside a statement; put it above or below")
        return inner[1], sum(statement.lineno < line for statement in inner[1])

    def _cut_off(self, block: list[ast.stmt], line: int, column: int) -> bool:
        """Whether the block has ended before the line."""
        end = block[-1].end_lineno or 0
        return any(
            end < node.lineno < line and node.col_offset < column
            for node in ast.walk(self.function)
            if isinstance(node, ast.stmt)
        )

    def _region(self, begin: Dispatch | Epilogue, word: str) -> Region:
        later = [
            one
            for one in self._of(grammar.End)
            if one.what == word and one.place.line > begin.place.line
        ]
        if not later:
            raise begin.place.error(f"{word} does not close: 'end {word}' is missing below")
        block, start = self._at(begin.place)
        other, stop = self._at(later[0].place)
        if other is not block:
            raise later[0].place.error(
                f"'end {word}' stands in another block than '{word}' in line {begin.place.line}"
            )
        if start == stop:
            raise begin.place.error(f"{word} encloses no statement")
        return Region(block, start, stop)

    def _check_ends(self) -> None:
        for word in ("dispatch", "epilogue"):
            ends = [end for end in self._of(grammar.End) if end.what == word]
            begun = len(self._of(Dispatch if word == "dispatch" else Epilogue))
            if len(ends) > begun:
                raise ends[begun].place.error(f"'end {word}' closes nothing")

    def _tile(self, dispatch: Dispatch, region: Region) -> tuple[ast.For | None, list[ast.stmt]]:
        block = list(region.block)
        inside = region.block is self.function.body
        tiles = self._of(grammar.Tiles)
        if len(tiles) > 1:
            raise tiles[1].place.error(f"tiles is given twice, first in line {tiles[0].place.line}")
        persistent = tiles[0].persistent if tiles else not inside
        place = tiles[0].place if tiles else dispatch.place
        loops = [n for n in self.function.body if isinstance(n, ast.For) and n.body is region.block]
        if not persistent:
            if not inside:
                raise place.error("tiles are one per program, but dispatch stands in a loop")
            return None, block
        if not loops:
            raise place.error(
                "tiles are persistent, so dispatch must stand in a 'for' loop at the top of the "
                "kernel"
            )
        if not self.calls.is_range(loops[0].iter) or not isinstance(loops[0].target, ast.Name):
            raise place.error(
                f"the loop over tiles must be 'for NAME in range(…)' or tl.range(…), found "
                f"{ast.unparse(loops[0]).splitlines()[0]!r}"
            )
        return loops[0], block

    # --- dispatch ------------------------------------------------------------------------------

    def _check_map(self, dispatch: Dispatch, region: Region, axes: Sequence[Axis]) -> None:
        known = [axis.name for axis in axes]
        inside = assigned(region.inside)
        for axis, variable in dispatch.axes:
            if axis not in known:
                raise dispatch.place.error(
                    f"dispatch maps axis {axis}, which is not given; axes: {', '.join(known)}"
                )
            if variable not in inside:
                raise dispatch.place.error(
                    f"dispatch maps axis {axis} to {variable}, which is not assigned between "
                    f"dispatch and end dispatch"
                )
        for _, group in itertools.groupby(sorted(v for _, v in dispatch.axes)):
            same = list(group)
            if len(same) > 1:
                raise dispatch.place.error(f"dispatch maps two axes to {same[0]}")
        everywhere = assigned([self.function]) | set(self.params)
        for name in dispatch.identifiers:
            if name not in everywhere:
                raise dispatch.place.error(
                    f"the tile is identified by {name}, which is not assigned in "
                    f"{self.function.name}"
                )

    def _kept(
        self, dispatch: Dispatch, region: Region, loop: ast.For | None
    ) -> tuple[ast.stmt, ...]:
        mapped = frozenset(variable for _, variable in dispatch.axes)
        names = StaleNames(self.calls, self.function, region, loop, dispatch.identifiers, mapped)
        kept, fault = names.read()
        if fault is not None:
            line, text = fault
            raise Place(self.file, line + self.first_line - 1).error(text)
        return tuple(kept)

    # --- reduction and epilogue ----------------------------------------------------------------

    def _reduction(
        self, dispatch: Dispatch, axes: Sequence[Axis], tile: Sequence[ast.stmt]
    ) -> Reduction | None:
        found = self._of(grammar.Reduce)
        if not found:
            return None
        if len(found) > 1:
            raise found[1].place.error(
                f"reduce is given twice, first in line {found[0].place.line}; one loop walks all "
                f"reduced axes"
            )
        reduce = found[0]
        known = [axis.name for axis in axes]
        parallel = dict(dispatch.axes)
        for number, axis in enumerate(reduce.axes):
            if axis not in known:
                raise reduce.place.error(
                    f"reduce names axis {axis}, which is not given; axes: {', '.join(known)}"
                )
            if axis in parallel:
                raise reduce.place.error(f"axis {axis} is reduced and mapped by dispatch")
            if axis in reduce.axes[:number]:
                raise reduce.place.error(f"reduce names axis {axis} twice")
        if list(reduce.axes) != sorted(reduce.axes, key=known.index):
            raise reduce.place.error(
                f"reduce names {', '.join(reduce.axes)}; give them in the order of their axes, the "
                f"first slowest"
            )
        block, at = self._at(reduce.place)
        loop = block[at] if at < len(block) else None
        if not isinstance(loop, ast.For) or not any(loop is one for one in tile):
            raise reduce.place.error("reduce must stand on the line above a loop of the tile")
        if not isinstance(loop.target, ast.Name) or loop.target.id != reduce.variable:
            raise reduce.place.error(
                f"reduce names {reduce.variable}, the loop's variable is {ast.unparse(loop.target)}"
            )
        step, end = self._bounds(reduce, loop)
        return Reduction(loop, reduce.axes, reduce.variable, step, end)

    def _bounds(self, reduce: grammar.Reduce, loop: ast.For) -> tuple[str, str]:
        """What the loop's variable rises by, and where it stops."""
        if not self.calls.is_range(loop.iter):
            raise reduce.place.error(
                f"the reduction must be 'for NAME in range(…)' or tl.range(…), found "
                f"{ast.unparse(loop.iter)!r}"
            )
        given = loop.iter.args  # type: ignore[attr-defined]
        start = given[0] if len(given) > 1 else ast.Constant(0)
        if not isinstance(start, ast.Constant) or start.value != 0:
            raise reduce.place.error(
                f"the reduction must start at 0, it starts at {ast.unparse(start)}"
            )
        end = given[1] if len(given) > 1 else given[0]
        step = given[2] if len(given) > 2 else ast.Constant(1)
        return ast.unparse(step), ast.unparse(end)

    def _epilogue(self, tile: Sequence[ast.stmt]) -> tuple[Region | None, str]:
        if not self._of(Epilogue):
            return None, ""
        epilogue = self._one(Epilogue)
        region = self._region(epilogue, "epilogue")
        if not tile or region.block[0] is not tile[0]:
            raise epilogue.place.error("epilogue must stand in the block of the tile's statements")
        inside = [node for statement in region.inside for node in ast.walk(statement)]
        calls = [node for node in inside if isinstance(node, ast.Call)]
        if not any(
            self.calls.name(call) == "tl.store" or self.calls.is_descriptor_store(call)
            for call in calls
        ):
            raise epilogue.place.error("epilogue encloses no tl.store, nor a descriptor's store")
        name = epilogue.accumulator
        if name and name not in assigned(region.block[: region.start]):
            raise epilogue.place.error(
                f"epilogue adds to {name}, which is not assigned in the tile above it"
            )
        return region, name

    def _check_coverage(
        self,
        dispatch: Dispatch,
        axes: Sequence[Axis],
        reduction: Reduction | None,
        accesses: Sequence[Access],
    ) -> None:
        walked = {axis for axis, _ in dispatch.axes} | set(reduction.axes if reduction else ())
        for axis in axes:
            if axis.name not in walked:
                raise axis.place.error(
                    f"axis {axis.name} is neither mapped by dispatch nor reduced"
                )
        reduced = set(reduction.axes if reduction else ())
        for access in accesses:
            for name in access.dims:
                if access.write and name in reduced:
                    raise access.place.error(
                        f"{access.pointer} is written along reduced axis {name}"
                    )

    def _check_returns(self, tile: Sequence[ast.stmt]) -> None:
        for statement in tile:
            for node in ast.walk(statement):
                if isinstance(node, ast.Return):
                    place = Place(self.file, self._line(node))
                    raise place.error("a tile's statements may not return: others come after it")
