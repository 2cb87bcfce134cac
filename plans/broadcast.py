"""Broadcast of one rank's tensor: along a chain, piece by piece, or straight to every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import axis_of, integer, one_of, origin_text
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.moves import MODES, make_moves
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ir.shards import check_listed, cut_boxes, cut_shards
from syncopate_jax.registry import templates

NAME = "broadcast"


@templates.register(NAME)
@checked
def broadcast(
    num_ranks: int,
    shape: Sequence[int],
    *,
    algorithm: str = "chain",
    root: int = 0,
    dtype: str = "bfloat16",
    axis: int = 0,
    split: int = 1,
    split_axis: int | None = None,
    mode: str = "push",
    produced: bool = False,
    tensor: str = "x",
    name: str | None = None,
    channel: str = DEFAULT_CHANNEL,
) -> Plan:
    """Every rank ends with the tensor that ``root`` holds.

    ``chain``: each rank hands every piece to the next one as soon as it has it. ``direct``: the
    root serves root+1, root+2, … with a piece before it turns to the next piece.

    Args:
      shape: extents of the tensor, in elements.
      root: the rank that holds the tensor at the start.
      algorithm: ``chain`` or ``direct``.
      split: pieces, cut along ``split_axis`` (``axis`` if None).
      mode: ``push`` lists each operation on its sender, ``pull`` on its receiver.
      produced: whether the root's tensor comes from compute tiles.

    Raises:
      InputError: an argument is out of range.
    """
    where = name or NAME
    whole = cut_shards(where, 1, shape, axis)
    count = integer(where, "num_ranks", num_ranks, 1)
    first = integer(where, "root", root, 0)
    if first >= count:
        raise InputError(f"{where}: root {first} is not one of {count} ranks")
    chain = one_of(where, "algorithm", algorithm, ("chain", "direct")) == 0
    pull = one_of(where, "mode", mode, MODES) == 1
    along = (
        whole.axis if split_axis is None else axis_of(where, "split_axis", split_axis, whole.shape)
    )
    # Slots of a rank: a piece each in a chain or in pull mode, else a piece and a receiver each.
    turns = 1 if chain or pull else count - 1
    parts = min(integer(where, "split", split, 1), max(whole.shape[along], 1))
    check_listed(where, count * parts * turns)
    lo, hi = cut_boxes(whole.lo[0, 0], whole.hi[0, 0], along, parts)
    place = np.arange(1, count)  # of a receiver, counted from the root
    receiver = (first + place) % count
    sender = (first + place - 1) % count if chain else np.full(count - 1, first)
    driver = receiver if pull else sender
    turn = place - 1 if turns > 1 else 0 * place
    grid = (count, len(lo), turns)
    src, dst = np.zeros(grid, np.int64), np.zeros(grid, np.int64)
    src[driver, :, turn], dst[driver, :, turn] = sender[:, None], receiver[:, None]
    used = np.zeros(grid, bool)
    used[driver, :, turn] = True
    low = np.broadcast_to(lo[:, None], (*grid, whole.full.ndim))
    high = np.where(used[..., None], hi[:, None], low)
    relayed = chain & (src != first)
    dep = np.where(relayed, src if pull else (src - 1) % count, -1)
    moves = make_moves(
        src,
        dst,
        low,
        high,
        dep_rank=dep[..., None],
        dep_slot=np.broadcast_to(np.arange(len(lo))[:, None, None], (*grid, 1)),
        produced=produced & (src == first),
    )
    origin = origin_text(
        NAME,
        num_ranks=num_ranks,
        algorithm=algorithm,
        root=root,
        split=split,
        split_axis=along,
        mode=mode,
    )
    held = (Region(first, tensor, whole.full, produced),)
    goals = tuple(Goal(r, tensor, whole.full) for r in range(count))
    return Plan(
        name=where,
        num_ranks=count,
        tensors=(Tensor(tensor, whole.shape, dtype),),
        initial=held if whole.full.size else (),
        goals=goals if whole.full.size else (),
        columns=moves.columns(),
        channels=(channel,),
        origins=(origin,),
    )
