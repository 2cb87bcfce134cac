"""What the communicating programs of a Triton kernel do: operations, their waits and signals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from syncopate_jax.backends import rank_table
from syncopate_jax.backends.buffers import Buffer, result_tensor
from syncopate_jax.backends.gpu_buffers import INPUT, RESULT, Key
from syncopate_jax.backends.gpu_tables import LayoutMaker, Points, own_key
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir.text import row_text
from syncopate_jax.kernel.triton_body import TritonBody
from syncopate_jax.native import copies
from syncopate_jax.triton_source import scheme as parts
from syncopate_jax.triton_source.scheme import Columns, Lists, Move

Array = np.ndarray
MOST_BLOCKS = 32  # copies that one kind of transfer may be written as
PIECE = 16384  # elements that a communicating program copies at once


def strides(shape: Sequence[int]) -> Array:
    """Elements between neighbours along each dimension of a row-major array."""
    return np.array([math.prod(shape[d + 1 :]) for d in range(len(shape))], np.int64)


class TransferMaker(LayoutMaker):
    """Writes a plan's operations into a Triton kernel's table; see ``triton_layout`` for tiles."""

    @property
    def body(self) -> TritonBody:
        """The annotated kernel."""
        return self.kernel.triton_body

    def name(self, key: Key) -> str:
        """The parameter of a buffer."""
        tensor, kind = key
        operand = {t: o for o, t in self.bound.items()}.get(tensor, "")
        pointers = self.body.pointers
        if operand and kind == INPUT:
            return pointers[operand]
        for bound in self.work.axis_map.bindings:
            home = bound.operand in self.kernel.results and result_tensor(self.plan, bound)
            if kind == RESULT and home == tensor:
                return pointers[bound.operand]
        stem = pointers[operand].removesuffix("_ptr") if operand else tensor
        return f"{stem}_{kind}_ptr"

    def _columns(self, rows: Array) -> Columns:
        section = self.maker.section(rows)
        return Columns(section.offset, section.multiples)

    def _optional(self, lists: rank_table.Lists) -> Lists | None:
        return None if lists.empty else as_lists(lists)

    def _transfers(self, programs: int) -> parts.Transfers:
        """The communicating programs' operations by channel, their waits and signals."""
        channels = self._channels()
        if programs < len(channels):
            raise UnsupportedError(
                f"plan {self.plan.name} has {len(channels)} channels, and {programs} programs a "
                f"rank communicate; see Launch(communicating)"
            )
        lo = np.searchsorted(self.c.rank, np.arange(self.ranks + 1))
        moves: list[Move] = []
        ops, waits, signals, begins = [], [], [], []
        for rank in range(self.ranks):
            listed = range(lo[rank], lo[rank + 1])
            rows = sorted(listed, key=lambda row: (channels.index(int(self.c.channel[row])), row))
            counts = [sum(int(self.c.channel[row]) == ch for row in rows) for ch in channels]
            begins.append(np.cumsum([0, *counts]))
            ops.append([self._linear(row, moves) for row in rows])
            waits.append([self._op_waits(rank, row) for row in rows])
            signals.append([[*map(list, self.schedule.op_signals.row(row))] for row in rows])
        longest = max(1, *map(len, ops))
        for rank in range(self.ranks):
            short = longest - len(ops[rank])
            ops[rank] += [[0] * 4] * short
            waits[rank] += [[]] * short
            signals[rank] += [[]] * short
        return parts.Transfers(
            programs=programs,
            channels=len(channels),
            begins=self.maker.section(np.array(begins)[..., None]).offset,
            ops=self._columns(np.array(ops)),
            waits=wait_lists(self.maker, waits),
            signals=self._optional(self.maker.lists(signals, 2)),
            moves=tuple(moves),
            piece=PIECE,
        )

    def _op_waits(self, rank: int, row: int) -> list[list[int]]:
        return [[s, n * self.scale[rank, s]] for s, n in self.schedule.op_waits.row(row)]

    def _linear(self, row: int, moves: list[Move]) -> list[int]:
        """(move, far rank, start in the source, start in the destination)."""
        c = self.c
        src_rank, dst_rank = int(c.src_rank[row]), int(c.dst_rank[row])
        source: Buffer = self.places.source(row)
        key, dst = self.arrival(row)
        ndim = source.lo.shape[1]
        src = (c.src_lo[row, :ndim] - source.lo[src_rank]).tolist()
        ndim = len(self.plan.tensors[c.dst_tensor[row]].shape)
        extent = (c.dst_hi[row, :ndim] - c.dst_lo[row, :ndim]).tolist()
        pull = int(c.rank[row]) != src_rank
        src_shape, dst_shape = self.by_key[own_key(source)].shape, self.by_key[key].shape
        one = [1] * (len(dst_shape) - len(extent))
        rows = copies.box_rows(
            1, ([*one, *src_shape], [0] * len(dst_shape)), (dst_shape, [0] * len(dst_shape)),
            [*one, *extent],
        )  # fmt: skip
        if len(rows) > MOST_BLOCKS:
            raise UnsupportedError(
                f"plan {self.plan.name}: {row_text(self.plan, row)} is {len(rows)} separate blocks "
                f"of rows, at most {MOST_BLOCKS} are copied as one; cut chunks along one dimension"
            )
        blocks = tuple(parts.Block(a, p, b, q, width, n) for a, p, b, q, width, n in rows)
        move = Move(self.name(own_key(source)), self.name(key), pull, blocks)
        if move not in moves:
            moves.append(move)
        starts = int((np.array(src) * strides(src_shape)).sum())
        ends = int((np.array(dst) * strides(dst_shape)).sum())
        return [moves.index(move), src_rank if pull else dst_rank, starts, ends]

    def _arrivals(self) -> dict[int, list[list[int]]]:
        """Nothing more is signalled: on a mesh ranks leave together, see ``FusedTriton``."""
        return {row: [] for row in range(self.c.n)}


def wait_lists(maker: rank_table.TableMaker, points: Points) -> Lists | None:
    """Appends lists of (slot, count) to the table; None where all are empty.

    Where no point has two rows every point has one, of count 0 if it has none, so that a kernel
    need not look up first where its list is.
    """
    most = max((len(rows) for one in points for rows in one), default=0)
    if most > 1:
        return as_lists(maker.lists(points, 2))
    if most == 0:
        return None
    rows = [[[*found, [0, 0]][0] for found in one] for one in points]
    section = maker.section(np.array(rows))
    return Lists(0, Columns(section.offset, section.multiples), single=True)


def as_lists(lists: rank_table.Lists) -> Lists:
    """Where lists stand in the table, as the scheme names it."""
    return Lists(lists.start.offset, Columns(lists.rows.offset, lists.rows.multiples))
