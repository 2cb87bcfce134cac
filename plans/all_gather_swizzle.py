"""All-gather in one hop: rank r serves r+1, r+2, … so that no two ranks load one link at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import origin_text
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.moves import relay
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.shards import cut_shards
from syncopate_jax.plans.gathering import gather_plan
from syncopate_jax.registry import templates

NAME = "all_gather_swizzle"


@templates.register(NAME)
@checked
def all_gather_swizzle(
    num_ranks: int,
    shape: Sequence[int],
    *,
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
) -> Plan:
    """Every rank ends with the whole of a tensor that is sharded along ``axis``.

    In ``push`` mode rank r sends its shard to r+1, r+2, …; in ``pull`` mode it fetches theirs in
    that order. No operation waits for another.

    Args:
      shape: extents of the whole tensor, in elements.
      split: pieces a shard, cut along ``split_axis`` (``axis`` if None).
      shards: extent of each rank's shard, may be 0; as equal as can be if None.
      mode: ``push`` lists each operation on its sender, ``pull`` on its receiver.
      produced: whether shards come from compute tiles, which each operation then waits for.

    Raises:
      InputError: an argument is out of range.
    """
    where = name or NAME
    cut = cut_shards(where, num_ranks, shape, axis, shards, split, split_axis, hops=num_ranks - 1)
    ranks = np.arange(cut.num_ranks)[:, None]
    offset = np.arange(1, cut.num_ranks)
    towards = ranks + (offset if mode == "push" else -offset)
    moves = relay(where, mode, cut, towards % cut.num_ranks, ranks, produced=produced)
    origin = origin_text(
        NAME, num_ranks=num_ranks, axis=axis, split=split, split_axis=split_axis, mode=mode
    )
    return gather_plan(where, cut, moves.columns(), tensor, dtype, produced, (channel,), origin)
