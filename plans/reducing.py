"""Moves that reduce: each rank's partial of a shard goes to the shard's owner, directly or hop by
hop around a ring."""

from __future__ import annotations

import numpy as np

from syncopate_jax.ir.arguments import one_of
from syncopate_jax.ir.comm import REDUCTIONS
from syncopate_jax.ir.moves import Moves, relay
from syncopate_jax.ir.plan import Region
from syncopate_jax.ir.shards import Shards


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


def partial_regions(shards: Shards, tensor: str, produced: bool) -> tuple[Region, ...]:
    """Every rank holds a partial result of the whole tensor."""
    if shards.full.size == 0:
        return ()
    return tuple(Region(r, tensor, shards.full, produced) for r in range(shards.num_ranks))
