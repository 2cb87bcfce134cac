"""All-to-all that moves a tensor's sharding from one axis to another, wave by wave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import one_of, origin_text
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.moves import MODES, make_moves
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ir.shards import cut_shards
from syncopate_jax.registry import templates

NAME = "all_to_all_waves"


@templates.register(NAME)
@checked
def all_to_all_waves(
    num_ranks: int,
    shape: Sequence[int],
    *,
    split_from: int = 0,
    split_to: int = 1,
    dtype: str = "bfloat16",
    split: int = 1,
    split_axis: int | None = None,
    shards: Sequence[int] | None = None,
    shards_to: Sequence[int] | None = None,
    mode: str = "push",
    produced: bool = False,
    tensor: str = "x",
    name: str | None = None,
    channel: str = DEFAULT_CHANNEL,
) -> Plan:
    """Rank s starts with block s along ``split_from``; rank d ends with block d along ``split_to``.

    Both are blocks of one shared tensor, so what a rank keeps stays in place. Piece 0 of every
    exchange goes first, s -> s+1, s -> s+2, …; then piece 1, and so on: a tile that needs a piece
    from every peer can run after the wave that brings it.

    Args:
      shape: extents of the whole tensor, in elements.
      split_from, split_to: the axes whose blocks ranks have before and after.
      split: pieces an exchange, cut along ``split_axis`` (``split_to`` if None).
      shards, shards_to: extents of the blocks before and after, may be 0; as equal as can be if
        None.
      mode: ``push`` lists each operation on its sender, ``pull`` on its receiver.
      produced: whether the blocks come from compute tiles.

    Raises:
      InputError: an argument is out of range, or both axes are the same.
    """
    where = name or NAME
    names_to = ("split_to", "shards_to")
    hops = num_ranks - 1
    before = cut_shards(
        where, num_ranks, shape, split_from, shards, hops=hops, called=("split_from", "shards")
    )
    after = cut_shards(
        where, num_ranks, shape, split_to, shards_to, split, split_axis, hops=hops, called=names_to
    )
    if before.axis == after.axis:
        raise InputError(
            f"{where}: split_from and split_to are both axis {before.axis}; "
            "exchange blocks of one axis with all_to_all_blocks"
        )
    pull = one_of(where, "mode", mode, MODES) == 1
    if split_axis is not None and split_axis % len(before.shape) == before.axis:
        before = cut_shards(where, num_ranks, shape, split_from, shards, split, hops=hops)
        after = cut_shards(where, num_ranks, shape, split_to, shards_to)
    ranks = np.arange(before.num_ranks)[:, None, None]
    piece = np.arange(max(before.num_pieces, after.num_pieces))[:, None]
    offset = np.arange(1, before.num_ranks)
    src, dst = (
        ((ranks - offset) % before.num_ranks, ranks + 0 * offset)
        if pull
        else (ranks + 0 * offset, (ranks + offset) % before.num_ranks)
    )
    sides = ((before, src), (after, dst))
    cuts = [(s, rank, np.minimum(piece, s.num_pieces - 1)) for s, rank in sides]
    lo = np.maximum(*(s.lo[rank, at] for s, rank, at in cuts))
    hi = np.minimum(*(s.hi[rank, at] for s, rank, at in cuts))
    moves = make_moves(src, dst, lo, np.maximum(lo, hi), produced=produced)
    origin = origin_text(
        NAME,
        num_ranks=num_ranks,
        split_from=split_from,
        split_to=split_to,
        split=split,
        split_axis=split_axis,
        mode=mode,
    )
    regions = (Region(r, tensor, box, produced) for r, box in enumerate(before.boxes()))
    goals = (Goal(r, tensor, box) for r, box in enumerate(after.boxes()))
    return Plan(
        name=where,
        num_ranks=before.num_ranks,
        tensors=(Tensor(tensor, before.shape, dtype),),
        initial=tuple(region for region in regions if region.box.size),
        goals=tuple(goal for goal in goals if goal.box.size),
        columns=moves.columns(),
        channels=(channel,),
        origins=(origin,),
    )
