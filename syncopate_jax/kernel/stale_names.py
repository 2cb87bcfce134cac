"""What follows from the number of a program, which says nothing of a rewritten kernel's tiles.

A rewritten kernel takes its tiles from a table: the program of a number computes others than it
would alone, there are more programs than compute, and folded ranks share one grid. So only the
statements of ``dispatch``, which are left out, and the header of the loop over tiles may go by that
number. Along an axis of the grid by which no tile is told it is 0, alone and rewritten.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from syncopate_jax.kernel.annotated import Region, assigned, used
from syncopate_jax.kernel.calls import Calls

OF_PROGRAM = (
    "what is done ahead of the tiles goes by the program's number, and a rewritten kernel's "
    "programs compute other tiles: leave it out, or do it in the tile"
)
FOLLOWS = (
    "follows from the program's number, as the tile's identifier does, and is used outside "
    "dispatch; map it to an axis or compute it from those"
)
ASKED = (
    "the program's number, or how many there are, is asked for outside dispatch, where it says "
    "nothing of the tile; use what dispatch maps to axes"
)
LAST = (
    "is read ahead of dispatch, where it is of the tile before; keep that in a variable of its "
    "own, assigned at the tile's end"
)


@dataclass(slots=True, eq=False)
class StaleNames:
    """Of one kernel.

    Attributes:
      identifiers: variables that identify a tile.
      mapped: variables that hold its index along each axis.
      axes: by name, axes of the grid along which it follows from a program's number.
    """

    calls: Calls
    function: ast.FunctionDef
    dispatch: Region
    loop: ast.For | None
    identifiers: tuple[str, ...]
    mapped: frozenset[str]
    axes: dict[str, set[int]] = field(init=False, default_factory=dict)

    def read(self) -> tuple[list[ast.stmt], tuple[int, str] | None]:
        """Statements of dispatch that tell no tiles apart and that others need; and a fault.

        The fault is a line of the kernel's text that goes by the number of its program and may not,
        and what is wrong there; None if all is well.
        """
        body, loop, dispatch = self.function.body, self.loop, self.dispatch
        first = dispatch.start if loop is None else body.index(loop)
        ahead = dispatch.block[: dispatch.start] if loop else []
        behind = [*dispatch.block[dispatch.stop :], *(body[first + 1 :] if loop else [])]
        before = [(statement, self._follow(statement)) for statement in body[:first]]
        walked = {0}.union(*(self.axes.get(name, ()) for name in self.identifiers))
        for name in (*self.identifiers, *(assigned([loop.target]) if loop else ())):
            self.axes.setdefault(name, set()).add(0)
        kept = []
        for statement in dispatch.inside:
            axes = self._follow(statement)
            walked |= axes
            if not axes and assigned([statement]) - self.mapped:
                kept.append(statement)
        if not assigned(kept) & used([*ahead, *behind]).keys():
            kept = []
        acting = [s for s, axes in before if axes & walked and _acts(s)]
        return kept, next(self._faults(acting, ahead, behind, walked), None)

    def _follow(self, statement: ast.stmt) -> set[int]:
        """Axes that a statement goes by, as do the names that it assigns."""
        found = self.calls.axes_of_programs([statement])
        found = found.union(*(self.axes.get(name, ()) for name in used([statement])))
        renewed = isinstance(statement, ast.Assign | ast.AnnAssign)
        for name in assigned([statement]):
            self.axes[name] = found | (set() if renewed else self.axes.get(name, set()))
        return found

    def _faults(
        self,
        acting: Sequence[ast.stmt],
        ahead: Sequence[ast.stmt],
        behind: Sequence[ast.stmt],
        walked: set[int],
    ) -> Iterator[tuple[int, str]]:
        for statement in acting:
            yield statement.lineno, OF_PROGRAM
        stale = {name for name, axes in self.axes.items() if axes & walked} - self.mapped
        for statement in (*ahead, *behind):
            lines = used([statement])
            for name in sorted(stale & lines.keys(), key=lambda name: (lines[name], name)):
                yield lines[name], f"{name} {FOLLOWS}"
            if self.calls.axes_of_programs([statement]) & walked:
                yield statement.lineno, ASKED
        for statement in ahead:
            for name in sorted(self.mapped & used([statement]).keys()):
                yield used([statement])[name], f"{name} {LAST}"


def _acts(statement: ast.stmt) -> bool:
    """Whether it does more than give names values."""
    return any(
        isinstance(node, ast.Return | ast.Raise)
        or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
        for node in ast.walk(statement)
    )
