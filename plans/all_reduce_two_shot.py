"""All-reduce in two phases: reduce-scatter, then all-gather of the sums into a second tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import integer, one_of, origin_text
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.moves import Array, Moves, join_columns, relay
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.shards import Shards, cut_shards
from syncopate_jax.plans.reducing import (
    PARTIAL,
    SUM,
    all_reduce_plan,
    reduce_direct,
    reduce_ring,
    reduction,
)
from syncopate_jax.registry import templates

NAME = "all_reduce_two_shot"


@templates.register(NAME)
@checked
def all_reduce_two_shot(
    num_ranks: int,
    shape: Sequence[int],
    *,
    algorithm: str = "direct",
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
    most_listed: int = 72,
) -> Plan:
    """Every rank ends with the sum, in ``out``, of a tensor that all ranks hold in full.

    Rank d owns shard d. With ``direct`` all others add their partials to it, and each operation
    that copies a sum out of it waits for all of them; with ``ring`` partials and sums go around a
    ring, and one hop stands for all before it. Of what a ring carries in fewer than 32 bits see
    ``reduce_scatter_ring``.

    If each copy lists all it waits for, dependencies grow with the cube of the ranks. Beyond
    ``most_listed`` ranks only the owner's own copy lists them, and the others wait for that: which
    delays the sums by one local copy of a shard, little beside as many remote ones as ranks. GPU
    backends whose tiles are sent by who computes them cannot wait for a copy; they need all ranks
    in one NVLink domain, and the largest has 72 devices.

    Args:
      shape: extents of the whole tensor, in elements.
      algorithm: ``direct`` or ``ring``, of both phases.
      reduce: ``sum`` or ``max``.
      split: pieces a shard, cut along ``split_axis`` (``axis`` if None).
      shards: extent of the shard each rank reduces, may be 0; as equal as can be if None.
      mode: ``push`` lists each operation on its source, ``pull`` on its destination.
      produced: whether the partials come from compute tiles.
      out: name of the tensor that receives the sum.
      most_listed: of ``direct``, see above; copies among 72 ranks list 368 064 operations in all.

    Raises:
      InputError: an argument is out of range.
    """
    where = name or NAME
    cut = cut_shards(
        where, num_ranks, shape, axis, shards, split, split_axis, hops=2 * num_ranks - 1
    )
    ring = one_of(where, "algorithm", algorithm, ("direct", "ring")) == 1
    phase = reduce_ring if ring else reduce_direct
    phases = [phase(where, mode, cut, reduction(where, reduce), produced)]
    joined = cut.num_ranks > integer(where, "most_listed", most_listed, 0)
    if ring:
        phases += _gather_ring(where, mode, cut, produced)
    else:
        phases += _gather_direct(where, mode, cut, produced, joined)
    origin = origin_text(
        NAME,
        num_ranks=num_ranks,
        algorithm=algorithm,
        reduce=reduce,
        axis=axis,
        split=split,
        split_axis=split_axis,
        mode=mode,
    )
    columns = join_columns(phases)
    return all_reduce_plan(
        where, cut.num_ranks, cut, columns, tensor, out, dtype, reduce, produced, (channel,), origin
    )


def _gather_direct(
    where: str, mode: str, shards: Shards, produced: bool, joined: bool
) -> list[Moves]:
    """Owners hand their sums to r+1, r+2, … and to themselves, after every reduction into them.

    If ``joined``, they copy them to themselves first, and hand them on once that is done.
    """
    count = shards.num_ranks
    ranks = np.arange(count)[:, None]
    step = np.arange(count - 1)
    contributor = (ranks - 1 - step) % count  # the one that lists that step's push to this rank

    def hand(offset: Array, prev_rank: Array, prev_step: Array) -> Moves:
        return relay(
            where,
            mode,
            shards,
            (ranks + (offset if mode == "push" else -offset)) % count,
            ranks,
            prev_rank=prev_rank[:, None, :],
            prev_step=prev_step[None, None, :],
            src_tensor=PARTIAL,
            dst_tensor=SUM,
            produced=produced,
        )

    if not joined:
        return [hand(np.arange(1, count + 1), contributor, step)]  # the last is the owner's own
    own = np.array([count - 1])  # step of the owner's copy, behind the reductions
    return [hand(np.array([0]), contributor, step), hand(np.arange(1, count), ranks, own)]


def _gather_ring(where: str, mode: str, shards: Shards, produced: bool) -> list[Moves]:
    """Owners hand their sums to r+1, which hands them on; each owner copies its own to itself."""
    count = shards.num_ranks
    ranks = np.arange(count)[:, None]
    step = np.arange(count - 1)
    before = ((ranks - 1) % count)[..., None]
    reduced = count - 2  # step of the hop that completes a shard at its owner; -1 for one rank

    def hop(receiver: Array, owner: Array, prev: Array, source: Array, own: Array) -> Moves:
        return relay(
            where,
            mode,
            shards,
            receiver % count,
            owner % count,
            prev_rank=before,
            prev_step=prev[None, :, None],
            src_tensor=source,
            dst_tensor=SUM,
            produced=produced & own,
        )

    first = step == 0
    forward = hop(
        ranks + 1 + 0 * step, ranks - step, reduced + step, np.where(first, PARTIAL, SUM), first
    )
    once = np.array([True])
    copy = hop(ranks, ranks, np.array([reduced]), np.array([PARTIAL]), once)
    return [forward, copy]
