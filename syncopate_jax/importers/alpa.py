"""Importer of Alpa's plans: intra-operator strategies and sharding specs on a logical mesh.

Alpa saves plans as pickles of its own classes; the file is JSON that has their fields, and their
``repr`` where they have one (``docs/importers.md`` has the schema), or the log that Alpa prints
with ``ALPA_DEBUG_PRINT_AS_STRATEGY`` in the field ``auto_sharding_log``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.importers import hlo_text
from syncopate_jax.importers.alpa_specs import Spec, read_spec
from syncopate_jax.importers.alpa_strategies import Strategy, read_strategy
from syncopate_jax.importers.dot_formula import MAX_NDIM, dot_formula
from syncopate_jax.importers.hlo_ops import HloOp
from syncopate_jax.importers.json_fields import Field, read_json
from syncopate_jax.importers.program import ImportedCollective, ImportedProgram, Reader, from_moves
from syncopate_jax.importers.replica_groups import MAX_PROGRAM_RANKS, NamedMesh, make_mesh
from syncopate_jax.importers.resharding import reshard, with_shapes
from syncopate_jax.importers.shardings import Derived, derive
from syncopate_jax.ir.plan import ITEM_SIZES
from syncopate_jax.registry import importers

HEAD = ("name", "logical_mesh_shape")
REST = ("id_mesh", "stages", "operators", "reshardings", "auto_sharding_log", "solver")
_LINE = re.compile(r"(\d{1,9}) (.*?)  +(\S.*)")
_TAILS = (re.compile(r"comm cost: [\d.]+$", re.ASCII), re.compile(r" follow \d+$", re.ASCII))


def import_alpa(text: str) -> ImportedProgram:
    """The collectives of a plan of Alpa's.

    Of each operator the contraction is derived with the cut that its strategy names, from the
    specs that its operands are held in to the one that its result is wanted in; a resharding is
    the moves from one spec to another. Stages are kept as notes.

    Raises:
      FormatError: a field is missing, unknown or malformed, or specs, strategies and shapes do not
        fit each other; the message names the field.
    """
    return _Plan.of(read_json("alpa", text)).program()


importers.register("alpa")(Reader(import_alpa, "an Alpa plan: logical mesh, specs, strategies"))


@dataclass(frozen=True, slots=True)
class _Array:
    """A tensor of an operator, and what it is sharded as; None: as the strategy needs."""

    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None


@dataclass(frozen=True, slots=True)
class _Plan:
    fields: Mapping[str, Field]
    mesh: tuple[int, ...]
    devices: NamedMesh

    @classmethod
    def of(cls, root: Field) -> _Plan:
        fields = root.fields(HEAD, REST)
        shape = fields["logical_mesh_shape"].integers(1, MAX_PROGRAM_RANKS)
        if not 1 <= len(shape) <= MAX_NDIM or math.prod(shape) > MAX_PROGRAM_RANKS:
            fields["logical_mesh_shape"].fail(f"1 to {MAX_PROGRAM_RANKS} devices in all")
        ids = None
        if "id_mesh" in fields:
            ids = _flat(fields["id_mesh"], shape)
            if sorted(ids) != list(range(len(ids))):
                fields["id_mesh"].fail("the device numbers from 0 on, each once")
        names = [(axis(d), extent) for d, extent in enumerate(shape)]
        return cls(fields, shape, make_mesh(names, ids))

    def program(self) -> ImportedProgram:
        contractions: list[tuple[str, Derived]] = []
        collectives: list[ImportedCollective] = []
        for name, derived, dtypes, notes in self._contractions():
            contractions.append((name, derived))
            collectives += from_moves(name, derived, self.devices, dtypes, notes)
        if "reshardings" in self.fields:
            for item in self.fields["reshardings"].items():
                collectives += self._resharding(item)
        return ImportedProgram(
            name=self.fields["name"].text(),
            source="alpa",
            num_ranks=math.prod(self.mesh),
            collectives=tuple(collectives),
            contractions=tuple(contractions),
            notes=tuple(self._notes()),
        )

    def _contractions(
        self,
    ) -> Iterator[tuple[str, Derived, Mapping[str, str], tuple[tuple[str, str], ...]]]:
        if "operators" in self.fields:
            for item in self.fields["operators"].items():
                yield self._operator(item)
        if "auto_sharding_log" in self.fields:
            yield from self._log(self.fields["auto_sharding_log"])
        elif "operators" not in self.fields and "reshardings" not in self.fields:
            raise FormatError("alpa: needs operators, reshardings or auto_sharding_log")

    def _operator(
        self, item: Field
    ) -> tuple[str, Derived, Mapping[str, str], tuple[tuple[str, str], ...]]:
        fields = item.fields(("name", "formula", "lhs", "rhs"), ("out", "strategy", "stage"))
        name = fields["name"].text()
        lhs, rhs = (self._array(fields[place]) for place in ("lhs", "rhs"))
        formula = fields["formula"].text()
        strategy = self._strategy(fields["strategy"]) if "strategy" in fields else None
        out = self._result(fields["out"], formula, lhs, rhs) if "out" in fields else None
        notes = [("strategy", strategy.name)] if strategy else []
        if "stage" in fields:
            notes.append(("stage", str(fields["stage"].integer())))
        try:
            derived = self._derive(formula, strategy, lhs, rhs, out)
        except InputError as error:
            raise FormatError(f"{item.path}: {error}") from error
        return name, derived, {"lhs": lhs.dtype, "rhs": rhs.dtype, "out": lhs.dtype}, tuple(notes)

    def _array(self, item: Field) -> _Array:
        fields = item.fields(("shape", "dtype"), ("sharding_spec",))
        shape = fields["shape"].integers(1)
        if not 1 <= len(shape) <= MAX_NDIM:
            fields["shape"].fail(f"1 to {MAX_NDIM} extents")
        return _Array(shape, fields["dtype"].one_of(sorted(ITEM_SIZES)), self._spec(fields, shape))

    def _spec(self, fields: Mapping[str, Field], shape: Sequence[int]) -> Spec | None:
        if "sharding_spec" not in fields:
            return None
        item = fields["sharding_spec"]
        try:
            return read_spec(item.text(), shape, self.mesh)
        except FormatError as error:
            raise FormatError(f"{item.path}: {error}") from error

    @staticmethod
    def _strategy(item: Field) -> Strategy:
        try:
            return read_strategy(item.text())
        except FormatError as error:
            raise FormatError(f"{item.path}: {error}") from error

    def _result(self, item: Field, formula: str, lhs: _Array, rhs: _Array) -> Spec:
        """The spec in which the result is wanted."""
        fields = item.fields(("sharding_spec",))
        operands, _, out = formula.replace(" ", "").partition("->")
        one, _, other = operands.partition(",")
        sizes = dict(zip(one, lhs.shape, strict=False)) | dict(zip(other, rhs.shape, strict=False))
        spec = self._spec(fields, [sizes.get(letter, 1) for letter in out])
        assert spec is not None  # the field is there
        return spec

    def _derive(
        self,
        formula: str,
        strategy: Strategy | None,
        lhs: _Array,
        rhs: _Array,
        out: Spec | None,
    ) -> Derived:
        mesh = dict(self.devices.axes)
        shapes = (lhs.shape, rhs.shape)
        if strategy is None:
            if lhs.spec is None or rhs.spec is None or out is None:
                raise InputError("needs a strategy, or the specs of both operands and the result")
            return derive(
                formula, *map(partition, (lhs.spec, rhs.spec, out)), shapes=shapes, mesh=mesh
            )
        one, other, result = split_formula(formula)
        cut = self._cut(strategy, one, other, result)
        specs = [
            partition(array.spec)
            if array.spec is not None
            else PartitionSpec(*(tuple(cut.get(x, ())) for x in letters))
            for array, letters in ((lhs, one), (rhs, other))
        ]
        scattered = dict(cut)
        if strategy.scatters:
            letter = self._roles(one, other, result)[strategy.scatters]
            scattered[letter] = (axis(strategy.by_role["contracted"]),)
        wanted = (
            partition(out)
            if out is not None
            else PartitionSpec(*(tuple(scattered.get(x, ())) for x in result))
        )
        return derive(formula, *specs, wanted, shapes=shapes, mesh=mesh, cut=cut)

    def _cut(self, strategy: Strategy, lhs: str, rhs: str, out: str) -> dict[str, tuple[str, ...]]:
        roles = self._roles(lhs, rhs, out)
        cut: dict[str, tuple[str, ...]] = {}
        for role, dim in strategy.cuts:
            if dim >= len(self.mesh):
                raise InputError(
                    f"strategy {strategy.name!r}: the logical mesh {self.mesh} has no dimension "
                    f"{dim}"
                )
            if role not in roles:
                raise InputError(f"strategy {strategy.name!r}: the contraction has no {role}")
            cut[roles[role]] = (axis(dim),)
        return cut

    @staticmethod
    def _roles(lhs: str, rhs: str, out: str) -> dict[str, str]:
        """The letter of each role: of several the first, as Alpa makes one of them."""
        found: dict[str, str] = {}
        batches = [x for x in out if x in lhs and x in rhs]
        found |= {f"batch{i}": x for i, x in enumerate(batches)}
        for role, letters in (
            ("lhs_space", [x for x in lhs if x in out and x not in rhs]),
            ("contracted", [x for x in lhs if x in rhs and x not in out]),
            ("rhs_space", [x for x in rhs if x in out and x not in lhs]),
        ):
            if letters:
                found[role] = letters[0]
        return found

    def _log(
        self, item: Field
    ) -> Iterator[tuple[str, Derived, Mapping[str, str], tuple[tuple[str, str], ...]]]:
        """The contractions of the table ``=== Auto sharding strategy ===``."""
        lines = item.text().splitlines()
        try:
            start = lines.index("=== Auto sharding strategy ===") + 1
        except ValueError:
            item.fail("the line '=== Auto sharding strategy ==='")
        chosen: list[str] = []
        code: list[str] = []
        for line in lines[start:]:
            if line.startswith(("=== ", "- ")):
                break
            found = _LINE.fullmatch(line.rstrip())
            if found is None or int(found[1]) != len(code):
                raise FormatError(
                    f"{item.path}: line {start + len(code) + 1} must be {len(code)}, an "
                    f"instruction and its strategy, found {line[:60]!r}"
                )
            code.append(found[2])
            chosen.append(_strategy_of(found[3]))
        else:
            raise FormatError(f"{item.path}: ends within its table; was the log cut?")
        # The table's lines keep their numbers: the module's head is the line of its title.
        text = "HloModule log ENTRY log { " + "\n".join(code) + "\n}"
        try:
            graph = hlo_text.parse(text)
        except FormatError as error:
            raise FormatError(f"{item.path}: in the table, {error}") from error
        ops = graph.ops.get("log", {})
        if len(ops) != len(chosen) or len(graph.ops) != 1:
            raise FormatError(f"{item.path}: its table needs one instruction a line")
        for op, name in zip(ops.values(), chosen, strict=True):
            if op.opcode == "dot":
                yield self._logged(item, op, ops, name)

    def _logged(
        self, item: Field, op: HloOp, ops: Mapping[str, HloOp], name: str
    ) -> tuple[str, Derived, Mapping[str, str], tuple[tuple[str, str], ...]]:
        arrays = [ops[operand].types[0] for operand in op.operands if ops[operand].types]
        if len(arrays) != len(op.operands):
            raise FormatError(f"{item.path}: dot {op.name}: an operand is no array")
        try:
            formula = dot_formula(op, [array.shape for array in arrays])
        except InputError as error:
            raise FormatError(f"{item.path}: {error}") from error
        lhs, rhs = (_Array(array.shape, array.dtype, None) for array in arrays)
        try:
            derived = self._derive(formula, read_strategy(name), lhs, rhs, None)
        except (FormatError, InputError) as error:
            raise FormatError(f"{item.path}: dot {op.name}: {error}") from error
        dtypes = {"lhs": lhs.dtype, "rhs": rhs.dtype, "out": lhs.dtype}
        return op.name, derived, dtypes, (("strategy", name),)

    def _resharding(self, item: Field) -> list[ImportedCollective]:
        fields = item.fields(("name", "shape", "dtype", "src", "dst"), ("stage",))
        shape = fields["shape"].integers(1)
        if not 1 <= len(shape) <= MAX_NDIM:
            fields["shape"].fail(f"1 to {MAX_NDIM} extents")
        letters = "abcdefgh"[: len(shape)]
        held, wanted = (
            self._spec({"sharding_spec": fields[side]}, shape) or () for side in ("src", "dst")
        )
        before, after = (
            {x: tuple(axis(d) for d in dims) for x, dims in zip(letters, spec, strict=True)}
            for spec in (held, wanted)
        )
        mesh = dict(self.devices.axes)
        local = tuple(
            extent // math.prod(self.mesh[d] for d in dims)
            for extent, dims in zip(shape, held, strict=True)
        )
        moves, _ = with_shapes(reshard("lhs", letters, before, after), letters, local, mesh)
        # Only letters and moves are read: a resharding stands alone.
        derived = Derived(letters, "", "", self.devices.axes, moves, (), None, ())
        dtype = fields["dtype"].one_of(sorted(ITEM_SIZES))
        notes = (("stage", str(fields["stage"].integer())),) if "stage" in fields else ()
        return from_moves(fields["name"].text(), derived, self.devices, {"lhs": dtype}, notes)

    def _notes(self) -> Iterator[tuple[str, str]]:
        yield "logical_mesh_shape", str(self.mesh)
        if "stages" in self.fields:
            for i, item in enumerate(self.fields["stages"].items()):
                known = ("layers", "submesh_physical_shape", "submesh_logical_shape", "name")
                fields = item.fields((), known)
                yield f"stage {i}", " ".join(f"{k}={_words(f.value)}" for k, f in fields.items())
        if "solver" in self.fields:
            for key, item in self.fields["solver"].members().items():
                yield f"solver {key}", _words(item.value)


def axis(dim: int) -> str:
    """Name of a logical mesh dimension."""
    return f"mesh{dim}"


def partition(spec: Spec) -> PartitionSpec:
    """The same as JAX says it."""
    return PartitionSpec(*(tuple(axis(d) for d in dims) for dims in spec))


def split_formula(formula: str) -> tuple[str, str, str]:
    """Letters of both operands and of the result; raises InputError when there are not three."""
    found = re.fullmatch(r"([a-z]+),([a-z]+)->([a-z]*)", formula.replace(" ", ""))
    if found is None:
        raise InputError(f"formula {formula[:60]!r}: needs the form 'bmk,kn->bmn'")
    return found[1], found[2], found[3]


def _flat(item: Field, shape: Sequence[int]) -> tuple[int, ...]:
    """Integers nested as deep as ``shape``, whose lists are as long as it says."""
    if not shape:
        return (item.integer(),)
    rows = item.items()
    if len(rows) != shape[0]:
        item.fail(f"a list of {shape[0]}")
    return tuple(n for row in rows for n in _flat(row, shape[1:]))


def _strategy_of(text: str) -> str:
    """The strategy's name without what the table has after it."""
    for tail in _TAILS:
        text = tail.sub("", text.rstrip())
    return text.rstrip()


def _words(value: Any) -> str:
    return str(value)[:200]
