"""All-gather around a ring: rank r hands what it received last to r+1; only neighbours talk."""

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

NAME = "all_gather_ring"


@templates.register(NAME)
@checked
def all_gather_ring(
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

    At step t rank r hands the shard of r-t to r+1, piece by piece: a piece waits only for the
    operation that brought that same piece, so pieces pipeline around the ring.

    Args:
      shape: extents of the whole tensor, in elements.
      split: pieces a shard, cut along ``split_axis`` (``axis`` if None).
      shards: extent of each rank's shard, may be 0; as equal as can be if None.
      mode: ``push`` lists each hop on its sender, ``pull`` on its receiver.
      produced: whether shards come from compute tiles, which the first hop then waits for.

    Raises:
      InputError: an argument is out of range.
    """
    where = name or NAME
    cut = cut_shards(where, num_ranks, shape, axis, shards, split, split_axis, hops=num_ranks - 1)
    ranks = np.arange(cut.num_ranks)[:, None]
    step = np.arange(cut.num_ranks - 1)
    moves = relay(
        where,
        mode,
        cut,
        (ranks + 1 + 0 * step) % cut.num_ranks,
        (ranks - step) % cut.num_ranks,
        prev_rank=((ranks - 1) % cut.num_ranks)[..., None],
        prev_step=(step - 1)[None, :, None],
        produced=produced & (step == 0),
    )
    origin = origin_text(
        NAME, num_ranks=num_ranks, axis=axis, split=split, split_axis=split_axis, mode=mode
    )
    return gather_plan(where, cut, moves.columns(), tensor, dtype, produced, (channel,), origin)
