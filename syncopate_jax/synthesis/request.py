"""What is asked of synthesis, checked: a collective of some data over a group of a topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import (
    axis_of,
    dtype_name,
    extents,
    instance,
    integer,
    one_of,
    origin_text,
)
from syncopate_jax.ir.comm import COLLECTIVES, REDUCTIONS
from syncopate_jax.ir.moves import MODES
from syncopate_jax.ir.plan import ITEM_SIZES
from syncopate_jax.ir.shards import Shards, cut_shards
from syncopate_jax.ir.topology import Topology
from syncopate_jax.synthesis.bound import Bound, Demand, lower_bound
from syncopate_jax.synthesis.network import Network, make_network

Array = np.ndarray

REDUCING = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A collective to be synthesised.

    Attributes:
      where: name of the plan, for messages too.
      network: the links that its group may use.
      shards: what each member holds (of a reduction: owns) of the whole; of a broadcast, one shard;
        of an all-to-all along one axis, the blocks if all members send alike.
      sent: [members, members] extents of an all-to-all's blocks along its axis; empty otherwise.
      after: shards that an all-to-all between two axes ends with; None otherwise.
      pull: receivers list the transfers.
      reduce: index into ``comm.REDUCTIONS``.
      root: of a broadcast; else the first member.
      arguments: what to say of it in the plan's origin.
    """

    where: str
    kind: str
    network: Network
    shards: Shards
    sent: Array
    after: Shards | None
    dtype: str
    pull: bool
    reduce: int
    produced: bool
    root: int
    tensor: str
    out: str
    arguments: tuple[tuple[str, Any], ...]

    @property
    def topology(self) -> Topology:
        return self.network.topology

    @property
    def members(self) -> tuple[int, ...]:
        return self.network.members

    @property
    def itemsize(self) -> int:
        return ITEM_SIZES[self.dtype]

    def demand(self) -> Demand:
        """Bytes to be moved, by member."""
        shape, axis = self.shards.shape, self.shards.axis
        row = float(self.itemsize * np.prod([e for i, e in enumerate(shape) if i != axis]))
        sizes = np.array(self.shards.sizes, np.float64) * row
        if self.kind == "broadcast":
            sizes = np.eye(len(self.members))[self.members.index(self.root)] * sizes[0]
        if self.kind == "all_to_all":
            if self.after is None:
                sizes = self.sent * row
            else:
                other = shape[self.after.axis]
                sizes = sizes[:, None] * np.array(self.after.sizes) / max(other, 1)
            sizes = sizes * (1 - np.eye(len(self.members)))
        return Demand(self.kind, sizes)

    def bound(self) -> Bound:
        """What no plan for it can beat."""
        return lower_bound(self.network, self.demand(), self.pull)

    def origin(self, pieces: int) -> str:
        """What the plan's operations say of where they come from."""
        return origin_text(self.where, **dict(self.arguments), chunks=pieces)


