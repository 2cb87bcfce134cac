"""Building a plan from operation objects, as hand-written plans and importers do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir import comm
from syncopate_jax.ir.arguments import MAX_EXTENT
from syncopate_jax.ir.chunk import Chunk
from syncopate_jax.ir.columns import Columns
from syncopate_jax.ir.comm import P2P, Dependency, OpDep, Operation
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor, pad_box


def build_plan(
    name: str,
    num_ranks: int,
    tensors: Sequence[Tensor],
    initial: Sequence[Region],
    goals: Sequence[Goal],
    ops: Sequence[Sequence[Operation]],
    *,
    channels: Sequence[str] = (),
    groups: Sequence[tuple[int, ...]] = (),
    origins: Sequence[str] = (),
    ndim: int | None = None,
) -> Plan:
    """A plan from operation objects, ``ops[rank]`` being that rank's list in issue order.

    ``channels``, ``groups`` and ``origins`` come first in the plan's tables, in that order, whether
    used or not; others follow in order of first use. Boxes are padded to ``ndim`` dimensions, those
    of the widest tensor if None.

    Raises InputError when an operation names a tensor the plan lacks, has a box of other rank
    than its tensor or a number beyond 32 bits, or sits in another rank's list, or when ``ndim`` is
    too small for a tensor.
    Everything else is ``check.verify``'s to find.
    """
    if len(ops) != num_ranks:
        raise InputError(f"plan {name}: {num_ranks} ranks need as many lists, found {len(ops)}")
    widest = max((len(tensor.shape) for tensor in tensors), default=0)
    if ndim is not None and ndim < widest:
        raise InputError(f"plan {name}: boxes of {ndim} dimensions, a tensor has {widest}")
    builder = _Builder(name, num_ranks, tuple(tensors), tuple(initial), tuple(goals))
    builder.ndim = widest if ndim is None else ndim
    builder.channels |= {channel: i for i, channel in enumerate(dict.fromkeys(channels))}
    builder.groups |= {group: i for i, group in enumerate(dict.fromkeys(groups))}
    builder.origins |= {origin: i for i, origin in enumerate(dict.fromkeys(origins))}
    return builder.build(ops)


class _Builder:
    """Turns operation objects into columns."""

    def __init__(
        self,
        name: str,
        num_ranks: int,
        tensors: tuple[Tensor, ...],
        initial: tuple[Region, ...],
        goals: tuple[Goal, ...],
    ):
        self.head = (name, num_ranks, tensors, initial, goals)
        self.index = {tensor.name: i for i, tensor in enumerate(tensors)}
        self.tensors = tensors
        self.ndim = 0
        self.channels: dict[str, int] = {}
        self.groups: dict[tuple[int, ...], int] = {}
        self.origins: dict[str, int] = {}
        self.group: tuple[tuple[int, ...] | None, int] = (None, -1)  # the last operation's
        self.columns: dict[str, list[Any]] = {name: [] for name in Columns.__slots__}

    def build(self, ops: Sequence[Sequence[Operation]]) -> Plan:
        self.columns["dep_start"].append(0)
        self.columns["cdep_start"].append(0)
        for rank, listed in enumerate(ops):
            for index, op in enumerate(listed):
                if op.rank != rank:
                    raise InputError(
                        f"plan {self.head[0]}: op {index} in the list of rank {rank} "
                        f"says rank {op.rank}"
                    )
                self._add(op, f"plan {self.head[0]}: rank {rank} op {index}")
        boxes = ("src_lo", "src_hi", "dst_lo", "dst_hi", "cdep_lo", "cdep_hi")
        arrays = {
            key: np.array(rows, np.int32).reshape(len(rows), self.ndim if key in boxes else 1)
            for key, rows in self.columns.items()
        }
        return Plan(
            *self.head,
            columns=Columns(**{k: v if k in boxes else v[:, 0] for k, v in arrays.items()}),
            channels=tuple(self.channels) or (comm.DEFAULT_CHANNEL,),
            groups=tuple(self.groups),
            origins=tuple(self.origins) or ("",),
        )

    def _add(self, op: Operation, where: str) -> None:
        put = self._put
        put("rank", op.rank)
        put("reduce", _position(comm.REDUCTIONS, op.reduce, where, "reduction"))
        put("channel", self.channels.setdefault(op.channel, len(self.channels)))
        put("origin", self.origins.setdefault(op.origin, len(self.origins)))
        for side, chunk in (("src", op.src), ("dst", op.dst)):
            tensor, lo, hi = self._chunk(chunk, where)
            put(f"{side}_tensor", tensor)
            put(f"{side}_lo", lo)
            put(f"{side}_hi", hi)
        if isinstance(op, P2P):
            _check_fits(where, "it", (op.src_rank, op.dst_rank))
            put("kind", 0)
            put("src_rank", op.src_rank)
            put("dst_rank", op.dst_rank)
            extra = (-1, -1, -1)
        else:
            _check_fits(where, "it", (op.split_axis, op.concat_axis))
            put("kind", _position(comm.KINDS, op.kind, where, "kind"))
            put("src_rank", op.rank)
            put("dst_rank", op.rank)
            if op.ranks is not self.group[0]:  # a look-up reads all of the group
                self.group = op.ranks, self.groups.setdefault(op.ranks, len(self.groups))
            extra = (self.group[1], op.split_axis, op.concat_axis)
        for key, value in zip(("group", "split_axis", "concat_axis"), extra, strict=True):
            put(key, value)
        for dep in op.deps:
            self._add_dep(dep, where)
        put("dep_start", len(self.columns["dep_rank"]))
        put("cdep_start", len(self.columns["cdep_rank"]))

    def _add_dep(self, dep: Dependency, where: str) -> None:
        if isinstance(dep, OpDep):
            _check_fits(where, dep, (dep.rank, dep.index))
            self._put("dep_rank", dep.rank)
            self._put("dep_index", dep.index)
            return
        _check_fits(where, dep, (dep.rank,))
        tensor, lo, hi = self._chunk(dep.chunk, where)
        for key, value in (("rank", dep.rank), ("tensor", tensor), ("lo", lo), ("hi", hi)):
            self._put(f"cdep_{key}", value)

    def _put(self, key: str, value: object) -> None:
        self.columns[key].append(value)

    def _chunk(self, chunk: Chunk, where: str) -> tuple[int, list[int], list[int]]:
        if chunk.tensor not in self.index:
            raise InputError(f"{where}: no tensor {chunk.tensor!r}; known: {sorted(self.index)}")
        tensor = self.index[chunk.tensor]
        if chunk.box.ndim != len(self.tensors[tensor].shape):
            raise InputError(
                f"{where}: {chunk} has {chunk.box.ndim} dimensions, "
                f"tensor {chunk.tensor} has {len(self.tensors[tensor].shape)}"
            )
        _check_fits(where, chunk, chunk.box.hi)
        return tensor, *pad_box(chunk.box, self.ndim)


def _check_fits(where: str, what: object, numbers: Iterable[int]) -> None:
    """Raises InputError unless the columns can hold all ``numbers``."""
    for number in numbers:
        if not -MAX_EXTENT <= number <= MAX_EXTENT:
            raise InputError(
                f"{where}: {what} has the number {number}, which is not in "
                f"{-MAX_EXTENT}..{MAX_EXTENT}"
            )


def _position(known: tuple[str, ...], name: str, where: str, what: str) -> int:
    if name not in known:
        raise InputError(f"{where}: {what} {name!r} is not one of {', '.join(known)}")
    return known.index(name)
