"""An exchange of data among groups of ranks, and the plan that does it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.importers.replica_groups import Groups
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, REDUCTIONS, Collective, ComputeDep, OpDep, Operation
from syncopate_jax.ir.plan import ITEM_SIZES, Goal, Plan, Region, Tensor
from syncopate_jax.registry import templates

PERMUTE = "permute"
REDUCING = ("reduce_scatter", "all_reduce")
# Dtypes that plans lack: what is only moved, or added with wrap-around, is the same bits.
_SAME_BITS = {"uint64": "int64", "uint32": "int32", "uint16": "int16", "bool": "uint8"}
SOURCE, RESULT = "x", "out"  # names of a plan's two tensors
MAX_LISTED = 2**20  # of a plan's transfers and goals: more would fill memory
MAX_NAME = 100  # characters of a plan, which becomes a file


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective, or a permutation, over all ranks of a program.

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
    notes: tuple[tuple[str, str], ...] = ()

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

    def plan(self, name: str | None = None) -> Plan:
        """The plan of all its groups: tensor ``x`` becomes ``out``, both each rank's own.

        Raises:
          UnsupportedError: its dtype or its reduction is one that no plan has, or it is among so
            many ranks that a plan would be too long.
        """
        self._check_length()
        where = name or identifier(self.name)
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
        goals = sorted(goal for goal in self._goals() if goal.box.size)
        return build_plan(
            where, self.num_ranks, tensors, initial, goals, self._by_rank(self._operations())
        )

    def in_place(self, name: str | None = None) -> Plan:
        """The plan on one tensor ``x``, which ``compile`` binds to what a kernel reads or makes.

        Of an all-gather, every rank has its block of ``x`` and gets all; of a reduce-scatter, its
        tiles produce terms of all of ``x``, and it gets the sum of its block. Hops of the source
        are kept; its ``cuts`` along several dimensions are not: they change no value, and
        ``compile`` has ``split``.

        Raises:
          UnsupportedError: it is another exchange, or one of several groups; or as ``plan``.
        """
        gathers = self.kind == "all_gather"
        if not gathers and self.kind != "reduce_scatter":
            raise UnsupportedError(
                f"{self.kind} {self.name}: has no plan on one tensor, which all_gather and "
                f"reduce_scatter have; use plan(), or a template of that kind"
            )
        if len(self.groups) != 1:
            raise UnsupportedError(
                f"{self.kind} {self.name}: is of {len(self.groups)} groups, and an operand is "
                f"exchanged among all ranks of its mesh axis; make it of a template for "
                f"{self.members} ranks"
            )
        self._check_length()
        axis = self.concat_axis if gathers else self.split_axis
        cuts = [{"split": parts, "split_axis": along} for along, parts in self.cuts]
        split = cuts[0] if len(cuts) == 1 and not self.steps else {}
        plan: Plan = templates.get("collective")(
            self.num_ranks,
            self.result if gathers else self.shape,
            kind=self.kind,
            groups=self.groups,
            dtype=self._plan_dtype(),
            axis=axis,
            produced=self.produced or not gathers,
            tensor=SOURCE,
            name=name or identifier(self.name),
            **split,
            **({} if gathers else {"reduce": self.reduce}),
        )
        if not self.steps or not math.prod(self.shape):
            return plan
        ops = self._by_rank(self._hops(in_place=True))
        return build_plan(plan.name, plan.num_ranks, plan.tensors, plan.initial, plan.goals, ops)

    def _by_rank(self, operations: Iterator[Operation]) -> list[list[Operation]]:
        ops: list[list[Operation]] = [[] for _ in range(self.num_ranks)]
        for op in operations:
            ops[op.rank].append(op)
        return ops

    def held(self) -> list[list[int]]:
        """After each step, whose block every rank got last."""
        owners, found = list(range(self.num_ranks)), []
        for pairs in self.steps:
            after = list(owners)
            for src, dst in pairs:
                after[dst] = owners[src]
            owners = after
            found.append(owners)
        return found

    def _check_length(self) -> None:
        parts = math.prod(count for _, count in self.cuts)
        listed = self.num_ranks * parts * (1 + len(self.steps))
        if self.concat_axis >= 0:
            listed += self.num_ranks * self.members  # what each rank gets of each other
        if listed > MAX_LISTED:
            raise UnsupportedError(
                f"{self.kind} {self.name}: a plan of it among {self.num_ranks} ranks lists "
                f"{listed} transfers and goals, at most {MAX_LISTED} fit; leave it to the compiler"
            )

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
        if not math.prod(self.shape):
            return
        if self.kind == PERMUTE:
            for src, dst in self.groups:
                chunk = Chunk(SOURCE, Box.full(self.shape))
                yield P2P(
                    src, src, dst, chunk, Chunk(RESULT, chunk.box),
                    deps=self._deps(src, chunk), origin=self._origin(),
                )  # fmt: skip
            return
        if self.steps:
            yield from self._hops()
            return
        for group in self.groups:
            for own, got in zip(self._parts(self.shape), self._parts(self.result), strict=True):
                for rank in group:
                    yield self._member(rank, group, Chunk(SOURCE, own), Chunk(RESULT, got))

    def _member(self, rank: int, group: tuple[int, ...], src: Chunk, dst: Chunk) -> Collective:
        contributes = self.kind != "broadcast" or rank == group[0]
        return Collective(
            rank, self.kind, src, dst, group,
            deps=self._deps(rank, src) if contributes else (),
            reduce=self.reduce,
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

    def _hops(self, in_place: bool = False) -> Iterator[P2P]:
        """A copy of each rank's own block, then the blocks on their way, part by part.

        ``in_place``: own blocks are where they belong, and are not copied.
        """
        place = {rank: at for group in self.groups for at, rank in enumerate(group)}
        parts = self._parts(self.shape)
        count, extent = len(parts), self.shape[self.concat_axis]

        def block(owner: int, part: Box) -> Chunk:
            low = [0] * len(self.shape)
            low[self.concat_axis] = place[owner] * extent
            return Chunk(SOURCE if in_place else RESULT, part.shift(tuple(low)))

        for rank in () if in_place else range(self.num_ranks):
            for part in parts:
                yield P2P(
                    rank, rank, rank, Chunk(SOURCE, part), block(rank, part),
                    deps=self._deps(rank, Chunk(SOURCE, part)), origin=self._origin(),
                )  # fmt: skip
        owners = list(range(self.num_ranks))
        came = list(range(self.num_ranks))  # who sent a rank what it sends next
        for step, (pairs, after) in enumerate(zip(self.steps, self.held(), strict=True)):
            for src, dst in sorted(pairs):
                for at, part in enumerate(parts):
                    chunk = block(owners[src], part)
                    before = (step - in_place) * count + at  # the operation that brought it
                    deps = (OpDep(came[src], before),) if before >= 0 else self._deps(src, chunk)
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


def identifier(name: str) -> str:
    """``name`` without what the text form of a plan cannot have, nor a file's name."""
    found = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "_" for c in name)
    return found.strip("_-.")[:MAX_NAME].rstrip("_-.") or "collective"
