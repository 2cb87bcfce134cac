"""Reduce-scatter around a ring: the partial of shard k starts at k+1 and grows at every hop."""

from __future__ import annotations

from collections.abc import Sequence

from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import origin_text
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.shards import cut_shards
from syncopate_jax.plans.reducing import reduce_ring, reduction, scatter_plan
from syncopate_jax.registry import templates

NAME = "reduce_scatter_ring"


@templates.register(NAME)
@checked
def reduce_scatter_ring(
    num_ranks: int,
    shape: Sequence[int],
    *,
    reduce: str = "sum",
    dtype: str = "bfloat16",
    axis: int = 0,
    split: int = 1,
    split_axis: int | None = None,
    shards: Sequence[int] | None = None,
    mode: str = "push",
    produced: bool = True,
    tensor: str = "y",
    name: str | None = None,
    channel: str = DEFAULT_CHANNEL,
) -> Plan:
    """Every rank ends with its shard of the sum of a tensor that all ranks hold in full.

    At step t rank r hands what it holds of shard r-1-t to r+1, which adds it to its own partial. A
    hop waits for the tiles that produce the sender's partial and for the hop that added to it.
    Partials of other shards are overwritten on the way.

    A hop hands on what it holds in the tensor's dtype, and a bfloat16 or float16 sum would be
    rounded ``num_ranks - 1`` times: the ready operators therefore make the tensor float32 and round
    what ends at its owner. Do likewise with a kernel of your own (``ir.hops.in_float32``).

    Args:
      shape: extents of the whole tensor, in elements.
      reduce: ``sum`` or ``max``.
      split: pieces a shard, cut along ``split_axis`` (``axis`` if None).
      shards: extent of each rank's shard, may be 0; as equal as can be if None.
      mode: ``push`` lists each operation on its source, ``pull`` on its destination.
      produced: whether the partials come from compute tiles.

    Raises:
      InputError: an argument is out of range.
    """
    where = name or NAME
    cut = cut_shards(where, num_ranks, shape, axis, shards, split, split_axis, hops=num_ranks - 1)
    moves = reduce_ring(where, mode, cut, reduction(where, reduce), produced)
    origin = origin_text(
        NAME,
        num_ranks=num_ranks,
        reduce=reduce,
        axis=axis,
        split=split,
        split_axis=split_axis,
        mode=mode,
    )
    return scatter_plan(
        where, cut, moves.columns(), tensor, dtype, reduce, produced, (channel,), origin
    )
