"""All-gather on two rings: inner rings inside groups, and an outer ring across groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import integer, origin_text
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.moves import Array, relay
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.shards import cut_shards
from syncopate_jax.plans.gathering import gather_plan, square_divisor
from syncopate_jax.registry import templates

NAME = "all_gather_double_ring"


@templates.register(NAME)
@checked
def all_gather_double_ring(
    num_ranks: int,
    shape: Sequence[int],
    *,
    inner: int | None = None,
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

    Ranks form groups of ``inner`` in order. At outer step u, a rank first hands to its place in
    the next group the shard that came from u groups back, and then passes the shards of that
    group around its own inner ring. The outer hop is issued first, because the next outer step
    cannot begin without it; it crosses groups once a shard and place, on ``outer_channel``.

    Args:
      shape: extents of the whole tensor, in elements.
      inner: ranks a group; must divide ``num_ranks``; the divisor nearest its square root from
        below if None.
      split: pieces a shard, cut along ``split_axis`` (``axis`` if None).
      shards: extent of each rank's shard, may be 0; as equal as can be if None.
      mode: ``push`` lists each hop on its sender, ``pull`` on its receiver.
      produced: whether shards come from compute tiles, which the first hops then wait for.
      outer_channel: port of the hops between groups; ``channel`` if None.

    Raises:
      InputError: an argument is out of range, or ``inner`` does not divide ``num_ranks``.
    """
    where = name or NAME
    cut = cut_shards(where, num_ranks, shape, axis, shards, split, split_axis, hops=num_ranks - 1)
    ranks = cut.num_ranks
    size = group_size(where, ranks, inner)
    place, group = np.arange(ranks) % size, np.arange(ranks) // size
    groups = ranks // size

    def at(group: Array, place: Array) -> Array:
        return group % groups * size + place % size

    hops: list[tuple[Array, Array, Array, int, bool]] = []
    arrived = -1  # step whose outer hop brought the shard that this outer step starts from
    for u in range(groups):
        brought, arrived = arrived, len(hops)
        giver, since = at(group - 1, place), brought
        if u < groups - 1:
            hops.append((at(group + 1, place), at(group - u, place), giver, since, True))
        for t in range(size - 1):
            hops.append((at(group, place + 1), at(group - u, place - t), giver, since, False))
            giver, since = at(group, place - 1), len(hops) - 1
    steps = len(hops)
    receiver, owner, came = (
        np.array([hop[i] for hop in hops], np.int64).reshape(steps, ranks).T for i in range(3)
    )
    last = np.array([hop[3] for hop in hops], np.int64)
    channels = tuple(dict.fromkeys((channel, outer_channel or channel)))
    moves = relay(
        where,
        mode,
        cut,
        receiver,
        owner,
        prev_rank=came[..., None],
        prev_step=last[None, :, None],
        channel=np.array([hop[4] for hop in hops], np.int64) * (len(channels) - 1),
        produced=produced & (last < 0),
    )
    origin = origin_text(
        NAME, num_ranks=ranks, inner=size, axis=axis, split=split, split_axis=split_axis, mode=mode
    )
    return gather_plan(where, cut, moves.columns(), tensor, dtype, produced, channels, origin)


def group_size(where: str, num_ranks: int, inner: int | None) -> int:
    """``inner``, or the largest divisor of ``num_ranks`` not above its square root if None.

    Raises InputError when ``inner`` does not divide ``num_ranks``.
    """
    if inner is None:
        return square_divisor(num_ranks)
    size = integer(where, "inner", inner, 1)
    if num_ranks % size:
        raise InputError(
            f"{where}: inner {size} does not divide {num_ranks} ranks; "
            f"{num_ranks % size} would be left over"
        )
    return size
