"""A schedule whose tiles send what they wrote themselves, one operation a tile, for ``simulate``.

::

    r0.0 sends y[0:256], written by tiles 0 and 1, and raises slot 3 of r1
    becomes
    r0.0 sends y[0:128] when tile 0 is done, r0.1 sends y[128:256] when tile 1 is done,
    and who waited for slot 3 to be 1 waits for 2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir.columns import Columns, make_columns
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.schedule import Rows, Schedule
from syncopate_jax.ir.text import row_text
from syncopate_jax.kernel.access import AnyAccess
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.frame import Frame, frames
from syncopate_jax.kernel.tiles import TileSpace

Array = np.ndarray
_KEPT = ("rank", "src_rank", "dst_rank", "src_tensor", "dst_tensor", "reduce", "channel", "origin")


def tile_stores(
    schedule: Schedule,
    space: TileSpace,
    accesses: Mapping[str, AnyAccess],
    axis_map: AxisMap,
) -> Schedule:
    """``schedule`` with every operation cut into the tiles that write what it sends.

    An operation of a tile starts when the tile is done, in the order in which tiles are; what the
    tile itself waited for, such as data it added, it need not wait for again. A copy within a rank
    that nobody waits for is where the tile is stored, and part of the tile.

    Raises UnsupportedError when an operation is pulled, or sends what no tile writes.
    """
    plan = schedule.plan
    written = {f.tensor: f for f in frames(plan, axis_map, accesses) if f.write}
    pieces = _cut(schedule, space, written)
    signals, waits = _by_tile(schedule, pieces)
    new = plan.with_columns(_columns(plan, pieces))
    owner, value = _repeated(schedule.op_signals, pieces.row)
    raised = _counts(value)
    return replace(
        schedule,
        plan=new,
        signals=signals,
        op_waits=waits,
        op_signals=Rows.grouped(owner, value, new.num_ops),
        landing=schedule.landing[pieces.row],
        num_slots=schedule.num_slots + np.int32(schedule.num_tiles),
        waits=_scaled(schedule, schedule.waits, raised),
        k_waits=_scaled(schedule, schedule.k_waits, raised),
        e_waits=_scaled(schedule, schedule.e_waits, raised),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """What each tile sends, by rank and position of the tile.

    Attributes:
      row: [pieces] the operation it is of. position: [pieces] of the tile on the source rank.
      lo, hi: [pieces, d] in the source tensor's coordinates.
    """

    row: Array
    position: Array
    lo: Array
    hi: Array


def _cut(schedule: Schedule, space: TileSpace, written: Mapping[int, Frame]) -> _Pieces:
    plan, c = schedule.plan, schedule.plan.columns
    none = np.zeros(0, np.int64)
    found = [(none, none, np.zeros((0, c.ndim), np.int64), np.zeros((0, c.ndim), np.int64))]
    stored = (c.src_rank == c.dst_rank) & (np.diff(schedule.op_signals.start) == 0)
    for row in np.flatnonzero(~stored).tolist():
        frame, rank = written.get(int(c.src_tensor[row])), int(c.src_rank[row])
        if frame is None or c.rank[row] != rank:
            how = "is pulled" if frame is not None else "sends what no tile writes"
            raise UnsupportedError(
                f"tile_stores: plan {plan.name}: {row_text(plan, row)} {how}; tiles can only push "
                f"their own results"
            )
        lo, hi = _tile_boxes(frame, space, rank, schedule.order[rank])
        dims = lo.shape[1]
        low = np.maximum(lo, c.src_lo[row, :dims])
        high = np.minimum(hi, c.src_hi[row, :dims])
        position = np.flatnonzero(np.all(low < high, axis=1))
        boxes = np.zeros((2, len(position), c.ndim), np.int64)
        boxes[1] = 1
        boxes[:, :, :dims] = low[position], high[position]
        found.append((np.full(len(position), row), position, boxes[0], boxes[1]))
    of, at, low, high = (np.concatenate(part) for part in zip(*found, strict=True))
    order = np.lexsort((of, at, c.rank[of]))
    return _Pieces(of[order], at[order], low[order], high[order])


def _tile_boxes(frame: Frame, space: TileSpace, rank: int, order: Array) -> tuple[Array, Array]:
    """[positions, d] what each tile writes, in the tensor's coordinates."""
    lo, hi = (side[:, 0][order] for side in frame.access.boxes(space))
    shape = (len(order), frame.lo.shape[1])
    low, high = np.empty(shape, np.int64), np.empty(shape, np.int64)
    dims = list(frame.order)
    low[:, dims], high[:, dims] = lo, np.minimum(hi, frame.extent[rank])
    return low + frame.lo[rank], high + frame.lo[rank]


def _columns(plan: Plan, pieces: _Pieces) -> Columns:
    c, row = plan.columns, pieces.row
    shift = c.dst_lo[row].astype(np.int64) - c.src_lo[row]
    kept = {name: getattr(c, name)[row] for name in _KEPT}
    return make_columns(
        len(row),
        c.ndim,
        **kept,
        src_lo=pieces.lo,
        src_hi=pieces.hi,
        dst_lo=pieces.lo + shift,
        dst_hi=pieces.hi + shift,
    )


def _by_tile(schedule: Schedule, pieces: _Pieces) -> tuple[Rows, Rows]:
    """Signals of tiles, each to a slot of its own behind the others, and who waits for them."""
    rank = schedule.plan.columns.rank[pieces.row].astype(np.int64)
    slot = schedule.num_slots[rank] + pieces.position
    tile = np.unique(rank * schedule.num_tiles + pieces.position)
    owner, position = np.divmod(tile, schedule.num_tiles)
    values = np.stack([owner, schedule.num_slots[owner] + position], axis=1)
    rows = schedule.plan.num_ranks * schedule.num_tiles
    waits = np.stack([slot, np.ones_like(slot)], axis=1)
    number = np.arange(len(pieces.row))
    return Rows.grouped(tile, values, rows), Rows.grouped(number, waits, len(number))


def _repeated(rows: Rows, row: Array) -> tuple[Array, Array]:
    """Entries of ``rows`` for each of the pieces, which are of rows ``row``."""
    size = np.diff(rows.start)[row]
    owner = np.repeat(np.arange(len(row)), size)
    entry = np.arange(len(owner)) - (np.cumsum(size) - size)[owner] + rows.start[row][owner]
    return owner, rows.values[entry]


def _counts(value: Array) -> dict[tuple[int, int], int]:
    """By (rank, slot) how often it is raised now by operations."""
    slots, counts = np.unique(value, axis=0, return_counts=True)
    return {(r, s): n for (r, s), n in zip(slots.tolist(), counts.tolist(), strict=True)}


def _scaled(schedule: Schedule, rows: Rows, raised: Mapping[tuple[int, int], int]) -> Rows:
    """Waits for an operation as waits for all its pieces: a slot counts one operation."""
    rank = rows.owner // max(schedule.num_tiles, 1)
    values = rows.values.copy()
    for i, (r, slot) in enumerate(zip(rank.tolist(), values[:, -2].tolist(), strict=True)):
        values[i, -1] = raised[r, slot]
    return Rows(rows.start, values)
