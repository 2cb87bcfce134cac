"""The columns that hold a plan's operations: one row an operation, sorted by rank and index."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import MAX_EXTENT

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Operations of every rank as arrays; ``n`` rows, boxes padded to ``d`` dimensions.

    Unused dimensions of a box are ``0:1``, so that products of extents stay volumes. Dependencies
    are in compressed rows: those of row i are ``dep_*[dep_start[i]:dep_start[i + 1]]``.

    Attributes:
      rank: [n] rank that lists the operation, ascending.
      kind: [n] index into ``comm.KINDS``.
      src_rank, dst_rank: [n] ends of a P2P; both the listing rank for a collective.
      src_tensor, dst_tensor: [n] index into the plan's tensors.
      src_lo, src_hi, dst_lo, dst_hi: [n, d] boxes, in elements.
      reduce: [n] index into ``comm.REDUCTIONS``.
      channel: [n] index into the plan's channels.
      group: [n] index into the plan's groups, -1 for a P2P.
      split_axis, concat_axis: [n] of a collective, -1 where unused.
      origin: [n] index into the plan's origins.
      dep_start: [n + 1]; dep_rank, dep_index: [number of operation dependencies].
      cdep_start: [n + 1]; cdep_rank, cdep_tensor: [number of compute dependencies];
        cdep_lo, cdep_hi: [number of compute dependencies, d].
    """

    rank: Array
    kind: Array
    src_rank: Array
    dst_rank: Array
    src_tensor: Array
    dst_tensor: Array
    src_lo: Array
    src_hi: Array
    dst_lo: Array
    dst_hi: Array
    reduce: Array
    channel: Array
    group: Array
    split_axis: Array
    concat_axis: Array
    origin: Array
    dep_start: Array
    dep_rank: Array
    dep_index: Array
    cdep_start: Array
    cdep_rank: Array
    cdep_tensor: Array
    cdep_lo: Array
    cdep_hi: Array

    def __post_init__(self) -> None:
        for field in fields(self):
            column = np.ascontiguousarray(_narrow(field.name, getattr(self, field.name)))
            column.setflags(write=False)
            object.__setattr__(self, field.name, column)
        self._check_lengths()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        return all(np.array_equal(getattr(self, k), getattr(other, k)) for k in self.__slots__)

    def __hash__(self) -> int:
        return hash(self.src_lo.shape)

    @property
    def n(self) -> int:
        """Number of operations."""
        return len(self.rank)

    @property
    def ndim(self) -> int:
        """Dimensions that every box is padded to."""
        return self.src_lo.shape[1]

    def _check_lengths(self) -> None:
        n, d = self.n, self.src_lo.shape[-1]
        deps, cdeps = len(self.dep_rank), len(self.cdep_rank)
        wanted: dict[str, tuple[int, ...]] = {name: (n,) for name in self.__slots__}
        wanted |= {name: (n, d) for name in ("src_lo", "src_hi", "dst_lo", "dst_hi")}
        wanted |= {"dep_start": (n + 1,), "dep_rank": (deps,), "dep_index": (deps,)}
        wanted |= {"cdep_start": (n + 1,), "cdep_rank": (cdeps,), "cdep_tensor": (cdeps,)}
        wanted |= {"cdep_lo": (cdeps, d), "cdep_hi": (cdeps, d)}
        for name, shape in wanted.items():
            found = getattr(self, name).shape
            if found != shape:
                raise InputError(f"columns: {name} has shape {found}, needs {shape}")
        for name, count in (("dep_start", deps), ("cdep_start", cdeps)):
            start = getattr(self, name)
            if start[0] != 0 or start[-1] != count or np.any(np.diff(start) < 0):
                raise InputError(f"columns: {name} must rise from 0 to {count}")

    def row_start(self, num_ranks: int) -> Array:
        """[num_ranks + 1] first row of each rank."""
        return np.searchsorted(self.rank, np.arange(num_ranks + 1)).astype(np.int64)

    def dep_row(self, num_ranks: int) -> Array:
        """[number of operation dependencies] row of each dependency; -1 where none exists."""
        start = self.row_start(num_ranks)
        known = (self.dep_rank >= 0) & (self.dep_rank < num_ranks)
        rank = np.where(known, self.dep_rank, 0)
        row = start[rank] + self.dep_index
        known &= (self.dep_index >= 0) & (row < start[rank + 1])
        return np.where(known, row, -1)

    def dep_owner(self) -> Array:
        """[number of operation dependencies] row that has each dependency."""
        return np.repeat(np.arange(self.n), np.diff(self.dep_start))

    def cdep_owner(self) -> Array:
        """[number of compute dependencies] row that has each dependency."""
        return np.repeat(np.arange(self.n), np.diff(self.cdep_start))

    def src_size(self) -> Array:
        """[n] elements each operation reads."""
        return np.prod((self.src_hi - self.src_lo).astype(np.int64), axis=1)

    def dst_size(self) -> Array:
        """[n] elements each operation writes."""
        return np.prod((self.dst_hi - self.dst_lo).astype(np.int64), axis=1)


def make_columns(n: int, ndim: int, **given: Array | int) -> Columns:
    """Columns with defaults for what is not given: P2P, no reduction, no dependencies.

    Scalars are broadcast. ``rank`` defaults to ``src_rank`` (a push). Raises InputError unless rows
    are sorted by rank and numbers fit into 32 bits.
    """
    zeros = np.zeros(n, np.int32)
    columns: dict[str, Array] = {
        "kind": zeros,
        "reduce": zeros,
        "channel": zeros,
        "origin": zeros,
        "group": np.full(n, -1, np.int32),
        "split_axis": np.full(n, -1, np.int32),
        "concat_axis": np.full(n, -1, np.int32),
        "dep_start": np.zeros(n + 1, np.int32),
        "cdep_start": np.zeros(n + 1, np.int32),
        "src_tensor": zeros,
        "dst_tensor": zeros,
    }
    columns |= dict.fromkeys(("dep_rank", "dep_index", "cdep_rank", "cdep_tensor"), zeros[:0])
    columns |= dict.fromkeys(("cdep_lo", "cdep_hi"), np.zeros((0, ndim), np.int32))
    for name, value in given.items():
        columns[name] = np.full(n, value) if np.isscalar(value) else np.asarray(value)
    columns.setdefault("rank", columns["src_rank"])
    if np.any(np.diff(columns["rank"]) < 0):
        raise InputError("columns: rows must be sorted by rank")
    return Columns(**columns)


def _narrow(name: str, given: Array) -> Array:
    """``given`` in 32 bits; raises InputError where a number does not fit into them."""
    wide = np.asarray(given)
    if wide.dtype != np.int32 and wide.size:
        astray = np.argwhere((wide < -MAX_EXTENT) | (wide > MAX_EXTENT))
        if len(astray):
            at = tuple(astray[0].tolist())
            raise InputError(
                f"columns: {name}{list(at)} is {wide[at]}, which is not in "
                f"{-MAX_EXTENT}..{MAX_EXTENT}"
            )
    return wide.astype(np.int32)
