"""All-to-all over nodes: blocks within nodes and blocks between them travel side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import origin_text
from syncopate_jax.ir.columns import Columns
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.plan import Plan
from syncopate_jax.plans.all_to_all_blocks import all_to_all_blocks
from syncopate_jax.plans.hierarchy import Nodes, make_nodes
from syncopate_jax.registry import templates

NAME = "hierarchical_all_to_all"


@templates.register(NAME)
@checked
def hierarchical_all_to_all(
    num_ranks: int,
    shape: Sequence[int],
    *,
    nodes: Sequence[int] | None = None,
    counts: Sequence[Sequence[int]] | None = None,
    dtype: str = "bfloat16",
    axis: int = 0,
    split: int = 1,
    split_axis: int | None = None,
    shards: Sequence[int] | None = None,
    mode: str = "push",
    produced: bool = False,
    tensor: str = "send",
    out: str = "recv",
    name: str | None = None,
    channel: str = DEFAULT_CHANNEL,
    outer_channel: str | None = None,
) -> Plan:
    """Rank d ends, in ``out``, with the d-th block of every rank's ``tensor``, in rank order.

    Every block goes straight to its destination, to ranks of other nodes on ``outer_channel``. The
    ranks of a node begin with different places of another node, so that no two meet at one.

    Args:
      shape: extents of the sending tensor on each rank, in elements.
      nodes: ranks of each node, in order; equal ones, as square as can be, if None.
      counts, split, split_axis, shards, mode, produced: as of ``all_to_all_blocks``.
      outer_channel: of the blocks between nodes, such as ``nic``; ``channel`` if None.

    Raises:
      InputError: an argument is out of range, or ``nodes`` do not add up to ``num_ranks``.
    """
    where = name or NAME
    plan = all_to_all_blocks(
        num_ranks, shape, counts=counts, dtype=dtype, axis=axis, split=split,
        split_axis=split_axis, shards=shards, mode=mode, produced=produced, tensor=tensor, out=out,
        name=where,
    )  # fmt: skip
    groups = make_nodes(where, plan.num_ranks, nodes)
    channels = tuple(dict.fromkeys((channel, outer_channel or channel)))
    origin = origin_text(
        NAME,
        num_ranks=num_ranks,
        nodes=groups.sizes,
        axis=axis,
        split=split,
        split_axis=split_axis,
        mode=mode,
    )
    columns = _by_node(plan.columns, groups, mode == "pull", len(channels) - 1)
    return replace(plan, columns=columns, channels=channels, origins=(origin,))


def _by_node(c: Columns, nodes: Nodes, pull: bool, outer: int) -> Columns:
    """The operations, which wait for none other, by wave, then by node and place from the owner on.

    What a wave of ``all_to_all_blocks`` is has to be told from its ends: it meets each peer once.
    """
    node, place = np.array(nodes.node), np.array(nodes.place)
    sizes = np.array(nodes.sizes)
    peer = c.src_rank if pull else c.dst_rank
    sign = -1 if pull else 1
    far = sign * (node[peer] - node[c.rank]) % len(sizes)
    turn = sign * (place[peer] - place[c.rank]) % sizes[node[peer]]
    pair = np.lexsort((np.arange(c.n), peer, c.rank))
    new = np.ones(c.n, bool)
    new[1:] = (np.diff(c.rank[pair]) != 0) | (np.diff(peer[pair]) != 0)
    wave = np.empty(c.n, np.int64)
    first = np.flatnonzero(new) if c.n else np.zeros(0, np.int64)
    wave[pair] = np.arange(c.n) - np.repeat(first, np.diff(np.append(first, c.n)))
    order = np.lexsort((turn, far, wave, c.rank))
    moved = {
        name: getattr(c, name)[order] for name in Columns.__slots__ if len(getattr(c, name)) == c.n
    }
    kept = {name: getattr(c, name) for name in Columns.__slots__ if name not in moved}
    crossing = node[c.src_rank[order]] != node[c.dst_rank[order]]
    return Columns(**(moved | kept | {"channel": np.where(crossing, outer, 0)}))
