"""What the shardings in a StableHLO program imply: of its contractions, and where they change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from syncopate_jax.errors import InputError
from syncopate_jax.importers.dot_formula import MAX_NDIM, dot_formula
from syncopate_jax.importers.hlo_ops import HloGraph, HloOp
from syncopate_jax.importers.hlo_pairs import Uses
from syncopate_jax.importers.program import ImportedCollective, from_moves
from syncopate_jax.importers.replica_groups import NamedMesh
from syncopate_jax.importers.resharding import reshard, with_shapes
from syncopate_jax.importers.shardings import Derived, derive
from syncopate_jax.importers.stated_shardings import CONSTRAINT, Stated


@dataclass(slots=True)
class Implied:
    """What the shardings of a program imply.

    Attributes:
      contractions: what each contraction does, by name.
      collectives: the moves of contractions, and of values that are resharded elsewhere.
      left: contractions and reshardings left alone, with the reason.
    """

    contractions: list[tuple[str, Derived]] = field(default_factory=list)
    collectives: list[ImportedCollective] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)


def find_implied(graph: HloGraph, uses: Uses) -> Implied:
    """The contractions and reshardings of a program that the partitioner has not seen yet."""
    implied = Implied()
    if not graph.meshes or not any("sharding" in op.texts for op in graph.every()):
        return implied
    finder = _Finder(graph, uses, Stated(graph, uses), implied)
    for op in graph.every():
        if op.opcode == "dot":
            finder.contraction(op)
    for op in graph.every():
        if op.opcode == CONSTRAINT and (op.computation, op.name) not in finder.taken:
            finder.resharding(op)
    return implied


@dataclass(slots=True)
class _Finder:
    graph: HloGraph
    uses: Uses
    stated: Stated
    implied: Implied
    taken: set[tuple[str, str]] = field(default_factory=set)  # constraints that contractions do

    def contraction(self, dot: HloOp) -> None:
        if dot.computation in self.stated.local:
            return
        name = f"{dot.computation}:{dot.name}"
        try:
            derived, mesh = self._derive(dot)
        except InputError as error:
            self.implied.left.append((dot.name, str(error)))
            return
        self.implied.contractions.append((name, derived))
        dtypes = dict.fromkeys(("lhs", "rhs"), dot.operand_types[0].dtype)
        dtypes["out"] = dot.types[0].dtype
        notes = (("line", str(dot.line)),)
        self.implied.collectives += from_moves(name, derived, mesh, dtypes, notes)

    def resharding(self, op: HloOp) -> None:
        """The moves of a constraint whose operand is sharded in another way."""
        try:
            before = self.stated.of(op.computation, op.operands[0]) if op.operands else None
            after = self.stated.own(op)
        except InputError as error:
            self.implied.left.append((op.name, str(error)))
            return
        if before is None or after is None:
            return  # what is open says nothing
        shape = op.types[0].shape if op.types else ()
        ndim = len(shape)
        if not ndim:
            return  # a scalar is whole everywhere
        letters = "abcdefgh"[:ndim]
        sizes = dict(before.mesh.axes)
        reason = ""
        if before.mesh != after.mesh:
            reason = f"it moves from mesh {before.mesh_name} to mesh {after.mesh_name}"
        elif ndim > MAX_NDIM:
            reason = f"it has {ndim} dimensions, at most {MAX_NDIM} are read"
        elif not len(before.entries) == len(after.entries) == ndim:
            found = f"{len(before.entries)} and {len(after.entries)}"
            reason = f"its shardings have {found} dimensions, its array {ndim}"
        if reason:
            self.implied.left.append((op.name, reason))
            return
        held, wanted = (dict(zip(letters, s.entries, strict=True)) for s in (before, after))
        first, last = (
            [math.prod(sizes[axis] for axis in names) for names in one.entries]
            for one in (before, after)
        )
        if any(n % a or n % b for n, a, b in zip(shape, first, last, strict=True)):
            reason = f"its shape {shape} is not divisible by {first} and {last} ranks"
            self.implied.left.append((op.name, reason))
            return
        local = tuple(n // ranks for n, ranks in zip(shape, first, strict=True))
        moves, _ = with_shapes(reshard("lhs", letters, held, wanted), letters, local, sizes)
        alone = Derived(letters, "", "", before.mesh.axes, moves, (), None, ())
        name, dtypes = f"{op.computation}:{op.name}", {"lhs": op.types[0].dtype}
        notes = (("line", str(op.line)),)
        self.implied.collectives += from_moves(name, alone, before.mesh, dtypes, notes)

    def _derive(self, dot: HloOp) -> tuple[Derived, NamedMesh]:
        """What a contraction does, with the reshardings of its operands and result."""
        at, shapes = dot.computation, [array.shape for array in dot.operand_types]
        formula = dot_formula(dot, shapes)
        resharded = [self._resharded(at, operand) for operand in dot.operands]
        sources = [
            operand if constraint is None else constraint.operands[0]
            for operand, constraint in zip(dot.operands, resharded, strict=True)
        ]
        lhs, rhs, out = (self.stated.of(at, value) for value in (*sources, dot.name))
        missing = [w for w, s in (("lhs", lhs), ("rhs", rhs), ("result", out)) if s is None]
        if lhs is None or rhs is None or out is None:
            raise InputError(
                f"the sharding of its {' and '.join(missing)} is not in the text; import the "
                f"partitioned HLO, where the partitioner has settled it"
            )
        if not lhs.mesh == rhs.mesh == out.mesh:
            names = ", ".join(one.mesh_name for one in (lhs, rhs, out))
            raise InputError(f"its shardings are over meshes {names}; one is needed")
        sizes, pair = dict(lhs.mesh.axes), (shapes[0], shapes[1])
        derived = derive(formula, lhs.spec, rhs.spec, out.spec, shapes=pair, mesh=sizes)
        first = self._only_user(at, dot.name)
        after = first and self._only_user(at, first.name)
        if after and after.opcode == CONSTRAINT and derived.after:
            last = self.stated.own(after)
            if last is not None and last.mesh == lhs.mesh:
                # Sums that are scattered at once, and not summed onto all first, send half.
                further = derive(formula, lhs.spec, rhs.spec, last.spec, shapes=pair, mesh=sizes)
                if further.elements_sent < derived.elements_sent:
                    derived = further
                    self.taken.add((at, after.name))
        self.taken |= {(at, one.name) for one in resharded if one is not None}
        return derived, lhs.mesh

    def _resharded(self, computation: str, value: str) -> HloOp | None:
        """The constraint that reshards an operand for one contraction alone, if one does."""
        op = self.graph.ops[computation].get(value)
        if op is None or op.opcode != CONSTRAINT or not op.operands:
            return None
        if self._only_user(computation, value) is None:
            return None
        before, after = self.stated.of(computation, op.operands[0]), self.stated.own(op)
        if before is None or after is None or before.mesh != after.mesh:
            return None
        return op if before.entries != after.entries else None

    def _only_user(self, computation: str, value: str) -> HloOp | None:
        users = self.uses.get((computation, value), ())
        return users[0][0] if len(users) == 1 else None
