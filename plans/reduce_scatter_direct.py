"""Reduce-scatter in one hop: each rank pushes its partial of every shard straight to its owner."""

from __future__ import annotations

from collections.abc import Sequence

from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import origin_text
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.shards import cut_shards
from syncopate_jax.plans.reducing import reduce_direct, reduction, scatter_plan
from syncopate_jax.registry import templates

NAME = "reduce_scatter_direct"


@templates.register(NAME)
@checked
def reduce_scatter_direct(
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

    In ``push`` mode rank r serves the owners r+1, r+2, …; in ``pull`` mode owner r fetches from
    r+1, r+2, …. An operation waits only for the tiles that produce its source chunk: reductions
    commute with each other and with the production of what they add to.

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
    moves = reduce_direct(where, mode, cut, reduction(where, reduce), produced)
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
