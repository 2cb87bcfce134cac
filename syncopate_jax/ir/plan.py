"""A communication plan: tensors, where their data starts and must end, and each rank's operations.

Grammar (paper section 5.1; operations are in ``comm.py``)::

    plan   := Plan(name, num_ranks, tensors, initial, goals, columns, channels, groups, origins)
    tensor := Tensor(name, shape, dtype, per_rank)   every rank has a buffer of this shape
    region := Region(rank, tensor, box, produced)    data a rank holds at the start; produced: it
                                                     exists once the tiles that write it have run
    goal   := Goal(rank, tensor, box, source, source_lo, ranks, reduce)
                                                     what a rank must hold in the end

Coordinates are those of the logical tensor on every rank. A shared tensor's element at one
coordinate has one value, whichever rank holds it; a ``per_rank`` tensor's differ from rank to
rank (partial results, or private data). A goal states its value: element ``p`` of ``box`` equals
``source`` at ``p - box.lo + source_lo``, if ``source`` is per rank reduced over ``ranks`` by
``reduce``: their sum or their maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir import comm
from syncopate_jax.ir.arguments import MAX_EXTENT, dtype_name
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.columns import Columns
from syncopate_jax.ir.comm import P2P, Collective, ComputeDep, Dependency, OpDep, Operation
from syncopate_jax.ir.text_words import op_text, ranks_text, word

ITEM_SIZES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2,
    "int16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


# As NumPy has; and more than any device holds: bytes of many transfers add up in 64 bits.
MAX_NDIM, MAX_ELEMENTS = 64, 2**40
MAX_PLAN_RANKS = 2**20  # of a plan in a file: more than any system has, little enough for memory

SHOWN_LINES = 300  # of a plan that is printed


def shape_fault(shape: tuple[int, ...]) -> str:
    """Why no tensor can have this shape, in words; empty if one can."""
    if len(shape) > MAX_NDIM:
        return f"its shape has {len(shape)} dimensions, at most {MAX_NDIM} fit"
    if any(extent < 0 for extent in shape):
        return f"shape {shape} has a negative extent"
    if max(shape, default=0) > MAX_EXTENT:
        return f"shape {shape} has an extent beyond {MAX_EXTENT}"
    if math.prod(shape) > MAX_ELEMENTS:
        return f"shape {shape} has {math.prod(shape)} elements, at most {MAX_ELEMENTS} fit"
    return ""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor; each rank holds a buffer of ``shape`` (elements) for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    per_rank: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise InputError(f"tensor: name {self.name!r} must be an identifier")
        if fault := shape_fault(self.shape):
            raise InputError(f"tensor {self.name}: {fault}")
        dtype = dtype_name(self.dtype)
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            known = ", ".join(sorted(ITEM_SIZES))
            raise InputError(f"tensor {self.name}: dtype {dtype!r} is not one of {known}")
        object.__setattr__(self, "dtype", dtype)

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        return f"{self.name} [{shape}] {self.dtype}{' per_rank' * self.per_rank}"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return ITEM_SIZES[self.dtype]

    @property
    def box(self) -> Box:
        """The whole tensor."""
        return Box.full(self.shape)


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """Data that ``rank`` holds before any operation; if ``produced``, once its tiles have run."""

    rank: int
    tensor: str
    box: Box
    produced: bool = False

    def __str__(self) -> str:
        return f"r{self.rank} {self.tensor}{self.box}{' produced' * self.produced}"


@dataclass(frozen=True, slots=True, order=True)
class Goal:
    """What ``rank`` must hold in ``box`` of ``tensor`` when all operations have completed.

    The value is ``source`` (``tensor`` itself if empty) with ``box`` laid at ``source_lo``
    (``box.lo`` if empty), reduced over ``ranks`` by ``reduce``, ``sum`` or ``max``, if the source
    is per rank. Raises InputError when ``reduce`` is neither, or max over no ranks.
    """

    rank: int
    tensor: str
    box: Box
    source: str = ""
    source_lo: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    reduce: str = "sum"

    def __post_init__(self) -> None:
        known, fault = comm.REDUCTIONS[1:], ""
        if self.reduce not in known:
            fault = f"reduction {self.reduce!r} is not one of {', '.join(known)}"
        elif self.reduce != "sum" and not self.ranks:
            fault = f"is a {self.reduce} over no ranks; name the ranks, or leave out reduce"
        if fault:  # plans have many goals, and words take time
            raise InputError(f"goal {self.tensor}{self.box} of rank {self.rank}: {fault}")

    def __str__(self) -> str:
        source = f" from {self.source}" if self.source else ""
        at = f" at [{','.join(map(str, self.source_lo))}]" if self.source_lo else ""
        over = f" over {ranks_text(self.ranks)}" if self.ranks else ""
        reduce = f" {self.reduce}" if self.reduce != "sum" else ""
        return f"r{self.rank} {self.tensor}{self.box}{source}{at}{over}{reduce}"

    @property
    def source_chunk(self) -> Chunk:
        """What the goal's values are made of: its own tensor and box unless it says otherwise."""
        lo = self.source_lo or self.box.lo
        hi = tuple(a + e for a, e in zip(lo, self.box.shape, strict=True))
        return Chunk(self.source or self.tensor, Box(lo, hi))


