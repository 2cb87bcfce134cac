"""What plans that reduce share: partials that go to the owner of their shard, directly or hop by
hop around a ring, and the plans around such moves: who holds what, and what all end with."""

from __future__ import annotations

import numpy as np

from syncopate_jax.ir.arguments import one_of
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.columns import Columns
from syncopate_jax.ir.comm import REDUCTIONS
from syncopate_jax.ir.moves import Moves, relay
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ir.shards import Shards

PARTIAL, SUM = 0, 1  # positions of an all-reduce's two tensors


def reduction(where: str, reduce: str) -> int:
    """Index of ``reduce`` in ``comm.REDUCTIONS``; raises InputError unless it is sum or max."""
    return 1 + one_of(where, "reduce", reduce, REDUCTIONS[1:])


def reduce_direct(where: str, mode: str, shards: Shards, reduce: int, produced: bool) -> Moves:
    """Each rank's partial of a shard goes to the shard's owner; nothing waits for another move.

    In push mode rank r serves the owners r+1, r+2, …; in pull mode owner r fetches from r+1, r+2, …
    """
    ranks = np.arange(shards.num_ranks)[:, None]
    offset = np.arange(1, shards.num_ranks)
    owner = (ranks + (offset if mode == "push" else -offset)) % shards.num_ranks
    return relay(where, mode, shards, owner, owner, reduce=reduce, produced=produced)


def reduce_ring(where: str, mode: str, shards: Shards, reduce: int, produced: bool) -> Moves:
    """The sum for shard k starts at k+1 and grows at every hop around the ring, ending at k."""
    ranks = np.arange(shards.num_ranks)[:, None]
    step = np.arange(shards.num_ranks - 1)
    return relay(
        where,
        mode,
        shards,
        (ranks + 1 + 0 * step) % shards.num_ranks,
        (ranks - 1 - step) % shards.num_ranks,
        prev_rank=((ranks - 1) % shards.num_ranks)[..., None],
        prev_step=(step - 1)[None, :, None],
        reduce=reduce,
        produced=produced,
    )


def scatter_plan(
    name: str,
    shards: Shards,
    columns: Columns,
    tensor: str,
    dtype: str,
    reduce: str,
    produced: bool,
    channels: tuple[str, ...],
    origin: str,
) -> Plan:
    """A plan in which each rank starts with a partial of ``tensor`` and ends with its shard of all.

    Raises InputError when the tensor's name or dtype is not valid.
    """
    ranks = tuple(range(shards.num_ranks))
    goals = (
        Goal(r, tensor, box, ranks=ranks, reduce=reduce) for r, box in enumerate(shards.boxes())
    )
    return Plan(
        name=name,
        num_ranks=shards.num_ranks,
        tensors=(Tensor(tensor, shards.shape, dtype, per_rank=True),),
        initial=partial_regions(shards.num_ranks, shards.full, tensor, produced),
        goals=tuple(goal for goal in goals if goal.box.size),
        columns=columns,
        channels=channels,
        origins=(origin,),
    )


def all_reduce_plan(
    name: str,
    num_ranks: int,
    whole: Shards,
    columns: Columns,
    tensor: str,
    out: str,
    dtype: str,
    reduce: str,
    produced: bool,
    channels: tuple[str, ...],
    origin: str,
) -> Plan:
    """A plan in which each rank starts with a partial of ``tensor`` and ends with all of ``out``.

    Args:
      whole: shards of the tensor, however many; its shape and its full box count.
      columns: operations from the tensor at ``PARTIAL`` to ``out`` at ``SUM``.

    Raises InputError when a tensor's name or the dtype is not valid.
    """
    ranks, full = tuple(range(num_ranks)), whole.full
    goals = tuple(Goal(r, out, full, tensor, ranks=ranks, reduce=reduce) for r in ranks)
    return Plan(
        name=name,
        num_ranks=num_ranks,
        tensors=(
            Tensor(tensor, whole.shape, dtype, per_rank=True),
            Tensor(out, whole.shape, dtype),
        ),
        initial=partial_regions(num_ranks, full, tensor, produced),
        goals=goals if full.size else (),
        columns=columns,
        channels=channels,
        origins=(origin,),
    )


def partial_regions(num_ranks: int, full: Box, tensor: str, produced: bool) -> tuple[Region, ...]:
    """Every rank holds a partial result of the whole tensor."""
    if full.size == 0:
        return ()
    return tuple(Region(r, tensor, full, produced) for r in range(num_ranks))
