"""All-gather over nodes: within nodes and between them at once, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import origin_text
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.shards import cut_shards
from syncopate_jax.plans.gathering import gather_plan
from syncopate_jax.plans.hierarchy import GATHER, Hops, add_gather, make_nodes
from syncopate_jax.registry import templates

NAME = "hierarchical_all_gather"


@templates.register(NAME)
@checked
def hierarchical_all_gather(
    num_ranks: int,
    shape: Sequence[int],
    *,
    nodes: Sequence[int] | None = None,
    dtype: str = "bfloat16",
    axis: int = 0,
    split: int = 1,
    split_axis: int | None = None,
    shards: Sequence[int] | None = None,
    mode: str = "push",
    produced: bool = False,
    tensor: str = "x",
    name: str | None = None,
    channel: str = DEFAULT_CHANNEL,
    outer_channel: str | None = None,
) -> Plan:
    """Every rank ends with the whole of a tensor that is sharded along ``axis``.

    A shard crosses once to every other node, to one rank there (with nodes of one size, the one at
    its owner's place), which hands each piece on to its node as it arrives. Meanwhile ranks
    exchange their own shards within their nodes.

    Args:
      shape: extents of the whole tensor, in elements.
      nodes: ranks of each node, in order; equal ones, as square as can be, if None.
      split: pieces a shard, cut along ``split_axis`` (``axis`` if None).
      shards: extent of each rank's shard, may be 0; as equal as can be if None.
      mode: ``push`` lists each hop on its sender, ``pull`` on its receiver.
      produced: whether shards come from compute tiles, which the first hops then wait for.
      outer_channel: of the hops between nodes, such as ``nic``; ``channel`` if None.

    Raises:
      InputError: an argument is out of range, or ``nodes`` do not add up to ``num_ranks``.
    """
    where = name or NAME
    cut = cut_shards(where, num_ranks, shape, axis, shards, split, split_axis, hops=num_ranks - 1)
    groups = make_nodes(where, cut.num_ranks, nodes)
    channels = tuple(dict.fromkeys((channel, outer_channel or channel)))
    hops = Hops(where, mode, cut)
    add_gather(hops, groups, GATHER, produced)
    made = hops.transfers(outer_channel=len(channels) - 1)
    origin = origin_text(
        NAME,
        num_ranks=num_ranks,
        nodes=groups.sizes,
        axis=axis,
        split=split,
        split_axis=split_axis,
        mode=mode,
    )
    return gather_plan(where, cut, made.columns(), tensor, dtype, produced, channels, origin)
