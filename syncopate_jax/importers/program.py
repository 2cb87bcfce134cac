"""What every importer of another system's plans gives: its collectives, and each one's Plan.

An ``ImportedCollective`` says what is exchanged among which ranks; its ``plan()`` is that as one
``Collective`` a rank (``P2P`` for a permutation), which ``passes.expand_collectives`` lowers as any
other: left whole (``direct``), by a template, or by whatever else that pass offers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.importers.replica_groups import Groups, fault
from syncopate_jax.importers.resharding import Move
from syncopate_jax.importers.shardings import Derived
from syncopate_jax.ir.arguments import MAX_EXTENT
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import (
    COLLECTIVES,
    DEFAULT_CHANNEL,
    P2P,
    REDUCTIONS,
    Collective,
    ComputeDep,
    OpDep,
    Operation,
)
from syncopate_jax.ir.plan import ITEM_SIZES, Goal, Plan, Region, Tensor

PERMUTE = "permute"
REDUCING = ("reduce_scatter", "all_reduce")
# Dtypes that plans lack: what is only moved, or added with wrap-around, is the same bits.
_SAME_BITS = {"uint64": "int64", "uint32": "int32", "uint16": "int16", "bool": "uint8"}
MAX_PARTS = 4096  # of one collective
SOURCE, RESULT = "x", "out"  # names of a plan's two tensors


@dataclass(frozen=True, slots=True)
class ImportedCollective:
    """One collective of an imported program.

    Attributes:
      name: what its source calls it.
      kind: one of ``comm.COLLECTIVES``, or ``permute``.
      num_ranks: ranks of the program.
      groups: which ranks perform it together, in order; of a permutation its (source, target)
        pairs.
      shape, dtype: of what one rank contributes, in elements; a scalar has shape (1,).
      split_axis: dimension that is cut (reduce_scatter, all_to_all), or -1.
      concat_axis: dimension along which parts are joined (all_gather, all_to_all), or -1.
      reduce: ``none``, ``sum``, ``max``, or another that no plan can do.
      cuts: (dimension, parts): it is one collective for each combination of parts, the first
        dimension slowest, so that one part moves while the next is computed.
      steps: of an all_gather whose source hands blocks on: at each step the (source, target) pairs
        along which every rank sends the block that it got last, at first its own; else empty.
      produced: whether compute tiles produce what is contributed.
      template, arguments: the plan template by which its source performs it, and further arguments
        of that; or empty.
      pair: the contraction it is next to, with it as the move that is fused; or None.
      notes: whatever else its source says of it, as (key, value).
    """

    name: str
    kind: str
    num_ranks: int
    groups: Groups
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    split_axis: int = -1
    concat_axis: int = -1
    reduce: str = "none"
    cuts: tuple[tuple[int, int], ...] = ()
    steps: tuple[Groups, ...] = ()
    produced: bool = False
    template: str = ""
    arguments: tuple[tuple[str, Any], ...] = ()
    pair: Derived | None = None
    notes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if message := self._fault():
            raise InputError(f"{self.kind} {self.name}: {message}")

    @property
    def members(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0]) if self.groups and self.kind != PERMUTE else self.num_ranks

    @property
    def result(self) -> tuple[int, ...]:
        """Extents of what one rank receives."""
        shape = list(self.shape)
        if self.concat_axis >= 0:
            shape[self.concat_axis] *= self.members
        if self.split_axis >= 0:
            shape[self.split_axis] //= self.members
        return tuple(shape)

    @property
    def choose(self) -> dict[str, tuple[str, Mapping[str, Any]]]:
        """What ``expand_collectives`` takes as ``choose`` to do it as the source does."""
        return {self.kind: (self.template, dict(self.arguments))} if self.template else {}

    @property
    def operator(self) -> str:
        """The ready operator (of ``ops``) that does it together with its contraction, or empty."""
        if self.pair is None or self.pair.fused is None:
            return ""
        move = self.pair.fused
        if move.place == "out":
            return {
                "reduce_scatter": "matmul_reduce_scatter",
                "all_reduce": "matmul_all_reduce",
                "all_to_all": "matmul_all_to_all",
            }.get(move.kind, "")
        names = {"all_gather": "all_gather_matmul", "all_to_all": "all_to_all_matmul"}
        return names.get(move.kind, "")

    def plan(self, name: str | None = None) -> Plan:
        """The plan of all its groups: tensor ``x`` becomes ``out``, both each rank's own.

        Raises:
          UnsupportedError: its dtype or its reduction is one that no plan has.
        """
        where = name or _identifier(self.name)
        dtype = self._plan_dtype()
        tensors = (
            Tensor(SOURCE, self.shape, dtype, per_rank=True),
            Tensor(RESULT, self.result, dtype, per_rank=True),
        )
        senders = {src for src, _ in self.groups} if self.kind == PERMUTE else None
        whole = Box.full(self.shape)
        initial = [
            Region(rank, SOURCE, whole, self.produced)
            for rank in range(self.num_ranks)
            if whole.size
            and (senders is None or rank in senders)
            and (self.kind != "broadcast" or rank in {group[0] for group in self.groups})
        ]
        ops: list[list[Operation]] = [[] for _ in range(self.num_ranks)]
        for op in self._operations():
            ops[op.rank].append(op)
        goals = sorted(goal for goal in self._goals() if goal.box.size)
        return build_plan(where, self.num_ranks, tensors, initial, goals, ops)

    def __str__(self) -> str:
        axes = [
            f"{word} {axis}"
            for word, axis in (("split", self.split_axis), ("concat", self.concat_axis))
            if axis >= 0
        ]
        over = f"{len(self.groups)} pairs" if self.kind == PERMUTE else f"groups of {self.members}"
        parts = [self.name, self.kind, f"{self.dtype}{list(self.shape)}", *axes, over]
        if self.reduce != "none":
            parts.append(self.reduce)
        parts += [f"in {count} along {axis}" for axis, count in self.cuts]
        if self.steps:
            parts.append(f"by {len(self.steps)} hops")
        if self.operator:
            parts.append(f"[{self.operator}: {self.pair}]")
        return " ".join(parts)

    def _fault(self) -> str:
        if self.kind not in (*COLLECTIVES, PERMUTE):
            return f"is none of {', '.join((*COLLECTIVES, PERMUTE))}"
        if not self.shape:
            return "a scalar's shape must be given as (1,)"
        if max(self.shape) > MAX_EXTENT or min(self.shape) < 0:
            return f"shape {self.shape} needs extents in 0..{MAX_EXTENT}"
        if self.kind == PERMUTE:
            return _permutation_fault(self.groups, self.num_ranks)
        cuts = self.split_axis >= 0 or self.concat_axis >= 0
        every = self.kind != "broadcast"
        if message := fault(self.groups, self.num_ranks, equal=cuts, every=every):
            return f"its groups: {message}"
        wanted = {
            "all_gather": (False, True),
            "reduce_scatter": (True, False),
            "all_to_all": (True, True),
        }.get(self.kind, (False, False))
        for what, axis, needed in zip(
            ("split", "concat"), (self.split_axis, self.concat_axis), wanted, strict=True
        ):
            if needed != (axis >= 0) or axis >= len(self.shape):
                return f"{what} dimension {axis} does not fit shape {self.shape}"
        if self.split_axis >= 0 and self.shape[self.split_axis] % self.members:
            return (
                f"dimension {self.split_axis} has extent {self.shape[self.split_axis]}, which "
                f"{self.members} ranks do not divide"
            )
        if self.concat_axis >= 0 and self.shape[self.concat_axis] * self.members > MAX_EXTENT:
            return f"its result has an extent beyond {MAX_EXTENT}"
        if (self.reduce != "none") != (self.kind in REDUCING):
            return f"reduction {self.reduce!r} does not fit"
        return self._cut_fault() or self._step_fault()

    def _cut_fault(self) -> str:
        axes = [axis for axis, _ in self.cuts]
        if len(set(axes)) != len(axes):
            return f"a dimension is cut twice in {self.cuts}"
        for axis, parts in self.cuts:
            if not 0 <= axis < len(self.shape):
                return f"dimension {axis} to cut is none of shape {self.shape}"
            if axis in (self.split_axis, self.concat_axis) and not self.steps:
                return f"dimension {axis} is scattered or joined, so it cannot be cut as well"
            if not 1 <= parts <= max(1, self.shape[axis]):
                return f"shape {self.shape} cannot be cut into {parts} parts along {axis}"
        if math.prod(parts for _, parts in self.cuts) > MAX_PARTS:
            return f"is cut into more than {MAX_PARTS} parts"
        return ""

    def _step_fault(self) -> str:
        if not self.steps:
            return ""
        if self.kind != "all_gather":
            return "only an all_gather can be done in steps"
        for pairs in self.steps:
            if message := _permutation_fault(pairs, self.num_ranks):
                return message
            if len(pairs) != self.num_ranks:
                return "at each step every rank must send"
        seen = [{rank} for rank in range(self.num_ranks)]
        for owners in self._held():
            for rank, owner in enumerate(owners):
                seen[rank].add(owner)
        for group in self.groups:
            for rank in group:
                if seen[rank] != set(group) or len(self.steps) != len(group) - 1:
                    return f"its steps do not bring every block of its group to rank {rank} once"
        return ""

    def _held(self) -> list[list[int]]:
        """After each step, whose block every rank got last."""
        owners, found = list(range(self.num_ranks)), []
        for pairs in self.steps:
            after = list(owners)
            for src, dst in pairs:
                after[dst] = owners[src]
            owners = after
            found.append(owners)
        return found

    def _plan_dtype(self) -> str:
        if self.kind in REDUCING and self.reduce not in REDUCTIONS:
            raise UnsupportedError(
                f"{self.kind} {self.name}: plans reduce by {' or '.join(REDUCTIONS[1:])}, this one "
                f"by {self.reduce}; leave it to the compiler"
            )
        bits = self.kind not in REDUCING or (self.reduce == "sum" and self.dtype != "bool")
        found = _SAME_BITS.get(self.dtype, self.dtype) if bits else self.dtype
        if found not in ITEM_SIZES:
            raise UnsupportedError(
                f"{self.kind} {self.name}: plans have no dtype {self.dtype}; known: "
                f"{', '.join(sorted(ITEM_SIZES))}"
            )
        return found

    def _operations(self) -> Iterator[Operation]:
        if self.kind == PERMUTE:
            for src, dst in self.groups:
                chunk = Chunk(SOURCE, Box.full(self.shape))
                yield P2P(
                    src, src, dst, chunk, Chunk(RESULT, chunk.box),
                    deps=self._deps(src, chunk), origin=self._origin(),
                )  # fmt: skip
            return
        if not math.prod(self.shape):
            return
        if self.steps:
            yield from self._hops()
            return
        for group in self.groups:
            for src, dst in zip(self._parts(self.shape), self._parts(self.result), strict=True):
                for rank in group:
                    yield self._member(rank, group, Chunk(SOURCE, src), Chunk(RESULT, dst))

    def _member(self, rank: int, group: tuple[int, ...], src: Chunk, dst: Chunk) -> Collective:
        contributes = self.kind != "broadcast" or rank == group[0]
        return Collective(
            rank, self.kind, src, dst, group,
            deps=self._deps(rank, src) if contributes else (),
            reduce=self.reduce,
            channel=DEFAULT_CHANNEL,
            split_axis=self.split_axis,
            concat_axis=self.concat_axis,
            origin=self._origin(),
        )  # fmt: skip

    def _parts(self, shape: tuple[int, ...]) -> list[Box]:
        """The parts of an array that ``cuts`` make."""
        boxes = [Box.full(shape)]
        for axis, count in self.cuts:
            boxes = [part for box in boxes for part in box.split(axis, count)]
        return boxes

    def _hops(self) -> Iterator[P2P]:
        """A copy of each rank's own block, then the blocks on their way, part by part."""
        place = {rank: at for group in self.groups for at, rank in enumerate(group)}
        parts = self._parts(self.shape)
        count, extent = len(parts), self.shape[self.concat_axis]

        def block(owner: int, part: Box) -> Chunk:
            low = [0] * len(self.shape)
            low[self.concat_axis] = place[owner] * extent
            return Chunk(RESULT, part.shift(tuple(low)))

        for rank in range(self.num_ranks):
            for part in parts:
                src = Chunk(SOURCE, part)
                deps = self._deps(rank, src)
                yield P2P(rank, rank, rank, src, block(rank, part), deps, origin=self._origin())
        owners = list(range(self.num_ranks))
        came = list(range(self.num_ranks))  # who sent a rank what it sends next
        for step, (pairs, after) in enumerate(zip(self.steps, self._held(), strict=True)):
            for src, dst in sorted(pairs):
                for at, part in enumerate(parts):
                    chunk = block(owners[src], part)
                    deps = (OpDep(came[src], step * count + at),)
                    yield P2P(src, src, dst, chunk, chunk, deps, origin=self._origin())
            came = [src for _, src in sorted((dst, src) for src, dst in pairs)]
            owners = after

    def _deps(self, rank: int, chunk: Chunk) -> tuple[ComputeDep, ...]:
        return (ComputeDep(rank, chunk),) if self.produced and chunk.box.size else ()

    def _goals(self) -> Iterator[Goal]:
        whole = Box.full(self.result)
        origin = (0,) * len(self.shape)
        if self.kind == PERMUTE:
            for src, dst in self.groups:
                yield Goal(dst, RESULT, whole, SOURCE, origin, (src,))
            return
        for group in self.groups:
            for place, rank in enumerate(group):
                low = origin
                if self.split_axis >= 0:
                    cut = place * (self.shape[self.split_axis] // self.members)
                    low = (*origin[: self.split_axis], cut, *origin[self.split_axis + 1 :])
                if self.concat_axis < 0:
                    over = (group[0],) if self.kind == "broadcast" else group
                    reduce = self.reduce if self.kind in REDUCING else "sum"
                    yield Goal(rank, RESULT, whole, SOURCE, low, over, reduce)
                    continue
                extent = self._piece()
                for i, sender in enumerate(group):
                    box = whole.with_axis(self.concat_axis, i * extent, (i + 1) * extent)
                    yield Goal(rank, RESULT, box, SOURCE, low, (sender,))

    def _piece(self) -> int:
        """Extent along the joined dimension of what one member sends another."""
        return self.result[self.concat_axis] // self.members

    def _origin(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.notes)])


