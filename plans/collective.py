"""A library collective, one operation a rank: for backends that hand it to the system whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from syncopate_jax.errors import InputError
from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import axis_of, extents, integer, one_of, origin_text
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import (
    COLLECTIVES,
    DEFAULT_CHANNEL,
    REDUCTIONS,
    Collective,
    ComputeDep,
)
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ir.shards import check_listed, check_pieces, cut_shards
from syncopate_jax.registry import templates

NAME = "collective"
REDUCING = ("reduce_scatter", "all_reduce")
TWO_TENSORS = ("all_reduce", "all_to_all")


@templates.register(NAME)
@checked
def collective(
    num_ranks: int,
    shape: Sequence[int],
    *,
    kind: str = "all_gather",
    groups: Sequence[Sequence[int]] | None = None,
    reduce: str = "sum",
    dtype: str = "bfloat16",
    axis: int = 0,
    concat_axis: int | None = None,
    split: int = 1,
    split_axis: int | None = None,
    shards: Sequence[int] | None = None,
    produced: bool | None = None,
    tensor: str | None = None,
    out: str | None = None,
    name: str | None = None,
    channel: str = DEFAULT_CHANNEL,
) -> Plan:
    """Every group performs ``kind`` once, or ``split`` times on a slice of the data each.

    A rank of an all-gather or a broadcast fills the shared tensor ``x``; of a reduce-scatter its
    shard of ``y``, in place; of an all-reduce ``out`` from ``y``; of an all-to-all ``recv`` from
    ``send``. A member takes part even if its own shard is empty.

    Args:
      shape: extents of the whole tensor, of an all-to-all the sending one, in elements.
      kind: one of ``comm.COLLECTIVES``.
      groups: disjoint groups of ranks; one of all ranks if None.
      reduce: ``sum`` or ``max``, of what reduces.
      axis: the axis along which shards are gathered, scattered or (all_to_all) cut.
      concat_axis: of an all_to_all, the axis along which blocks are joined; ``axis`` if None.
      split: collectives a group.
      split_axis: the axis cut for them: of an all-reduce or broadcast any (``axis`` if None), else
        one that is neither ``axis`` nor ``concat_axis`` (the first such if None).
      shards: extent of each member's shard along ``axis``; as equal as can be if None.
      produced: whether compute tiles produce the data; only for reductions if None.
      tensor, out: names of the tensors.

    Raises:
      InputError: an argument is out of range, groups overlap, or no axis is left to split.
    """
    where = name or NAME
    one_of(where, "kind", kind, COLLECTIVES)
    reducing = kind in REDUCING
    if reducing:
        one_of(where, "reduce", reduce, REDUCTIONS[1:])
    ranks = integer(where, "num_ranks", num_ranks, 1)
    whole = extents(where, shape)
    along = axis_of(where, "axis", axis, whole)
    concat = along if concat_axis is None else axis_of(where, "concat_axis", concat_axis, whole)
    if concat_axis is not None and kind != "all_to_all":
        raise InputError(f"{where}: concat_axis {concat_axis} is given, but {kind} takes only axis")
    if shards is not None and kind == "all_to_all" and along == concat:
        raise InputError(
            f"{where}: shards {tuple(shards)} are given, but an all_to_all along one axis cuts it "
            "as equally as can be; use all_to_all_blocks"
        )
    teams = _groups(where, ranks, groups)
    source = tensor or ("y" if reducing else "send" if kind == "all_to_all" else "x")
    target = out or ("out" if kind == "all_reduce" else "recv")
    maker = _Maker(
        where=where,
        members=sum(map(len, teams)),
        kind=kind,
        shape=whole,
        axis=along,
        concat=concat,
        shards=shards,
        source=source,
        target=target if kind in TWO_TENSORS else source,
        reduce=reduce if reducing else "none",
        produced=reducing if produced is None else produced,
        channel=channel,
        origin=origin_text(
            NAME, num_ranks=ranks, kind=kind, axis=axis, split=split, split_axis=split_axis
        ),
    )
    if kind == "all_to_all":
        check_listed(where, sum(len(team) ** 2 for team in teams), "goals")
    pieces = maker.pieces(integer(where, "split", split, 1), split_axis)
    listed: list[list[Collective]] = [[] for _ in range(ranks)]
    for team in teams:
        for op in maker.operations(team, pieces):
            listed[op.rank].append(op)
    largest = [box for team in teams for box in maker.received(team)]
    received = tuple(max((box.hi[i] for box in largest), default=0) for i in range(len(whole)))
    private = reducing or kind == "all_to_all"
    tensors = [Tensor(source, whole, dtype, private)]
    if kind in TWO_TENSORS:
        tensors.append(Tensor(target, received, dtype, kind == "all_to_all" or len(teams) > 1))
    initial = (region for team in teams for region in maker.initial(team))
    goals = (goal for team in teams for goal in maker.goals(team))
    return build_plan(
        where,
        ranks,
        tensors,
        sorted(region for region in initial if region.box.size),
        sorted((g for g in goals if g.box.size), key=lambda g: (g.rank, g.box.lo, g.box.hi)),
        listed,
    )


def _groups(
    where: str, ranks: int, groups: Sequence[Sequence[int]] | None
) -> tuple[tuple[int, ...], ...]:
    if groups is None:
        return (tuple(range(ranks)),)
    teams = tuple(
        tuple(integer(where, f"groups[{i}]", rank, 0) for rank in group)
        for i, group in enumerate(groups)
    )
    seen: set[int] = set()
    for i, team in enumerate(teams):
        if not team:
            raise InputError(f"{where}: groups[{i}] is empty, needs at least one rank")
        for rank in team:
            if rank >= ranks:
                raise InputError(f"{where}: groups[{i}] has rank {rank}, there are {ranks} ranks")
            if rank in seen:
                raise InputError(f"{where}: rank {rank} is listed twice in groups {teams}")
            seen.add(rank)
    return teams


@dataclass(frozen=True, slots=True)
class _Maker:
    """What one kind of collective reads, writes and promises, for a group."""

    where: str
    members: int  # of all groups
    kind: str
    shape: tuple[int, ...]
    axis: int
    concat: int
    shards: Sequence[int] | None
    source: str
    target: str
    reduce: str
    produced: bool
    channel: str
    origin: str

    def pieces(self, split: int, split_axis: int | None) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The axis that is cut, and the intervals of the slices along it."""
        used = {self.axis, self.concat}
        free = self.kind in ("all_reduce", "broadcast")
        if split_axis is not None:
            along = axis_of(self.where, "split_axis", split_axis, self.shape)
        elif free or split == 1:
            along = self.axis
        else:
            along = next((i for i in range(len(self.shape)) if i not in used), self.axis)
        if split > 1 and not free and along in used:
            raise InputError(
                f"{self.where}: {self.kind} of shape {self.shape} along axis {self.axis} cannot be "
                f"split {split} times along axis {along}; needs another axis"
            )
        if split == 1:
            return along, ((0, self.shape[along]),)
        parts = min(split, max(1, self.shape[along]))
        check_pieces(self.where, split, self.members * parts, self.members)
        boxes = Box.full(self.shape).split(along, parts)
        return along, tuple((box.lo[along], box.hi[along]) for box in boxes)

    def sent(self, team: tuple[int, ...]) -> list[Box]:
        """What each member contributes."""
        if self.kind == "all_gather":
            return self.cut(team)
        return [Box.full(self.shape)] * len(team)

    def received(self, team: tuple[int, ...]) -> list[Box]:
        """What each member receives."""
        if self.kind == "reduce_scatter":
            return self.cut(team)
        if self.kind != "all_to_all":
            return [Box.full(self.shape)] * len(team)
        return [
            Box.full(block.with_axis(self.concat, 0, block.shape[self.concat] * len(team)).shape)
            for block in self.cut(team)
        ]

    def cut(self, team: tuple[int, ...]) -> list[Box]:
        """The shard of each member."""
        return cut_shards(self.where, len(team), self.shape, self.axis, self.shards).boxes()

    def operations(
        self, team: tuple[int, ...], pieces: tuple[int, tuple[tuple[int, int], ...]]
    ) -> Iterator[Collective]:
        """Each member's part, for every slice that holds anything."""
        along, intervals = pieces
        in_place = self.source == self.target
        if Box.full(self.shape).size == 0 or (in_place and len(team) == 1):
            return  # nothing to move
        whole = len(intervals) == 1
        split_axis = self.axis if self.kind in ("reduce_scatter", "all_to_all") else -1
        concat_axis = {"all_gather": self.axis, "all_to_all": self.concat}.get(self.kind, -1)
        boxes = list(zip(team, self.sent(team), self.received(team), strict=True))
        for lo, hi in intervals:
            for place, (rank, sent, received) in enumerate(boxes):
                if not whole:
                    sent, received = (box.with_axis(along, lo, hi) for box in (sent, received))
                src, dst = Chunk(self.source, sent), Chunk(self.target, received)
                waits = self.produced and sent.size and not (self.kind == "broadcast" and place)
                yield Collective(
                    rank=rank,
                    kind=self.kind,
                    src=src,
                    dst=dst,
                    ranks=team,
                    deps=(ComputeDep(rank, src),) if waits else (),
                    reduce=self.reduce,
                    channel=self.channel,
                    split_axis=split_axis,
                    concat_axis=concat_axis,
                    origin=self.origin,
                )

    def initial(self, team: tuple[int, ...]) -> Iterator[Region]:
        """What the members hold at the start."""
        for place, (rank, box) in enumerate(zip(team, self.sent(team), strict=True)):
            if place == 0 or self.kind != "broadcast":
                yield Region(rank, self.source, box, self.produced)

    def goals(self, team: tuple[int, ...]) -> Iterator[Goal]:
        """What the members must hold in the end."""
        if self.kind == "all_to_all":
            yield from self._blocks(team)
            return
        for rank, box in zip(team, self.received(team), strict=True):
            if self.reduce != "none":
                source = self.source if self.target != self.source else ""
                yield Goal(rank, self.target, box, source, ranks=team, reduce=self.reduce)
            else:
                yield Goal(rank, self.target, box)

    def _blocks(self, team: tuple[int, ...]) -> Iterator[Goal]:
        members = zip(team, self.cut(team), self.received(team), strict=True)
        for rank, block, box in members:
            extent = block.shape[self.concat]
            for i, sender in enumerate(team):
                part = box.with_axis(self.concat, i * extent, (i + 1) * extent)
                yield Goal(rank, self.target, part, self.source, block.lo, (sender,))
