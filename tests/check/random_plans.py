"""Random valid plans: several independent movements, shuffled into the ranks' lists."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, Collective, ComputeDep, OpDep, Operation
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor

CHANNELS = ("nvlink", "nic", "host")


@dataclass
class Step:
    """An operation whose dependencies are other steps; a collective has a step for each member."""

    op: Operation
    after: list[Step] = field(default_factory=list)
    tiles: list[ComputeDep] = field(default_factory=list)
    with_next: bool = False


@dataclass
class Held:
    """A chunk on a rank, and what must have happened before it may be read."""

    rank: int
    chunk: Chunk
    after: list[Step]
    tiles: list[ComputeDep]


class Maker:
    """Collects tensors, regions, goals and one list of steps for each independent movement."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.ranks = rng.randint(1, 8)
        self.tensors: list[Tensor] = []
        self.initial: list[Region] = []
        self.goals: list[Goal] = []
        self.streams: list[list[Step]] = []

    def plan(self) -> Plan:
        makers = (self.relay, self.exchange, self.reduction, self.collective, self.reuse)
        for _ in range(self.rng.randint(1, 3)):
            self.streams.append([])
            self.rng.choice(makers)()
        lists, place = self._merge()
        return build_plan(
            f"random{self.ranks}", self.ranks, self.tensors, self.initial, self.goals,
            [[self._finished(step, place) for step in listed] for listed in lists],
        )  # fmt: skip

    def _merge(self) -> tuple[list[list[Step]], dict[int, OpDep]]:
        lists: list[list[Step]] = [[] for _ in range(self.ranks)]
        place: dict[int, OpDep] = {}
        streams = [list(reversed(stream)) for stream in self.streams]
        while any(streams):
            stream = self.rng.choice([stream for stream in streams if stream])
            more = True
            while more:
                step = stream.pop()
                more = step.with_next
                place[id(step)] = OpDep(step.op.rank, len(lists[step.op.rank]))
                lists[step.op.rank].append(step)
        return lists, place

    def _finished(self, step: Step, place: dict[int, OpDep]) -> Operation:
        deps = list(dict.fromkeys([place[id(other)] for other in step.after] + step.tiles))
        self.rng.shuffle(deps)
        return replace(step.op, deps=tuple(deps))

    def tensor(self, shape: tuple[int, ...], per_rank: bool = False) -> Tensor:
        tensor = Tensor(f"t{len(self.tensors)}", shape, "float32", per_rank)
        self.tensors.append(tensor)
        return tensor

    def shape(self) -> tuple[int, ...]:
        return tuple(self.rng.randint(1, 6) for _ in range(self.rng.randint(1, 3)))

    def pieces(self, box: Box) -> list[Box]:
        """A random cut of a box into boxes that need not be aligned with each other."""
        todo, done = [box], []
        while todo:
            box = todo.pop()
            axis = self.rng.randrange(box.ndim)
            if box.shape[axis] < 2 or self.rng.random() < 0.5 or len(done) > 6:
                done.append(box)
                continue
            cut = self.rng.randint(box.lo[axis] + 1, box.hi[axis] - 1)
            todo.append(box.with_axis(axis, box.lo[axis], cut))
            todo.append(box.with_axis(axis, cut, box.hi[axis]))
        return done

    def start(self, rank: int, tensor: Tensor, box: Box) -> Held:
        """An initial region; where it is produced, readers wait for some cover of it."""
        produced = self.rng.random() < 0.5
        self.initial.append(Region(rank, tensor.name, box, produced))
        chunk = Chunk(tensor.name, box)
        parts = self.pieces(box) if self.rng.random() < 0.3 else [box]
        tiles = [ComputeDep(rank, Chunk(tensor.name, part)) for part in parts]
        return Held(rank, chunk, [], tiles if produced else [])

    def goal(
        self,
        rank: int,
        chunk: Chunk,
        source: Chunk,
        ranks: tuple[int, ...] = (),
        reduce: str = "sum",
    ) -> None:
        origin = (source.tensor, source.box.lo)
        if chunk == source and self.rng.random() < 0.5:
            origin = ("", ())
        self.goals.append(Goal(rank, chunk.tensor, chunk.box, *origin, ranks, reduce))

    def move(
        self,
        held: Held,
        rank: int,
        chunk: Chunk,
        after: Sequence[Step] = (),
        reduce: str = "none",
    ) -> Held:
        """Moves what is held to ``chunk`` of ``rank``."""
        op = P2P(
            self.rng.choice((held.rank, rank)), held.rank, rank, held.chunk, chunk,
            reduce=reduce, channel=self.rng.choice(CHANNELS),
        )  # fmt: skip
        step = Step(op, [*held.after, *after], list(held.tiles))
        self.streams[-1].append(step)
        return Held(rank, chunk, [step], [])

    def spread(
        self, held: Held, source: Chunk, ranks: tuple[int, ...] = (), reduce: str = "sum"
    ) -> None:
        """Brings what is held to random ranks, each from a random one that has it already."""
        holders = [held]
        others = [rank for rank in range(self.ranks) if rank != held.rank]
        for rank in self.rng.sample(others, self.rng.randint(0, len(others))):
            new = self.move(self.via(self.rng.choice(holders)), rank, held.chunk)
            self.goal(rank, held.chunk, source, ranks, reduce)
            holders.append(new)

    def via(self, held: Held) -> Held:
        """Perhaps a copy of what is held, at other coordinates of another tensor."""
        if self.rng.random() < 0.7:
            return held
        shape = held.chunk.box.shape
        margin = tuple(self.rng.randint(0, 3) for _ in shape)
        room = self.tensor(
            tuple(a + b + self.rng.randint(0, 2) for a, b in zip(shape, margin, strict=True))
        )
        box = Box.full(shape).shift(margin)
        return self.move(held, self.rng.randrange(self.ranks), Chunk(room.name, box))

    def relay(self) -> None:
        """A shared tensor whose pieces start somewhere and go to random ranks."""
        tensor = self.tensor(self.shape())
        for box in self.pieces(tensor.box):
            held = self.start(self.rng.randrange(self.ranks), tensor, box)
            parts = self.pieces(box) if self.rng.random() < 0.3 else [box]
            for part in parts:
                chunk = Chunk(tensor.name, part)
                self.spread(Held(held.rank, chunk, held.after, held.tiles), chunk)

    def exchange(self) -> None:
        """Private data that goes to other places of other ranks' tensors."""
        tensor = self.tensor(self.shape(), per_rank=True)
        room = self.tensor(tuple(e * self.ranks for e in tensor.shape))
        for rank in range(self.ranks):
            held = self.start(rank, tensor, tensor.box)
            for other in range(self.ranks):
                if self.rng.random() < 0.3:
                    continue
                at = tuple(rank * e for e in tensor.shape)
                chunk = Chunk(room.name, tensor.box.shift(at))
                self.move(self.via(held), other, chunk)
                self.goal(other, chunk, held.chunk, (rank,))

    def reduction(self) -> None:
        """Partial results that meet on one rank: in place, in a new tensor, or hop by hop."""
        reduce = self.rng.choice(("sum", "max"))
        tensor = self.tensor(self.shape(), per_rank=True)
        group = self.rng.sample(range(self.ranks), self.rng.randint(1, self.ranks))
        parts = [self.start(rank, tensor, tensor.box) for rank in group]
        ranks = tuple(sorted(group))
        how = self.rng.randrange(3)
        if how == 0:
            total = parts[0]
            arrived = [
                self.move(self.via(p), total.rank, total.chunk, (), reduce) for p in parts[1:]
            ]
            total.after = [step for held in arrived for step in held.after]
        elif how == 1:
            room = self.tensor(tensor.shape)
            first = self.move(parts[0], self.rng.randrange(self.ranks), Chunk(room.name, room.box))
            more = [
                self.move(self.via(p), first.rank, first.chunk, first.after, reduce)
                for p in parts[1:]
            ]
            total = Held(first.rank, first.chunk, [s for h in [first, *more] for s in h.after], [])
        else:
            total = parts[0]
            for part in parts[1:]:
                new = self.move(total, part.rank, part.chunk, (), reduce)
                total = Held(part.rank, part.chunk, new.after, part.tiles)
        source = Chunk(tensor.name, tensor.box)
        self.goal(total.rank, total.chunk, source, ranks, reduce)
        self.spread(total, source, ranks, reduce)

    def reuse(self) -> None:
        """Pieces that pass through one slot of a rank; each waits until the last one has left."""
        piece = self.shape()
        count = self.rng.randint(2, 4)
        tensor = self.tensor((piece[0] * count, *piece[1:]))
        room = self.tensor(tensor.shape)
        slot_tensor = self.tensor(piece)
        slot, middle = Chunk(slot_tensor.name, slot_tensor.box), self.rng.randrange(self.ranks)
        free: list[Step] = []
        for i in range(count):
            box = tensor.box.with_axis(0, i * piece[0], (i + 1) * piece[0])
            held = self.start(self.rng.randrange(self.ranks), tensor, box)
            there = self.move(held, middle, slot, free)
            free = []
            for rank in self.rng.sample(range(self.ranks), self.rng.randint(1, self.ranks)):
                read = self.move(there, rank, Chunk(room.name, box))
                self.goal(rank, read.chunk, held.chunk)
                free += read.after
        self.goal(middle, slot, held.chunk)

    def collective(self) -> None:
        """One collective over a random group, in place or not, with ragged pieces."""
        kind = self.rng.choice(
            ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
        )
        group = tuple(self.rng.sample(range(self.ranks), self.rng.randint(1, self.ranks)))
        channel = self.rng.choice(CHANNELS)
        steps = getattr(self, f"_{kind}")(group)
        for i, step in enumerate(steps):
            step.with_next = i < len(steps) - 1
            step.op = replace(step.op, channel=channel)
        self.streams[-1] += steps

    def _part(self, held: Held, kind: str, dst: Chunk, ranks: tuple[int, ...], **more) -> Step:
        op = Collective(held.rank, kind, held.chunk, dst, ranks, **more)
        return Step(op, list(held.after), list(held.tiles))

    def _ragged(self, box: Box, axis: int, parts: int) -> list[Box]:
        """Consecutive non-empty boxes along an axis."""
        cuts = sorted(self.rng.sample(range(box.lo[axis] + 1, box.hi[axis]), parts - 1))
        bounds = [box.lo[axis], *cuts, box.hi[axis]]
        return [box.with_axis(axis, a, b) for a, b in itertools.pairwise(bounds)]

    def _wide(self, parts: int) -> tuple[tuple[int, ...], int]:
        shape = list(self.shape())
        axis = self.rng.randrange(len(shape))
        shape[axis] = parts + self.rng.randint(0, 4)
        return tuple(shape), axis

    def _all_gather(self, group: tuple[int, ...]) -> list[Step]:
        shape, axis = self._wide(len(group))
        tensor = self.tensor(shape)
        in_place = len(group) > 1 and self.rng.random() < 0.5
        room = tensor if in_place else self.tensor(shape)
        steps = []
        for rank, box in zip(group, self._ragged(tensor.box, axis, len(group)), strict=True):
            held = self.start(rank, tensor, box)
            whole = Chunk(room.name, room.box)
            steps.append(self._part(held, "all_gather", whole, group, concat_axis=axis))
            self.goal(rank, whole, Chunk(tensor.name, tensor.box))
        return steps

    def _reduce_scatter(self, group: tuple[int, ...]) -> list[Step]:
        shape, axis = self._wide(len(group))
        tensor = self.tensor(shape, per_rank=True)
        in_place = self.rng.random() < 0.5 and len(group) > 1
        room = tensor if in_place else self.tensor(shape)
        reduce = self.rng.choice(("sum", "max"))
        steps = []
        for rank, box in zip(group, self._ragged(tensor.box, axis, len(group)), strict=True):
            held = self.start(rank, tensor, tensor.box)
            mine = Chunk(room.name, box)
            steps.append(
                self._part(held, "reduce_scatter", mine, group, reduce=reduce, split_axis=axis)
            )
            self.goal(rank, mine, Chunk(tensor.name, box), group, reduce)
        return steps

    def _all_reduce(self, group: tuple[int, ...]) -> list[Step]:
        tensor = self.tensor(self.shape(), per_rank=True)
        in_place = self.rng.random() < 0.5 and len(group) > 1
        room = tensor if in_place else self.tensor(tensor.shape)
        reduce = self.rng.choice(("sum", "max"))
        whole = Chunk(room.name, room.box)
        steps = []
        for rank in group:
            held = self.start(rank, tensor, tensor.box)
            steps.append(self._part(held, "all_reduce", whole, group, reduce=reduce))
            self.goal(rank, whole, Chunk(tensor.name, tensor.box), group, reduce)
        return steps

    def _broadcast(self, group: tuple[int, ...]) -> list[Step]:
        tensor = self.tensor(self.shape())
        in_place = self.rng.random() < 0.5 and len(group) > 1
        room = tensor if in_place else self.tensor(tensor.shape)
        root = self.start(group[0], tensor, tensor.box)
        whole = Chunk(room.name, room.box)
        steps = []
        for rank in group:
            held = root if rank == group[0] else Held(rank, root.chunk, [], [])
            steps.append(self._part(held, "broadcast", whole, group))
            self.goal(rank, whole, root.chunk)
        return steps

    def _all_to_all(self, group: tuple[int, ...]) -> list[Step]:
        size = len(group)
        rows, columns = (size + self.rng.randint(0, 3) for _ in range(2))
        tensor = self.tensor((rows, columns))
        room = self.tensor((rows, columns))
        mine = self._ragged(tensor.box, 0, size)
        theirs = self._ragged(tensor.box, 1, size)
        steps = []
        for rank, have, want in zip(group, mine, theirs, strict=True):
            held = self.start(rank, tensor, have)
            dst = Chunk(room.name, want)
            steps.append(self._part(held, "all_to_all", dst, group, split_axis=1, concat_axis=0))
            self.goal(rank, dst, Chunk(tensor.name, want))
        return steps


def random_plan(seed: int) -> Plan:
    """The valid plan of a seed, over 1 to 8 ranks."""
    return Maker(random.Random(seed)).plan()
