"""Importer of partitioned HLO and of StableHLO: its collectives, and the contractions next to them.

Reads what JAX prints: ``jit(f).lower(…).compile().as_text()`` (HLO) and ``.lower(…).as_text()``
(StableHLO with Shardy). ``docs/importers.md`` lists what is read and what is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.importers import hlo_text, stablehlo_text
from syncopate_jax.importers.exchange import PERMUTE
from syncopate_jax.importers.hlo_ops import ArrayType, HloGraph, HloOp
from syncopate_jax.importers.hlo_pairs import Uses, find_pair, find_uses
from syncopate_jax.importers.hlo_shardings import find_implied
from syncopate_jax.importers.program import ImportedCollective, ImportedProgram, Reader
from syncopate_jax.importers.replica_groups import Groups, fault, global_groups
from syncopate_jax.registry import importers

KINDS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "collective-permute": PERMUTE,
    "collective-broadcast": "broadcast",
}
REDUCTIONS = {"add": "sum", "maximum": "max"}
GSPMD = (
    "mhlo.sharding",
    "shardings of GSPMD are not read; import the partitioned HLO, or lower with "
    "jax_use_shardy_partitioner on",
)
OTHERS = {
    "ragged-all-to-all": "its counts are known only when it runs",
    "send": "sends and receives name no partner in the text",
    "recv": "sends and receives name no partner in the text",
}


def import_hlo(text: str) -> ImportedProgram:
    """The collectives of an HLO or StableHLO program, those in called computations included.

    Each has notes: the computation and line it stands in, how often the loop around it runs where
    the text says so, and shardings and metadata as printed. A collective next to a contraction has
    it as its ``pair``. StableHLO contractions between sharding annotations are in
    ``contractions``.

    Raises:
      FormatError: the text is malformed; the message has line and column.
    """
    stripped = text.lstrip()
    if not stripped:
        raise FormatError("hlo: the file is empty")
    is_mlir = re.match(r"module\b|#\w+ =", stripped) is not None
    graph = stablehlo_text.parse(text) if is_mlir else hlo_text.parse(text)
    source = "stablehlo" if is_mlir else "hlo"
    found = _Importer(graph, source, find_uses(graph), _trip_counts(graph)).program()
    if is_mlir and "mhlo.sharding" in text:
        found = replace(found, skipped=(*found.skipped, GSPMD))
    return found


importers.register("hlo")(Reader(import_hlo, "partitioned HLO or StableHLO text, as JAX prints it"))


@dataclass(slots=True)
class _Importer:
    graph: HloGraph
    source: str
    uses: Uses
    trips: Mapping[str, str]

    def program(self) -> ImportedProgram:
        found: list[ImportedCollective] = []
        skipped: list[tuple[str, str]] = []
        for op in self.graph.every():
            base = op.opcode.removesuffix("-start")
            if base in KINDS:
                found += self._collectives(op, base)
            elif op.opcode in OTHERS:
                skipped.append((op.name, OTHERS[op.opcode]))
        implied = find_implied(self.graph, self.uses)
        skipped += implied.left
        notes = [
            (f"sharding of {op.name}", op.texts["sharding"])
            for op in self.graph.every()
            if op.opcode == "parameter" and "sharding" in op.texts
        ]
        return ImportedProgram(
            name=self.graph.name,
            source=self.source,
            num_ranks=self.graph.replicas * self.graph.partitions,
            collectives=tuple(sorted((*found, *implied.collectives), key=_line)),
            contractions=tuple(implied.contractions),
            skipped=tuple(skipped),
            notes=tuple(notes),
        )

    def _collectives(self, op: HloOp, base: str) -> Iterator[ImportedCollective]:
        """One for each operand."""
        kind = KINDS[base]
        given = [self._type(op, operand) for operand in op.operands]
        if not given:
            self._fail(op, "has no operand")
        groups = self._groups(op, kind)
        if kind == "all_to_all" and len(given) > 1:
            yield self._exchange_of_tuples(op, given, groups)
            return
        for place, array in enumerate(given):
            name = op.name if len(given) == 1 else f"{op.name}#{place}"
            made = self._make(op, kind, name, array, groups)
            self._check_result(op, made, array, place, len(given))
            yield made

    def _make(
        self, op: HloOp, kind: str, name: str, array: ArrayType, groups: Groups
    ) -> ImportedCollective:
        split, concat = self._axes(op, kind)
        reduces = kind in ("reduce_scatter", "all_reduce")
        if reduces and not op.reducer:
            self._fail(op, "names no computation that reduces")
        return self._built(
            op,
            name=name,
            kind=kind,
            groups=groups,
            shape=array.shape or (1,),
            dtype=array.dtype,
            split_axis=split,
            concat_axis=concat,
            reduce=REDUCTIONS.get(op.reducer, op.reducer) if reduces else "none",
        )

    def _built(self, op: HloOp, **fields: Any) -> ImportedCollective:
        try:
            made = ImportedCollective(
                num_ranks=self.graph.replicas * self.graph.partitions,
                notes=self._notes(op),
                **fields,
            )
        except InputError as error:
            self._fail(op, str(error))
        pair = find_pair(self.graph, self.uses, op, made)
        if isinstance(pair, str):
            return replace(made, alone=pair)
        produced = pair.fused is not None and pair.fused.place == "out"
        return replace(made, pair=pair, produced=produced)

    def _exchange_of_tuples(
        self, op: HloOp, given: Sequence[ArrayType], groups: Groups
    ) -> ImportedCollective:
        """An all-to-all of one array for each member: of the stack of them along a new axis."""
        if any(array != given[0] for array in given):
            self._fail(op, f"exchanges arrays of different types: {[a.shape for a in given]}")
        if any(len(group) != len(given) for group in groups):
            self._fail(op, f"has {len(given)} operands, its groups {len(groups[0])} members")
        return self._built(
            op,
            name=op.name,
            kind="all_to_all",
            groups=groups,
            shape=(len(given), *given[0].shape),
            dtype=given[0].dtype,
            split_axis=0,
            concat_axis=0,
        )

    def _axes(self, op: HloOp, kind: str) -> tuple[int, int]:
        """The dimension that is cut and the one along which parts are joined."""
        ints = op.ints
        if kind == "all_gather":
            return -1, self._axis(op, "all_gather_dim", "dimensions")
        if kind == "reduce_scatter":
            return self._axis(op, "scatter_dimension", "dimensions"), -1
        if kind == "all_to_all":
            if "split_dimension" in ints:
                return ints["split_dimension"][0], self._axis(op, "concat_dimension")
            axis = self._axis(op, "dimensions")
            return axis, axis
        return -1, -1

    def _axis(self, op: HloOp, *keys: str) -> int:
        for key in keys:
            if key in op.ints:
                if len(op.ints[key]) != 1:
                    self._fail(op, f"needs one dimension, found {list(op.ints[key])}")
                return op.ints[key][0]
        self._fail(op, f"needs {' or '.join(keys)}")

    def _type(self, op: HloOp, operand: str) -> ArrayType:
        name, _, place = operand.partition("#")
        source = self.graph.ops[op.computation].get(name)
        if source is None or (op.operand_types and not source.types):
            # StableHLO: an argument of a region. A collective says its operands' types as well.
            return self._stated(op, op.operands.index(operand))
        at = int(place or 0)
        if source.opcode == "get-tuple-element" or len(source.types) == 1:
            at = 0
        if at >= len(source.types):
            self._fail(op, f"operand {operand} has no array")
        return source.types[at]

    def _stated(self, op: HloOp, place: int) -> ArrayType:
        if place >= len(op.operand_types):
            self._fail(op, "says no type of its operand")
        return op.operand_types[place]

    def _groups(self, op: HloOp, kind: str) -> Groups:
        replicas, partitions = self.graph.replicas, self.graph.partitions
        if kind == PERMUTE:
            if op.groups is None:
                self._fail(op, "needs source_target_pairs")
            if op.channel:
                return global_pairs(op.groups, replicas, partitions)
            return tuple(
                tuple(r * partitions + p for r in pair)
                for pair in op.groups
                for p in range(partitions)
            )
        if kind in ("all_to_all", "broadcast") and not op.global_ids:
            mode = "partition" if op.channel else "replica"
        else:
            mode = "global" if op.global_ids else "both" if op.channel else "replica"
        ids = {"global": replicas * partitions, "partition": partitions}.get(mode, replicas)
        every = kind != "broadcast"
        if op.groups and (message := fault(op.groups, ids, every=every)):
            self._fail(op, f"replica groups: {message}")
        return global_groups(op.groups or (), mode, replicas, partitions)

    def _check_result(
        self, op: HloOp, made: ImportedCollective, array: ArrayType, place: int, count: int
    ) -> None:
        """The result's type must be what the collective gives."""
        parts = op.ints.get("split_count", (made.members,))[0]
        if parts != made.members:
            self._fail(op, f"splits into {parts}, its groups have {made.members} members")
        wanted = made.result if array.shape else ()
        found = [t.shape for t in op.types]
        if op.opcode.endswith("-start"):
            fits = wanted in found
        else:
            fits = len(found) == count and found[place] == wanted
        if not fits:
            self._fail(
                op, f"of {array.dtype}{list(array.shape)} over groups of {made.members} gives "
                f"{list(wanted)}, its type says {', '.join(str(list(s)) for s in found)}"
            )  # fmt: skip

    def _notes(self, op: HloOp) -> tuple[tuple[str, str], ...]:
        found = [("computation", op.computation), ("line", str(op.line))]
        if op.computation in self.trips:
            found.append(("trip_count", self.trips[op.computation]))
        label = re.search(r'op_name="([^"]*)"', op.texts.get("metadata", ""))
        if label:
            found.append(("op_name", label[1]))
        if "sharding" in op.texts:
            found.append(("sharding", op.texts["sharding"]))
        return tuple(found)

    def _fail(self, op: HloOp, message: str) -> NoReturn:
        raise FormatError(f"{self.source}: line {op.line}: {op.opcode} {op.name}: {message}")


def _line(one: ImportedCollective) -> int:
    return int(dict(one.notes)["line"])


def _trip_counts(graph: HloGraph) -> dict[str, str]:
    """How often each loop runs, by the computation that is its body."""
    counts: dict[str, str] = {}
    for op in graph.every():
        if op.opcode == "while":
            text = op.texts.get("backend_config", "")
            found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', text)
            counts |= dict.fromkeys(op.calls, found[1] if found else "unknown")
    return counts


def global_pairs(pairs: Groups, replicas: int, partitions: int) -> Groups:
    """Source and target partitions, of each replica, as global device numbers."""
    return tuple(tuple(r * partitions + p for p in pair) for r in range(replicas) for pair in pairs)
