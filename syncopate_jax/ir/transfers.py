"""Transfers: a flat list of P2P operations in the order of issue, whose dependencies name each
other by number. What is drawn up as one list over all ranks becomes columns here, without loops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncopate_jax.ir.columns import Columns, make_columns

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """``n`` P2P operations; those of one rank are issued in the order in which they stand.

    Attributes:
      rank, src_rank, dst_rank, src_tensor, dst_tensor, reduce, channel: [n] as in ``Columns``.
      src_lo, src_hi, dst_lo: [n, d] what is read, and where it is written.
      waiter, awaited: [m] numbers of operations: each waiter starts after what it awaits.
      produced: [n] whether it waits for the tiles that produce its source chunk.
    """

    rank: Array
    src_rank: Array
    dst_rank: Array
    src_tensor: Array
    dst_tensor: Array
    reduce: Array
    channel: Array
    src_lo: Array
    src_hi: Array
    dst_lo: Array
    waiter: Array
    awaited: Array
    produced: Array

    def columns(self) -> Columns:
        """The operations whose boxes are not empty; dependencies on those left out are left out."""
        keep = np.all(self.src_hi > self.src_lo, axis=1)
        order = np.flatnonzero(keep)
        order = order[np.argsort(self.rank[order], kind="stable")]
        rank = self.rank[order]
        place = np.full(len(self.rank), -1, np.int64)
        place[order] = np.arange(len(order))
        waiter, awaited = place[self.waiter], place[self.awaited]
        real = (waiter >= 0) & (awaited >= 0)
        waiter, awaited = waiter[real], awaited[real]
        by_waiter = np.lexsort((awaited, waiter))
        waiter, awaited = waiter[by_waiter], awaited[by_waiter]
        produced = self.produced[order]
        src_rank, src_tensor = self.src_rank[order], self.src_tensor[order]
        lo, hi, dst_lo = self.src_lo[order], self.src_hi[order], self.dst_lo[order]
        counts = np.bincount(waiter, minlength=len(order))
        return make_columns(
            len(order),
            lo.shape[1],
            rank=rank,
            src_rank=src_rank,
            dst_rank=self.dst_rank[order],
            src_tensor=src_tensor,
            dst_tensor=self.dst_tensor[order],
            src_lo=lo,
            src_hi=hi,
            dst_lo=dst_lo,
            dst_hi=dst_lo + (hi - lo),
            reduce=self.reduce[order],
            channel=self.channel[order],
            dep_start=np.concatenate(([0], np.cumsum(counts))),
            dep_rank=rank[awaited],
            dep_index=awaited - np.searchsorted(rank, rank[awaited]),
            cdep_start=np.concatenate(([0], np.cumsum(produced))),
            cdep_rank=src_rank[produced],
            cdep_tensor=src_tensor[produced],
            cdep_lo=lo[produced],
            cdep_hi=hi[produced],
        )


def make_transfers(
    src_rank: Array,
    dst_rank: Array,
    src_lo: Array,
    src_hi: Array,
    *,
    rank: Array | None = None,
    dst_lo: Array | None = None,
    src_tensor: Array | int = 0,
    dst_tensor: Array | int = 0,
    reduce: Array | int = 0,
    channel: Array | int = 0,
    waiter: Array | None = None,
    awaited: Array | None = None,
    produced: Array | bool = False,
) -> Transfers:
    """Transfers from arrays of ``n`` entries, or numbers that stand for all of them.

    ``rank`` is ``src_rank`` if None (pushes); ``dst_lo`` is ``src_lo`` if None.
    """
    n = len(src_rank)
    none = np.zeros(0, np.int64)

    def wide(value: Array | int | bool) -> Array:
        return np.broadcast_to(value, (n,))

    return Transfers(
        rank=src_rank if rank is None else rank,
        src_rank=src_rank,
        dst_rank=wide(dst_rank),
        src_tensor=wide(src_tensor),
        dst_tensor=wide(dst_tensor),
        reduce=wide(reduce),
        channel=wide(channel),
        src_lo=src_lo,
        src_hi=src_hi,
        dst_lo=src_lo if dst_lo is None else dst_lo,
        waiter=none if waiter is None else waiter,
        awaited=none if awaited is None else awaited,
        produced=wide(produced).astype(bool),
    )


def join_transfers(parts: list[Transfers]) -> Transfers:
    """Lists one after the other; numbers of operations count from the start of the first."""
    before = np.cumsum([0, *(len(part.rank) for part in parts[:-1])])
    joined = {}
    for name in Transfers.__slots__:
        columns = [getattr(part, name) for part in parts]
        if name in ("waiter", "awaited"):
            columns = [column + start for column, start in zip(columns, before, strict=True)]
        joined[name] = np.concatenate(columns)
    return Transfers(**joined)
