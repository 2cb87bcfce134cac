"""All-reduce over nodes: hierarchical reduce-scatter, then a gather that follows piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import origin_text
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.shards import cut_shards
from syncopate_jax.plans.hierarchy import (
    SPREAD,
    Hops,
    add_gather,
    add_keep,
    add_reduce,
    make_nodes,
)
from syncopate_jax.plans.reducing import all_reduce_plan, reduction
from syncopate_jax.registry import templates

NAME = "hierarchical_all_reduce"


@templates.register(NAME)
@checked
def hierarchical_all_reduce(
    num_ranks: int,
    shape: Sequence[int],
    *,
    nodes: Sequence[int] | None = None,
    reduce: str = "sum",
    dtype: str = "bfloat16",
    axis: int = 0,
    split: int = 1,
    split_axis: int | None = None,
    shards: Sequence[int] | None = None,
    mode: str = "push",
    produced: bool = True,
    tensor: str = "y",
    out: str = "out",
    name: str | None = None,
    channel: str = DEFAULT_CHANNEL,
    outer_channel: str | None = None,
) -> Plan:
    """Every rank ends with the sum, in ``out``, of a tensor that all ranks hold in full.

    Rank d owns shard d. It is reduced as by ``hierarchical_reduce_scatter``; once a piece is
    complete its owner copies it to ``out``, from where it goes as by ``hierarchical_all_gather``.

    Args:
      shape: extents of the whole tensor, in elements.
      nodes: ranks of each node, in order; equal ones, as square as can be, if None.
      reduce: ``sum`` or ``max``.
      split: pieces a shard, cut along ``split_axis`` (``axis`` if None).
      shards: extent of the shard each rank reduces, may be 0; as equal as can be if None.
      mode: ``push`` lists each operation on its source, ``pull`` on its destination.
      produced: whether the partials come from compute tiles.
      out: name of the tensor that receives the sum.
      outer_channel: of the hops between nodes, such as ``nic``; ``channel`` if None.

    Raises:
      InputError: an argument is out of range, or ``nodes`` do not add up to ``num_ranks``.
    """
    where = name or NAME
    cut = cut_shards(
        where, num_ranks, shape, axis, shards, split, split_axis, hops=2 * num_ranks - 1
    )
    groups = make_nodes(where, cut.num_ranks, nodes)
    channels = tuple(dict.fromkeys((channel, outer_channel or channel)))
    hops = Hops(where, mode, cut)
    add_reduce(hops, groups, produced)
    add_keep(hops, produced)
    add_gather(hops, groups, SPREAD, produced=False)
    made = hops.transfers(reduction(where, reduce), outer_channel=len(channels) - 1)
    origin = origin_text(
        NAME,
        num_ranks=num_ranks,
        nodes=groups.sizes,
        reduce=reduce,
        axis=axis,
        split=split,
        split_axis=split_axis,
        mode=mode,
    )
    return all_reduce_plan(
        where,
        cut.num_ranks,
        cut,
        made.columns(),
        tensor,
        out,
        dtype,
        reduce,
        produced,
        channels,
        origin,
    )
