"""How the values of a StableHLO program are sharded, as far as its text says.

Arguments, results and constraints have their shardings printed. What is passed to a function, into
a loop or out of it, transposed or cast is sharded as it was. All else is the partitioner's choice,
and is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jax.sharding import PartitionSpec

from syncopate_jax.errors import InputError
from syncopate_jax.importers.hlo_ops import HloGraph, HloOp
from syncopate_jax.importers.hlo_pairs import Uses
from syncopate_jax.importers.replica_groups import NamedMesh

CONSTRAINT = "sdy.sharding-constraint"
MANUAL = "sdy.manual-computation"
_SHARDING = re.compile(r"<@([\w.$\-]+), \[(.*?)\](?:, replicated=\{[^{}]*\})?>")
_DIM = re.compile(r"\{([^{}]*)\}")
_SAME = ("convert", "optimization-barrier")
MAX_DEPTH = 64  # of calls, loops and casts between a value and what says how it is sharded

Entries = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """A mesh, by name, and the axes of each dimension, the slowest first."""

    mesh_name: str
    mesh: NamedMesh
    entries: Entries

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*self.entries)


class _Pending:
    """Of a value that a loop leads back to: what it is sharded as depends on itself alone."""


_PENDING = _Pending()
_Found = Sharding | _Pending | None


@dataclass(slots=True)
class Stated:
    """The shardings that a program's text says.

    Attributes:
      graph, uses: of the program.
      local: the computations in which all mesh axes are manual: arrays there are one rank's.
    """

    graph: HloGraph
    uses: Uses
    local: set[str] = field(default_factory=set)
    _known: dict[tuple[str, str], _Found] = field(default_factory=dict)
    _callers: dict[str, list[HloOp]] = field(default_factory=dict)
    _depth: int = 0

    def __post_init__(self) -> None:
        for op in self.graph.every():
            for name in op.calls:
                self._callers.setdefault(name, []).append(op)
        self._find_local()

    def of(self, computation: str, value: str) -> Sharding | None:
        """The sharding of a value, None where the text does not say it.

        Raises InputError when it is said in a way that is not understood.
        """
        found = self._of(computation, value)
        return None if isinstance(found, _Pending) else found

    def own(self, op: HloOp) -> Sharding | None:
        """The sharding printed at an operation."""
        return self._read(op.texts["sharding"]) if "sharding" in op.texts else None

    def _find_local(self) -> None:
        inner: dict[str, list[str]] = {}
        for name in self.graph.ops:
            inner.setdefault(name.rpartition("/")[0], []).append(name)
        queue = [name for name in self.graph.ops if self._all_manual(name)]
        for name in queue:
            if name in self.local:
                continue
            self.local.add(name)
            queue += inner.get(name, [])
            for called in (c for op in self.graph.ops[name].values() for c in op.calls):
                if all(op.computation in self.local for op in self._callers[called]):
                    queue.append(called)

    def _all_manual(self, computation: str) -> bool:
        calls = self._callers.get(computation, [])
        if len(calls) != 1 or calls[0].opcode != MANUAL:
            return False
        name = re.search(r"<@([\w.$\-]+)", calls[0].texts["in_shardings"])
        mesh = self.graph.meshes.get(name[1]) if name else None
        return mesh is None or {a for a, _ in mesh.axes} <= self._manual(computation)

    def _manual(self, computation: str) -> set[str]:
        """The axes that are manual in a computation, or in one around it."""
        found: set[str] = set()
        while computation:
            for op in self._callers.get(computation, ()):
                if op.opcode == MANUAL:
                    found.update(re.findall(r'"([^"]*)"', op.texts["manual_axes"]))
            computation = computation.rpartition("/")[0]
        return found

    def _of(self, computation: str, value: str) -> _Found:
        around, _, name = value.rpartition(":")
        key = (around or computation, name)
        if key not in self._known:
            if self._depth == MAX_DEPTH:
                return None
            self._depth += 1
            self._known[key] = _PENDING
            found = self._look(*key)
            del self._known[key]
            self._depth -= 1
            if isinstance(found, _Pending) and self._depth:
                return found  # once more when what is above is known
            self._known[key] = found
        return self._known[key]

    def _look(self, computation: str, value: str) -> _Found:
        name, _, place = value.partition("#")
        op = self.graph.ops[computation].get(name)
        if op is None:
            return None
        if "sharding" in op.texts:
            return self.own(op)
        if op.opcode == "parameter":
            return _agreed(self._given(computation, op.ints["index"][0]))
        if op.opcode in ("call", "while") and op.calls:
            return self._returned(op.calls[0], int(place or 0))
        uses = self.uses.get((computation, name), ())
        users = [user for user, at in uses if user.operands[at] == value]
        after = [user for user in users if user.opcode == CONSTRAINT]
        if after and (op.opcode == "dot" or len(users) == 1):
            return self.own(after[0])
        if op.opcode in (*_SAME, "transpose") and int(place or 0) < len(op.operands):
            return self._through(op, op.operands[int(place or 0)])
        return None

    def _given(self, computation: str, index: int) -> Iterator[_Found]:
        """What is passed to a computation's argument: by each call, or into and round a loop."""
        for op in self._callers.get(computation, ()):
            if op.opcode == MANUAL:
                yield self._inside(op, index)
            elif index < len(op.operands):
                yield self._of(op.computation, op.operands[index])
            if op.opcode == "while":
                yield self._returned(op.calls[0], index)

    def _returned(self, computation: str, index: int) -> _Found:
        root = self.graph.ops[computation].get(self.graph.roots.get(computation, ""))
        if root is None or index >= len(root.operands):
            return None
        return self._of(computation, root.operands[index])

    def _inside(self, op: HloOp, index: int) -> Sharding | None:
        """An argument of a manual computation: cut by what is not manual in it."""
        texts = [found[0] for found in _SHARDING.finditer(op.texts["in_shardings"])]
        if index >= len(texts) or op.calls[0] in self.local:
            return None
        found, manual = self._read(texts[index]), self._manual(op.calls[0])
        entries = tuple(tuple(a for a in axes if a not in manual) for axes in found.entries)
        return replace(found, entries=entries)

    def _through(self, op: HloOp, operand: str) -> _Found:
        before = self._of(op.computation, operand)
        if not isinstance(before, Sharding) or op.opcode != "transpose":
            return before
        order = op.ints["dimensions"]
        if sorted(order) != list(range(len(before.entries))):
            return None
        return replace(before, entries=tuple(before.entries[d] for d in order))

    def _read(self, text: str) -> Sharding:
        """``<@mesh, [{"x"}, {}]>``."""
        found = _SHARDING.search(text)
        if found is None:
            raise InputError(f"sharding {text[:80]!r} is not understood")
        entries = []
        for dim in _DIM.findall(found[2]):
            axes = [axis.strip() for axis in dim.split(",") if axis.strip()]
            if any(not re.fullmatch(r'"[^"]*"', axis) for axis in axes):
                raise InputError(f"sharding {text[:80]!r} leaves a dimension open or cuts an axis")
            entries.append(tuple(axis[1:-1] for axis in axes))
        if found[1] not in self.graph.meshes:
            raise InputError(f"sharding {text[:80]!r} names no mesh that is known")
        mesh = self.graph.meshes[found[1]]
        left = [axis for axis, _ in mesh.axes]
        for axis in (axis for axes in entries for axis in axes):
            if axis not in left:
                known = ", ".join(axis for axis, _ in mesh.axes)
                raise InputError(
                    f"sharding {text[:80]!r} has no mesh axis {axis!r}, or has it twice; known: "
                    f"{known}"
                )
            left.remove(axis)
        return Sharding(found[1], mesh, tuple(entries))


def _agreed(given: Iterator[_Found]) -> _Found:
    """What all are, leaving out those that depend on the others alone."""
    every = list(given)
    found = [one for one in every if not isinstance(one, _Pending)]
    if not found:
        return every[0] if every else None
    return found[0] if all(one == found[0] for one in found) else None
