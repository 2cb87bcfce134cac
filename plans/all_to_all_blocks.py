"""All-to-all of blocks along one axis: block d of rank s becomes block s of rank d."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import axis_of, integer, one_of, origin_text
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.moves import MODES, Array, make_moves
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ir.shards import check_listed, cut_boxes, cut_shards
from syncopate_jax.registry import templates

NAME = "all_to_all_blocks"


@templates.register(NAME)
@checked
def all_to_all_blocks(
    num_ranks: int,
    shape: Sequence[int],
    *,
    counts: Sequence[Sequence[int]] | None = None,
    dtype: str = "bfloat16",
    axis: int = 0,
    split: int = 1,
    split_axis: int | None = None,
    shards: Sequence[int] | None = None,
    mode: str = "push",
    produced: bool = False,
    tensor: str = "send",
    out: str = "recv",
    name: str | None = None,
    channel: str = DEFAULT_CHANNEL,
) -> Plan:
    """Rank d ends, in ``out``, with the d-th block of every rank's ``tensor``, in rank order.

    Piece 0 of every block goes first, to s+1, s+2, …, then piece 1, and so on. The block a rank
    keeps is copied first in each such wave, or last where compute tiles produce the blocks. The
    receiving tensor is as long as the fullest rank needs.

    Args:
      shape: extents of the sending tensor on each rank, in elements.
      counts: [ranks][ranks] extent along ``axis`` that rank s sends to rank d, as an expert
        dispatch needs; each row may add up to less than the extent.
      split: pieces a block, cut along ``split_axis`` (``axis`` if None).
      shards: extent of the block for each destination, the same on every source; as equal as can
        be if None. Not together with ``counts``.
      mode: ``push`` lists each operation on its sender, ``pull`` on its receiver.
      produced: whether the blocks come from compute tiles.

    Raises:
      InputError: an argument is out of range, or a row of ``counts`` exceeds the extent.
    """
    where = name or NAME
    cut = cut_shards(where, num_ranks, shape, axis, shards)
    pull = one_of(where, "mode", mode, MODES) == 1
    along = cut.axis if split_axis is None else axis_of(where, "split_axis", split_axis, cut.shape)
    parts = min(integer(where, "split", split, 1), max(cut.shape[along], 1))
    check_listed(where, cut.num_ranks**2 * (parts + 1), "operations and goals")
    sent = _counts(where, cut.sizes, cut.shape[cut.axis], counts, shards)
    ranks = np.arange(cut.num_ranks)[:, None]
    offset = np.arange(cut.num_ranks) + (1 if produced else 0)
    other = (ranks + (-offset if pull else offset)) % cut.num_ranks
    src, dst = (other, ranks + 0 * offset) if pull else (ranks + 0 * offset, other)
    lo, hi, shift = _blocks(sent, cut.full, cut.axis)
    lo, hi = (
        np.swapaxes(side, 1, 2) for side in cut_boxes(lo[src, dst], hi[src, dst], along, parts)
    )
    moves = make_moves(
        src[:, None],
        dst[:, None],
        lo,
        hi,
        dst_lo=lo + shift[src, dst][:, None],
        dst_tensor=1,
        produced=produced,
    )
    origin = origin_text(
        NAME, num_ranks=num_ranks, axis=axis, split=split, split_axis=split_axis, mode=mode
    )
    received = (*cut.shape[: cut.axis], int(sent.sum(0).max()), *cut.shape[cut.axis + 1 :])
    return Plan(
        name=where,
        num_ranks=cut.num_ranks,
        tensors=(Tensor(tensor, cut.shape, dtype, True), Tensor(out, received, dtype, True)),
        initial=_initial(sent, cut.full, cut.axis, tensor, produced),
        goals=_goals(sent, cut.full, cut.axis, tensor, out),
        columns=moves.columns(),
        channels=(channel,),
        origins=(origin,),
    )


def _counts(
    where: str,
    sizes: tuple[int, ...],
    extent: int,
    counts: Sequence[Sequence[int]] | None,
    shards: Sequence[int] | None,
) -> Array:
    """[source, destination] extents along the axis."""
    ranks = len(sizes)
    if counts is None:
        return np.tile(np.array(sizes, np.int64), (ranks, 1))
    if shards is not None:
        raise InputError(f"{where}: counts and shards both given; give one of them")
    if len(counts) != ranks or any(len(row) != ranks for row in counts):
        raise InputError(
            f"{where}: counts has rows of {[len(row) for row in counts]}, "
            f"needs {ranks} rows of {ranks}"
        )
    sent = np.array(
        [
            [integer(where, f"counts[{s}][{d}]", count, 0) for d, count in enumerate(row)]
            for s, row in enumerate(counts)
        ],
        np.int64,
    )
    for s, total in enumerate(sent.sum(1).tolist()):
        if total > extent:
            raise InputError(
                f"{where}: rank {s} sends {total} in counts, its extent has only {extent}"
            )
    return sent


def _blocks(sent: Array, full: Box, axis: int) -> tuple[Array, Array, Array]:
    """[source, destination, d] boxes sent, and how far each lands from where it was read."""
    lo = np.zeros((*sent.shape, full.ndim), np.int64)
    hi = np.broadcast_to(np.array(full.hi, np.int64), lo.shape).copy()
    hi[..., axis] = np.cumsum(sent, axis=1)
    lo[..., axis] = hi[..., axis] - sent
    shift = np.zeros_like(lo)
    shift[..., axis] = np.cumsum(sent, axis=0) - sent - lo[..., axis]
    return lo, hi, shift


def _initial(sent: Array, full: Box, axis: int, tensor: str, produced: bool) -> tuple[Region, ...]:
    boxes = (full.with_axis(axis, 0, total) for total in sent.sum(1).tolist())
    return tuple(Region(s, tensor, box, produced) for s, box in enumerate(boxes) if box.size)


def _goals(sent: Array, full: Box, axis: int, tensor: str, out: str) -> tuple[Goal, ...]:
    lo, hi, shift = _blocks(sent, full, axis)
    there = np.all(hi > lo, axis=-1).T  # [destination, source]
    target, source = np.nonzero(there)
    start, end, by = (side[source, target] for side in (lo, hi, shift))
    sides = (side.tolist() for side in (target, source, start, start + by, end + by))
    return tuple(
        Goal(d, out, Box(tuple(low), tuple(high)), tensor, tuple(read), (s,))
        for d, s, read, low, high in zip(*sides, strict=True)
    )
