"""Ranks in nodes: who stands for whom across nodes, and the hops of gathers and reductions that go
through such agents, so that links within nodes and links between them are busy side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import integer, one_of
from syncopate_jax.ir.moves import MODES
from syncopate_jax.ir.shards import Shards
from syncopate_jax.ir.transfers import Transfers, make_transfers
from syncopate_jax.plans.gathering import square_divisor

# What a hop does: hand data on in the first tensor, add it there, copy it from there to the second
# tensor, or hand it on in the second tensor.
GATHER, REDUCE, KEEP, SPREAD = range(4)

MOST_HOPS = 1 << 21
"""Of a plan: hops are added one by one, a million in some seconds."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """How ranks are divided among nodes, in order.

    Attributes:
      sizes: ranks of each node.
      node, place: of each rank, its node and its place there.
    """

    sizes: tuple[int, ...]
    node: tuple[int, ...] = field(init=False)
    place: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        node = [k for k, size in enumerate(self.sizes) for _ in range(size)]
        object.__setattr__(self, "node", tuple(node))
        place = [i for size in self.sizes for i in range(size)]
        object.__setattr__(self, "place", tuple(place))

    @property
    def largest(self) -> int:
        """Ranks of the largest node."""
        return max(self.sizes)

    def rank(self, node: int, place: int) -> int:
        """The rank at ``place``, counted round and round, of ``node``."""
        return sum(self.sizes[:node]) + place % self.sizes[node]

    def agent(self, node: int, rank: int, piece: int, pieces: int) -> int:
        """The rank of ``node`` that stands for piece ``piece`` of the shard of ``rank``.

        Nodes of one size pair their ranks; else pieces are dealt out in turn.
        """
        place, size = self.place[rank], self.sizes[node]
        same = size == self.sizes[self.node[rank]]
        return self.rank(node, place if same else place * pieces + piece)


def make_nodes(where: str, num_ranks: int, nodes: Sequence[int] | None) -> Nodes:
    """The nodes of sizes ``nodes``; if None of equal size, the squarest way.

    Raises InputError when the sizes are not positive or do not add up to ``num_ranks``.
    """
    if nodes is None:
        size = square_divisor(num_ranks)
        return Nodes((size,) * (num_ranks // size))
    sizes = tuple(integer(where, f"nodes[{k}]", size, 1) for k, size in enumerate(nodes))
    if sum(sizes) != num_ranks:
        raise InputError(
            f"{where}: nodes {sizes} have {sum(sizes)} ranks together, needs {num_ranks}"
        )
    return Nodes(sizes)


@dataclass(slots=True)
class Hops:
    """Operations in the order of issue, added one by one.

    Attributes:
      shards: what is moved; a hop moves one piece of one shard.
      ends, moved, acts: per hop (source, destination), (shard, piece), (what it does, whether it
        crosses nodes, whether it waits for the tiles that produce its source).
      waits: (hop, hop that must have completed).
      sums: by (owner, piece) the hops that add to it at its owner.
      kept: by (owner, piece) the hop after which the second tensor holds the sum.
    """

    where: str
    mode: str
    shards: Shards
    ends: list[tuple[int, int]] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)
    acts: list[tuple[int, bool, bool]] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    sums: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    kept: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(
        self,
        src: int,
        dst: int,
        what: tuple[int, int],
        act: int,
        *,
        outer: bool = False,
        produced: bool = False,
        after: Sequence[int] = (),
    ) -> int:
        """Files a hop of ``what`` that waits for those numbered ``after``; returns its number.

        Raises InputError beyond ``MOST_HOPS`` hops.
        """
        number = len(self.ends)
        if number == MOST_HOPS:
            raise InputError(
                f"{self.where}: {self.shards.num_ranks} ranks and {self.shards.lo.shape[1]} pieces "
                f"a shard make more than {MOST_HOPS} operations; use fewer pieces, or a template "
                f"for flat groups"
            )
        self.ends.append((src, dst))
        self.moved.append(what)
        self.acts.append((act, outer, produced))
        self.waits += [(number, other) for other in after]
        if act == REDUCE and dst == what[0]:
            self.sums.setdefault(what, []).append(number)
        return number

    def transfers(self, reduce: int = 0, outer_channel: int = 0) -> Transfers:
        """The hops as transfers; those between nodes travel on ``outer_channel``."""
        pull = one_of(self.where, "mode", self.mode, MODES) == 1
        src, dst = np.array(self.ends, np.int64).reshape(-1, 2).T
        shard, piece = np.array(self.moved, np.int64).reshape(-1, 2).T
        act, outer, produced = np.array(self.acts, np.int64).reshape(-1, 3).T
        waiter, awaited = np.array(self.waits, np.int64).reshape(-1, 2).T
        return make_transfers(
            src,
            dst,
            self.shards.lo[shard, piece],
            self.shards.hi[shard, piece],
            rank=dst if pull else src,
            src_tensor=np.where(act == SPREAD, 1, 0),
            dst_tensor=np.where(act >= KEEP, 1, 0),
            reduce=np.where(act == REDUCE, reduce, 0),
            channel=outer * outer_channel,
            waiter=waiter,
            awaited=awaited,
            produced=produced,
        )


def add_gather(hops: Hops, nodes: Nodes, act: int, produced: bool) -> None:
    """Every shard goes to an agent in each other node, and on to the others there as it comes.

    Within its node a rank first hands out its own shard, then what it stands for, piece by piece.
    """
    pieces, count = hops.shards.num_pieces, len(nodes.sizes)
    ranks = range(len(nodes.node))
    came: list[tuple[int, tuple[int, int], int]] = []
    for piece in range(pieces):
        for step in range(1, count):
            for rank in ranks:
                what, node = (rank, piece), (nodes.node[rank] + step) % count
                agent = nodes.agent(node, rank, piece, pieces)
                after = [hops.kept[what]] if act == SPREAD else []
                number = hops.add(
                    rank, agent, what, act, outer=True, produced=produced, after=after
                )
                came.append((agent, what, number))
    for piece in range(pieces):
        for step in range(1, nodes.largest):
            for rank in ranks:
                if step < nodes.sizes[nodes.node[rank]]:
                    peer = nodes.rank(nodes.node[rank], nodes.place[rank] + step)
                    after = [hops.kept[rank, piece]] if act == SPREAD else []
                    hops.add(rank, peer, (rank, piece), act, produced=produced, after=after)
    for agent, what, number in came:
        for step in range(1, nodes.sizes[nodes.node[agent]]):
            peer = nodes.rank(nodes.node[agent], nodes.place[agent] + step)
            hops.add(agent, peer, what, act, after=[number])


def add_reduce(hops: Hops, nodes: Nodes, produced: bool) -> None:
    """Partials of a shard meet at an agent in each other node, which hands on their sum.

    Within its node a rank first serves the agents, so that links between nodes begin early, then
    the owners.
    """
    pieces, count = hops.shards.num_pieces, len(nodes.sizes)
    ranks = range(len(nodes.node))
    stands: dict[tuple[int, int], list[int]] = {}  # by (agent, piece) the shards it stands for
    for piece in range(pieces):
        for step in range(1, count):
            for owner in ranks:
                node = (nodes.node[owner] + step) % count
                agent = nodes.agent(node, owner, piece, pieces)
                stands.setdefault((agent, piece), []).append(owner)
    met: dict[tuple[int, int, int], list[int]] = {}
    for piece in range(pieces):
        for step in range(1, nodes.largest):
            for rank in ranks:
                if step < nodes.sizes[nodes.node[rank]]:
                    agent = nodes.rank(nodes.node[rank], nodes.place[rank] + step)
                    for owner in stands.get((agent, piece), ()):
                        number = hops.add(rank, agent, (owner, piece), REDUCE, produced=produced)
                        met.setdefault((agent, owner, piece), []).append(number)
    for (agent, piece), owners in stands.items():
        for owner in owners:
            after, what = met.get((agent, owner, piece), ()), (owner, piece)
            hops.add(agent, owner, what, REDUCE, outer=True, produced=produced, after=after)
    for piece in range(pieces):
        for step in range(1, nodes.largest):
            for rank in ranks:
                if step < nodes.sizes[nodes.node[rank]]:
                    owner = nodes.rank(nodes.node[rank], nodes.place[rank] + step)
                    hops.add(rank, owner, (owner, piece), REDUCE, produced=produced)


def add_keep(hops: Hops, produced: bool) -> None:
    """Every owner copies its sums to the second tensor, each as soon as it is complete."""
    for piece in range(hops.shards.num_pieces):
        for rank in range(hops.shards.num_ranks):
            what = (rank, piece)
            after = hops.sums.get(what, ())
            hops.kept[what] = hops.add(rank, rank, what, KEEP, produced=produced, after=after)