@dataclass(frozen=True, slots=True)
class ImportedProgram:
    """What an importer found in one file.

    Attributes:
      name: of the program, from the file.
      source: the importer's name.
      num_ranks: ranks of the program.
      collectives: in the order of the file.
      contractions: what each sharded contraction of the file implies, by name.
      skipped: what the file has and no plan can express, as (name, reason).
      notes: whatever else the file says, as (key, value).
    """

    name: str
    source: str
    num_ranks: int
    collectives: tuple[ImportedCollective, ...]
    contractions: tuple[tuple[str, Derived], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def plans(self) -> tuple[Plan, ...]:
        """The plan of each collective, whose names differ.

        Raises UnsupportedError when one has a dtype or a reduction that no plan has.
        """
        made: dict[str, Plan] = {}
        for collective in self.collectives:
            base = name = _identifier(collective.name)
            number = 0
            while name in made:
                number += 1
                name = f"{base}_{number}"
            made[name] = collective.plan(name)
        return tuple(made.values())

    def note(self, key: str) -> str:
        """The value of a note, empty if there is none."""
        return dict(self.notes).get(key, "")

    def __str__(self) -> str:
        lines = [f"{self.source} {self.name}: {self.num_ranks} ranks"]
        lines += [f"  {collective}" for collective in self.collectives]
        lines += [f"  {name}: {derived}" for name, derived in self.contractions]
        lines += [f"  {name}: left alone, {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Reader:
    """An importer that reads a file; call it with the file's text.

    Attributes:
      read: the text to an ImportedProgram; raises FormatError, or UnsupportedError.
      reads: what files, in a few words.
    """

    read: Callable[[str], ImportedProgram]
    reads: str

    def __call__(self, text: str) -> ImportedProgram:
        return self.read(text)


def from_move(
    name: str,
    derived: Derived,
    move: Move,
    num_ranks: int,
    groups: Groups,
    **more: Any,
) -> ImportedCollective:
    """The collective that a derived move is, over ``groups`` of the program's ranks."""
    letters = derived.letters(move.place)
    gather = letters.index(move.gather) if move.gather else -1
    scatter = letters.index(move.scatter) if move.scatter else -1
    return ImportedCollective(
        name=name,
        kind=move.kind,
        num_ranks=num_ranks,
        groups=groups,
        shape=move.shape,
        split_axis=scatter,
        concat_axis=gather,
        reduce="sum" if move.kind in REDUCING else "none",
        produced=move.place == "out",
        pair=derived if move is derived.fused else None,
        **more,
    )


def _permutation_fault(pairs: Groups, ranks: int) -> str:
    if any(len(pair) != 2 for pair in pairs):
        return "each pair needs a source and a target"
    for what, side in (("source", 0), ("target", 1)):
        seen = [pair[side] for pair in pairs]
        if outside := [rank for rank in seen if not 0 <= rank < ranks]:
            return f"{what} {outside[0]} is none of the {ranks} ranks"
        if len(set(seen)) != len(seen):
            return f"a rank is {what} twice in {pairs}"
    return ""


def _identifier(name: str) -> str:
    """``name`` without what the text form of a plan cannot have."""
    found = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "_" for c in name)
    return found.strip("_-.") or "collective"
