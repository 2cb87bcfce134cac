"""One operation of an HLO or StableHLO program: what both parsers give, and the importer reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from syncopate_jax.importers.replica_groups import Groups, NamedMesh

DTYPES = {
    "f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16",
    "s64": "int64", "s32": "int32", "s16": "int16", "s8": "int8",
    "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8",
    "u64": "uint64", "u32": "uint32", "u16": "uint16", "u8": "uint8",
    "ui64": "uint64", "ui32": "uint32", "ui16": "uint16", "ui8": "uint8",
    "pred": "bool", "i1": "bool", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
    "f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2",
}  # fmt: skip
"""Dtypes as HLO and MLIR name them; others keep the name they have there."""


@dataclass(frozen=True, slots=True)
class ArrayType:
    """Element type and extents of an array, and, if said, its dimensions from the fastest on."""

    dtype: str
    shape: tuple[int, ...]
    layout: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class HloOp:
    """One operation.

    Attributes:
      name: unique in its computation.
      opcode: as HLO spells it, such as ``all-gather``; ``-start`` is kept.
      types: of its result, the arrays of a tuple in order.
      operands: names, in order.
      ints: attributes that are integers or lists of them, by HLO's name.
      groups: of a collective, as printed; or of a permutation its pairs. None: not given.
      channel, global_ids: whether it has a channel, and ``use_global_device_ids``.
      reducer: opcode of what a reducing collective combines with.
      texts: other attributes of interest, as printed.
      calls: the computations it calls.
      operand_types: of its operands, where the text says them at the operation.
      computation: the one it stands in.
      line: in the file.
    """

    name: str
    opcode: str
    types: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    computation: str
    line: int
    ints: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    groups: Groups | None = None
    channel: bool = False
    global_ids: bool = False
    reducer: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    calls: tuple[str, ...] = ()
    operand_types: tuple[ArrayType, ...] = ()


@dataclass(frozen=True, slots=True)
class HloGraph:
    """A whole program.

    Attributes:
      name: of the module.
      replicas, partitions: how many it is for.
      ops: by computation, in order.
      entry: the computation that runs.
      roots: the name of each computation's result.
      meshes: by name.
    """

    name: str
    replicas: int
    partitions: int
    ops: Mapping[str, Mapping[str, HloOp]]
    entry: str
    roots: Mapping[str, str]
    meshes: Mapping[str, NamedMesh] = field(default_factory=dict)

    def every(self) -> Iterator[HloOp]:
        """All operations."""
        for computation in self.ops.values():
            yield from computation.values()
