"""Shards: how one axis of a tensor is divided among ranks, and each rank's part into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import axis_of, extents, integer
from syncopate_jax.ir.chunk import Box, split_points

Array = np.ndarray
MAX_PIECES = 2**20  # of all shards together: plans list a transfer for each, and most rank by rank
MAX_LISTED = 2**24
"""Operations of a template's plan, and its goals where there are as many: at some 500 bytes each
while it is built, more would fill the memory of a usual machine."""


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """A tensor of ``shape`` cut along ``axis`` into a shard a rank, each cut into pieces.

    Attributes:
      shape: extents of the tensor, in elements.
      axis: the axis that is divided among ranks.
      sizes: [ranks] extent of each shard along ``axis``; may be 0.
      lo, hi: [ranks, pieces, dimensions] boxes of the pieces; some may be empty.
    """

    shape: tuple[int, ...]
    axis: int
    sizes: tuple[int, ...]
    lo: Array
    hi: Array

    @property
    def num_ranks(self) -> int:
        return len(self.sizes)

    @property
    def num_pieces(self) -> int:
        """Pieces a shard, empty ones included."""
        return self.lo.shape[1]

    @property
    def full(self) -> Box:
        """The whole tensor."""
        return Box.full(self.shape)

    def box(self, rank: int) -> Box:
        """The shard of ``rank``."""
        end = sum(self.sizes[: rank + 1])
        return self.full.with_axis(self.axis, end - self.sizes[rank], end)

    def boxes(self) -> list[Box]:
        """The shard of each rank."""
        ends = np.cumsum(self.sizes).tolist()
        return [
            self.full.with_axis(self.axis, end - size, end)
            for size, end in zip(self.sizes, ends, strict=True)
        ]


def cut_shards(
    where: str,
    num_ranks: int,
    shape: Sequence[int],
    axis: int,
    shards: Sequence[int] | None = None,
    split: int = 1,
    split_axis: int | None = None,
    *,
    hops: int = 0,
    called: tuple[str, str] = ("axis", "shards"),
) -> Shards:
    """Cuts ``shape`` along ``axis`` into ``num_ranks`` shards of ``split`` pieces each.

    Args:
      where: what the arguments belong to, for messages.
      shards: extent of each shard; as equal as can be if None.
      split: pieces a shard, as equal as can be; beyond its extent they are empty.
      split_axis: the axis along which shards are cut into pieces; ``axis`` if None.
      hops: operations that the plan will list for each piece.
      called: what the caller calls ``axis`` and ``shards``, for messages.

    Raises:
      InputError: an argument is out of range, ``shards`` do not add up to the extent, or there
        would be more pieces or operations than fit.
    """
    ranks = integer(where, "num_ranks", num_ranks, 1)
    whole = extents(where, shape)
    axis = axis_of(where, called[0], axis, whole)
    sizes = _sizes(where, ranks, whole, axis, shards, called[1])
    parts = integer(where, "split", split, 1)
    along = axis if split_axis is None else axis_of(where, "split_axis", split_axis, whole)
    pieces = ranks * max(1, min(parts, max(sizes) if along == axis else whole[along]))
    check_pieces(where, parts, pieces, ranks)
    check_listed(where, pieces * hops)
    start = np.cumsum((0, *sizes))
    lo = np.zeros((ranks, len(whole)), np.int64)
    hi = np.tile(np.array(whole, np.int64), (ranks, 1))
    lo[:, axis], hi[:, axis] = start[:-1], start[1:]
    return Shards(whole, axis, sizes, *cut_boxes(lo, hi, along, parts))


def check_pieces(where: str, split: int, pieces: int, ranks: int, called: str = "split") -> None:
    """Raises InputError where ``split`` makes more pieces of the shards of all ranks than fit."""
    if pieces > MAX_PIECES:
        raise InputError(
            f"{where}: {called} {split} makes {pieces} pieces of the shards of {ranks} ranks, at "
            f"most {MAX_PIECES} fit; give {called} a smaller number"
        )


def check_listed(where: str, count: int, what: str = "operations") -> None:
    """Raises InputError if a plan that lists ``count`` operations would not fit in memory."""
    if count > MAX_LISTED:
        raise InputError(
            f"{where}: the plan would list {count} {what}, at most {MAX_LISTED} fit; use fewer "
            f"ranks, such as those of a node, a smaller split, or template 'collective', which "
            f"lists one operation a rank"
        )


def cut_boxes(lo: Array, hi: Array, axis: int, parts: int) -> tuple[Array, Array]:
    """Cuts boxes [..., d] along ``axis`` into pieces [..., pieces, d], as equal as can be.

    There are ``parts`` pieces, or as many as the largest extent if that is less (the others would
    be empty for every box); larger pieces come first.
    """
    extent = hi[..., axis] - lo[..., axis]
    parts = max(1, min(parts, int(extent.max(initial=0))))
    size, rest = np.divmod(extent, parts)
    cuts = np.arange(parts + 1)
    at = lo[..., axis, None] + cuts * size[..., None] + np.minimum(cuts, rest[..., None])
    lo, hi = (np.repeat(side[..., None, :], parts, axis=-2) for side in (lo, hi))
    lo[..., axis], hi[..., axis] = at[..., :-1], at[..., 1:]
    return lo, hi


def _sizes(
    where: str,
    ranks: int,
    shape: tuple[int, ...],
    axis: int,
    shards: Sequence[int] | None,
    called: str,
) -> tuple[int, ...]:
    if shards is None:
        return tuple(np.diff(split_points(shape[axis], ranks)).tolist())
    sizes = tuple(integer(where, f"{called}[{i}]", size, 0) for i, size in enumerate(shards))
    if len(sizes) != ranks:
        raise InputError(f"{where}: {ranks} ranks need as many {called}, found {len(sizes)}")
    if sum(sizes) != shape[axis]:
        raise InputError(
            f"{where}: {called} {sizes} add up to {sum(sizes)}, "
            f"axis {axis} of shape {shape} needs {shape[axis]}"
        )
    return sizes
