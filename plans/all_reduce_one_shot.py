"""All-reduce in one hop: each rank adds the whole partial of every other rank to its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import integer, one_of, origin_text
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.moves import MODES, Moves, make_moves
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.shards import cut_shards
from syncopate_jax.plans.reducing import PARTIAL, SUM, all_reduce_plan, reduction
from syncopate_jax.registry import templates

NAME = "all_reduce_one_shot"


@templates.register(NAME)
@checked
def all_reduce_one_shot(
    num_ranks: int,
    shape: Sequence[int],
    *,
    reduce: str = "sum",
    dtype: str = "bfloat16",
    axis: int = 0,
    split: int = 1,
    split_axis: int | None = None,
    mode: str = "push",
    produced: bool = True,
    tensor: str = "y",
    out: str = "out",
    name: str | None = None,
    channel: str = DEFAULT_CHANNEL,
) -> Plan:
    """Every rank ends with the sum, in ``out``, of a tensor that all ranks hold in full.

    Each rank copies its own partial to ``out`` and adds those of ranks r+1, r+2, … to it; in
    ``push`` mode they are sent to r+1, r+2, …. An addition waits for the copy of its piece on the
    rank where it adds, as a partial that sums arrive in could no longer be sent. One hop instead
    of the two of ``all_reduce_two_shot``, but ``num_ranks / 2`` times its traffic: for small
    tensors, and for those that cannot be divided among the ranks.

    Args:
      shape: extents of the whole tensor, in elements.
      reduce: ``sum`` or ``max``.
      axis: the axis that is cut into pieces if ``split_axis`` is None.
      split: pieces of the tensor; beyond its extent they are empty.
      mode: ``push`` lists each operation on its source, ``pull`` on its destination.
      produced: whether the partials come from compute tiles.
      out: name of the tensor that receives the sum.

    Raises:
      InputError: an argument is out of range.
    """
    where = name or NAME
    count = integer(where, "num_ranks", num_ranks, 1)
    whole = cut_shards(where, 1, shape, axis, None, split, split_axis, hops=count * count)
    pull = one_of(where, "mode", mode, MODES) == 1
    moves = _moves(count, whole.lo[0], whole.hi[0], pull, reduction(where, reduce), produced)
    origin = origin_text(
        NAME,
        num_ranks=num_ranks,
        reduce=reduce,
        axis=axis,
        split=split,
        split_axis=split_axis,
        mode=mode,
    )
    return all_reduce_plan(
        where,
        count,
        whole,
        moves.columns(),
        tensor,
        out,
        dtype,
        reduce,
        produced,
        (channel,),
        origin,
    )


def _moves(
    count: int, lo: np.ndarray, hi: np.ndarray, pull: bool, reduce: int, produced: bool
) -> Moves:
    """Step 0 is the rank's own copy, step k exchanges with the rank k further on.

    Args:
      lo, hi: [pieces, dimensions] boxes of the pieces.
      reduce: index into ``comm.REDUCTIONS``.
    """
    pieces, ndim = lo.shape
    rank = np.arange(count)[:, None, None]
    step = np.arange(count)[:, None]
    peer = (rank + step) % count
    receiver = rank if pull else peer
    lead = (count, count, pieces)
    return make_moves(
        peer if pull else rank,
        receiver,
        np.broadcast_to(lo, (*lead, ndim)),
        np.broadcast_to(hi, (*lead, ndim)),
        src_tensor=PARTIAL,
        dst_tensor=SUM,
        reduce=np.where(step == 0, 0, reduce),
        dep_rank=np.broadcast_to(np.where(step == 0, -1, receiver), lead)[..., None],
        dep_slot=np.broadcast_to(np.arange(pieces), lead)[..., None],
        produced=produced,
    )