def make_request(
    kind: str,
    topology: Topology,
    shape: Sequence[int],
    *,
    group: Sequence[int] | None = None,
    dimension: int = 0,
    sizes: Sequence[Any] | None = None,
    to_dimension: int | None = None,
    sizes_to: Sequence[int] | None = None,
    root: int | None = None,
    reduce: str = "sum",
    dtype: str = "bfloat16",
    channels: Sequence[str] | None = None,
    mode: str = "push",
    produced: bool | None = None,
    tensor: str | None = None,
    out: str | None = None,
    name: str | None = None,
) -> Request:
    """The request for these arguments, which are those of ``synthesize``; raises InputError."""
    where = name or f"synthesis_{kind}"
    one_of("synthesis", "kind", kind, COLLECTIVES)
    instance(where, "topology", topology, Topology)
    dtype = dtype_name(dtype)
    one_of(where, "dtype", dtype, tuple(sorted(ITEM_SIZES)))
    members = _group(where, topology, group)
    whole = extents(where, shape)
    head = _root(where, members, root) if kind == "broadcast" else None
    if kind != "broadcast" and root is not None:
        raise InputError(f"{where}: root {root} is given, but {kind} has none")
    if kind != "all_to_all" and (to_dimension is not None or sizes_to is not None):
        raise InputError(f"{where}: to_dimension and sizes_to are of an all_to_all, not of {kind}")
    network = make_network(where, topology, members, channels, None if head is None else (head,))
    sent, after = np.zeros((0, 0), np.int64), None
    if kind == "broadcast":
        if sizes is not None:
            raise InputError(f"{where}: sizes are given, but a broadcast has one tensor")
        shards = cut_shards(where, 1, whole, dimension)
    elif kind == "all_to_all" and to_dimension is None:
        if sizes_to is not None:
            raise InputError(f"{where}: sizes_to needs to_dimension")
        shards, sent = _blocks(where, len(members), whole, dimension, sizes)
    else:
        shards = cut_shards(where, len(members), whole, dimension, sizes)
        if to_dimension is not None:
            after = cut_shards(where, len(members), whole, to_dimension, sizes_to)
            if after.axis == shards.axis:
                raise InputError(
                    f"{where}: dimension and to_dimension are both {after.axis}; leave "
                    f"to_dimension out to exchange blocks of one dimension"
                )
    reducing = kind in REDUCING
    one_source = kind in ("all_gather", "broadcast") or after is not None
    return Request(
        where=where,
        kind=kind,
        network=network,
        shards=shards,
        sent=sent,
        after=after,
        dtype=dtype,
        pull=one_of(where, "mode", mode, MODES) == 1,
        reduce=1 + one_of(where, "reduce", reduce, REDUCTIONS[1:]),
        produced=reducing if produced is None else produced,
        root=members[0] if head is None else head,
        tensor=tensor or ("y" if reducing else "x" if one_source else "send"),
        out=out or ("out" if kind == "all_reduce" else "recv"),
        arguments=(
            ("kind", kind),
            ("topology", topology.name),
            ("group", None if members == tuple(range(topology.num_ranks)) else members),
            ("dimension", shards.axis),
            ("to_dimension", None if after is None else after.axis),
            ("root", head),
            ("mode", mode),
        ),
    )


def _group(where: str, topology: Topology, group: Sequence[int] | None) -> tuple[int, ...]:
    if group is None:
        return tuple(range(topology.num_ranks))
    members = tuple(integer(where, f"group[{i}]", rank, 0) for i, rank in enumerate(group))
    if not members:
        raise InputError(f"{where}: group is empty, needs at least one rank")
    outside = [rank for rank in members if rank >= topology.num_ranks]
    if outside:
        raise InputError(
            f"{where}: group has ranks {outside}, topology {topology.name} has "
            f"{topology.num_ranks} ranks"
        )
    if len(set(members)) != len(members):
        raise InputError(f"{where}: group {members} lists a rank twice")
    return members


def _root(where: str, members: tuple[int, ...], root: int | None) -> int:
    if root is None:
        return members[0]
    found = integer(where, "root", root, 0)
    if found not in members:
        raise InputError(f"{where}: root {found} is not one of the group {members}")
    return found


def _blocks(
    where: str, count: int, shape: tuple[int, ...], dimension: int, sizes: Sequence[Any] | None
) -> tuple[Shards, Array]:
    """The sending tensor's blocks, and the extents [source, destination] that are sent."""
    if sizes is None or not len(sizes) or np.ndim(sizes[0]) == 0:
        shards = cut_shards(where, count, shape, dimension, sizes)
        return shards, np.tile(np.array(shards.sizes, np.int64), (count, 1))
    shards = cut_shards(where, count, shape, dimension)
    if len(sizes) != count or any(len(row) != count for row in sizes):
        raise InputError(
            f"{where}: sizes has rows of {[len(row) for row in sizes]}, needs {count} rows of "
            f"{count}, a row a source"
        )
    sent = np.array(
        [
            [integer(where, f"sizes[{s}][{d}]", one, 0) for d, one in enumerate(row)]
            for s, row in enumerate(sizes)
        ],
        np.int64,
    )
    extent = shape[axis_of(where, "dimension", dimension, shape)]
    for s, total in enumerate(sent.sum(1).tolist()):
        if total > extent:
            raise InputError(
                f"{where}: the member at {s} sends {total} in sizes, its extent is only {extent}"
            )
    return shards, sent