@dataclass(frozen=True, slots=True)
class Plan:
    """A communication plan over ``num_ranks`` ranks; immutable.

    ``columns`` holds the operations (see ``columns.py``); ``ops`` and ``op`` give them as objects.
    Plans are equal where every field is, every operation among them. ``str`` is the text form
    (``text.py``), of a large plan its first lines.
    """

    name: str
    num_ranks: int
    tensors: tuple[Tensor, ...]
    initial: tuple[Region, ...]
    goals: tuple[Goal, ...]
    columns: Columns = field(repr=False)
    channels: tuple[str, ...] = (comm.DEFAULT_CHANNEL,)
    groups: tuple[tuple[int, ...], ...] = ()
    origins: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise InputError(f"plan {self.name}: needs at least 1 rank, found {self.num_ranks}")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise InputError(f"plan {self.name}: tensor names repeat: {names}")
        if len(set(self.channels)) != len(self.channels):
            raise InputError(f"plan {self.name}: channels repeat: {list(self.channels)}")
        known = set(names)
        for what, items in (("initial data", self.initial), ("goal", self.goals)):
            for item in items:
                if item.tensor not in known:
                    raise InputError(
                        f"plan {self.name}: {what} {item.tensor}{item.box} of rank {item.rank} "
                        f"names no tensor of {sorted(known)}"
                    )
        widest = max((len(tensor.shape) for tensor in self.tensors), default=0)
        if self.columns.n and self.columns.ndim < widest:
            raise InputError(
                f"plan {self.name}: boxes have {self.columns.ndim} dimensions, "
                f"a tensor has {widest}"
            )

    def __hash__(self) -> int:
        """Of what is short: plans of large groups have many goals and operations."""
        return hash((self.name, self.num_ranks, self.tensors, self.columns))

    def __str__(self) -> str:
        counts = {
            "initial regions": len(self.initial),
            "goals": len(self.goals),
            "operations": self.num_ops,
        }
        if sum(counts.values()) <= SHOWN_LINES:
            return "\n".join(self.lines())
        rest = ", ".join(f"{count} {what}" for what, count in counts.items())
        return "\n".join([*self._head(), f"# {rest}: syncopate_jax.ir.text.to_text writes them"])

    @property
    def num_ops(self) -> int:
        """Number of operations of all ranks."""
        return self.columns.n

    def tensor(self, name: str) -> Tensor:
        """The tensor called ``name``; raises InputError when there is none."""
        return self.tensors[self.tensor_index(name)]

    def tensor_index(self, name: str) -> int:
        """Position of the tensor called ``name``; raises InputError when there is none."""
        for i, tensor in enumerate(self.tensors):
            if tensor.name == name:
                return i
        known = [tensor.name for tensor in self.tensors]
        raise InputError(f"plan {self.name}: no tensor {name!r}; its tensors are {known}")

    def has_collectives(self) -> bool:
        """Whether any operation is a collective."""
        return bool(np.any(self.columns.kind != 0))

    def ops(self, rank: int) -> Iterator[Operation]:
        """The operations that ``rank`` lists, in order, as objects."""
        lo, hi = np.searchsorted(self.columns.rank, (rank, rank + 1))
        return (self.row(i) for i in range(lo, hi))

    def op(self, rank: int, index: int) -> Operation:
        """Operation ``index`` of ``rank``; raises InputError when there is none."""
        lo, hi = np.searchsorted(self.columns.rank, (rank, rank + 1))
        if not 0 <= index < hi - lo:
            raise InputError(f"plan {self.name}: rank {rank} has {hi - lo} operations, no {index}")
        return self.row(int(lo) + index)

    def row(self, i: int) -> Operation:
        """The operation in row ``i`` of the columns."""
        c = self.columns
        shared = {
            "rank": int(c.rank[i]),
            "src": self._chunk(c.src_tensor[i], c.src_lo[i], c.src_hi[i]),
            "dst": self._chunk(c.dst_tensor[i], c.dst_lo[i], c.dst_hi[i]),
            "deps": self._deps(i),
            "reduce": comm.REDUCTIONS[c.reduce[i]],
            "channel": self.channels[c.channel[i]],
            "origin": self.origins[c.origin[i]],
        }
        if c.kind[i] == 0:
            return P2P(src_rank=int(c.src_rank[i]), dst_rank=int(c.dst_rank[i]), **shared)
        return Collective(
            kind=comm.KINDS[c.kind[i]],
            ranks=self.groups[c.group[i]],
            split_axis=int(c.split_axis[i]),
            concat_axis=int(c.concat_axis[i]),
            **shared,
        )

    def with_columns(self, columns: Columns, **changes: Any) -> Plan:
        """This plan with other operations (and other fields, by name)."""
        return replace(self, columns=columns, **changes)

    def lines(self) -> Iterator[str]:
        """The lines of the text form, whose grammar is in ``text.py``."""
        yield from self._head()
        yield from self._table_lines()
        yield from (f"initial {region}" for region in self.initial)
        yield from (f"goal {goal}" for goal in self.goals)
        for rank in range(self.num_ranks):
            for index, op in enumerate(self.ops(rank)):
                yield f"r{rank}.{index} {op_text(op)}"

    def tables(self) -> tuple[tuple[str, Sequence[object]], ...]:
        """What operations name by number: each table's name and entries."""
        return ("channels", self.channels), ("groups", self.groups), ("origins", self.origins)

    def _head(self) -> Iterator[str]:
        widest = max((len(tensor.shape) for tensor in self.tensors), default=0)
        dims = "" if self.columns.ndim == widest else f" dims {self.columns.ndim}"
        yield f"plan {word(self.name)} ranks {self.num_ranks}{dims}"
        yield from (f"tensor {tensor}" for tensor in self.tensors)

    def _table_lines(self) -> Iterator[str]:
        """Tables whose order is not that of first use."""
        c = self.columns
        columns = (c.channel, c.group[c.group >= 0], c.origin)
        defaults: tuple[list[object], ...] = ([comm.DEFAULT_CHANNEL], [], [""])
        for (what, names), column, default in zip(self.tables(), columns, defaults, strict=True):
            used = [names[i] for i in dict.fromkeys(column.tolist())] or default
            if list(names) != used:
                for name in names:
                    shown = ranks_text(name) if isinstance(name, tuple) else word(str(name))
                    yield f"{what[:-1]} {shown}"

    def _chunk(self, tensor: int, lo: np.ndarray, hi: np.ndarray) -> Chunk:
        found = self.tensors[tensor]
        d = len(found.shape)
        return Chunk(found.name, Box(tuple(lo[:d].tolist()), tuple(hi[:d].tolist())))

    def _deps(self, i: int) -> tuple[Dependency, ...]:
        c = self.columns
        on_ops = range(c.dep_start[i], c.dep_start[i + 1])
        on_tiles = range(c.cdep_start[i], c.cdep_start[i + 1])
        return (
            *(OpDep(int(c.dep_rank[j]), int(c.dep_index[j])) for j in on_ops),
            *(
                ComputeDep(
                    int(c.cdep_rank[j]),
                    self._chunk(c.cdep_tensor[j], c.cdep_lo[j], c.cdep_hi[j]),
                )
                for j in on_tiles
            ),
        )


def pad_box(box: Box, ndim: int) -> tuple[list[int], list[int]]:
    """``lo`` and ``hi`` of ``box`` padded with ``0:1`` to ``ndim`` dimensions."""
    extra = ndim - box.ndim
    return [*box.lo, *[0] * extra], [*box.hi, *[1] * extra]
