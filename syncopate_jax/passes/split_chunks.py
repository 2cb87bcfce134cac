"""Cuts chunks into smaller ones, so that transfers and tiles pipeline at a finer grain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir import comm
from syncopate_jax.ir.arguments import axis_of, integer
from syncopate_jax.ir.columns import Array, Columns
from syncopate_jax.ir.plan import Plan

_BLOCK = 1 << 20  # pairs of pieces looked at together; bounds memory to some ten megabytes
_CUT = ("src_lo", "src_hi", "dst_lo", "dst_hi")
_DEPS = ("dep_start", "dep_rank", "dep_index", "cdep_start", "cdep_rank", "cdep_tensor",
         "cdep_lo", "cdep_hi")  # fmt: skip


def split_chunks(plan: Plan, parts: int, axis: int = 0, tensor: str | None = None) -> Plan:
    """Every chunk cut along ``axis`` into ``parts`` pieces, as equal as can be.

    Pieces of an operation follow each other where it stood; they keep its reduction, channel and
    origin. A piece waits for those pieces of a dependency that touch what it touches; where the
    two operations touch nothing in common, for all of them. A wait for compute tiles shrinks to
    the tiles of the piece. Empty pieces are left out::

        r0.0 push x[0:4] -> r1 x[0:4] after compute(r0 x[0:4])
        r1.0 push x[0:4] -> r2 x[0:4] after r0.0
      becomes, with parts=2,
        r0.0 push x[0:2] -> r1 x[0:2] after compute(r0 x[0:2])
        r0.1 push x[2:4] -> r1 x[2:4] after compute(r0 x[2:4])
        r1.0 push x[0:2] -> r2 x[0:2] after r0.0
        r1.1 push x[2:4] -> r2 x[2:4] after r0.1

    Verify the result: a plan that orders two uses of a buffer only through a third operation, at
    another place in its chunk, loses that order where the pieces in between do not meet.

    A collective is cut along an axis that it neither splits nor concatenates (an all-reduce or
    broadcast along any), by all of its members alike.

    Args:
      parts: pieces a chunk; fewer where its extent is less.
      tensor: only operations that read or write this tensor are cut; all if None.

    Raises:
      InputError: ``parts`` is less than 1, no tensor to be cut has ``axis``, or there is no such
        tensor.
      UnsupportedError: a collective splits or concatenates ``axis``, its source and destination
        differ in extent there, or its members would be cut differently.
    """
    where = f"split_chunks of plan {plan.name}"
    parts = integer(where, "parts", parts, 1)
    cut = _find_cut(plan, where, axis, tensor)
    along = cut.axis
    count = _piece_counts(plan, cut, parts)
    _check_collectives(plan, where, cut, count)
    if plan.num_ops == 0 or int(count.max()) == 1:
        return plan
    c = plan.columns
    pieces = _cut_rows(c, count, along)
    taken = {
        field.name: getattr(c, field.name)[pieces.row]
        for field in fields(Columns)
        if field.name not in (*_DEPS, *_CUT)
    }
    boxes = {name: getattr(c, name)[pieces.row].copy() for name in _CUT}
    for side, bounds in (("src", pieces.src), ("dst", pieces.dst)):
        boxes[f"{side}_lo"][:, along], boxes[f"{side}_hi"][:, along] = bounds
    deps = _split_deps(plan, pieces) | _split_compute_deps(c, pieces)
    return plan.with_columns(Columns(**taken, **boxes, **deps))


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Which rows are cut, [n] bool, and along which axis."""

    rows: Array
    axis: int


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Pieces of all rows, in order.

    Attributes:
      axis: the axis that is cut.
      count, first: [rows] number of pieces of a row, and its first piece.
      row: [pieces] the row each is of.
      src, dst: lower and upper bounds along the axis, [pieces] each.
    """

    axis: int
    count: Array
    first: Array
    row: Array
    src: tuple[Array, Array]
    dst: tuple[Array, Array]


def _find_cut(plan: Plan, where: str, axis: int, tensor: str | None) -> _Cut:
    c = plan.columns
    if tensor is not None:
        index = plan.tensor_index(tensor)
        along = axis_of(where, f"axis for tensor {tensor}", axis, plan.tensors[index].shape)
        return _Cut((c.src_tensor == index) | (c.dst_tensor == index), along)
    along = integer(where, "axis (without tensor, counted from the front)", axis, 0)
    dims = np.array([len(tensor.shape) for tensor in plan.tensors], np.int64)
    if not np.any(dims > along):
        widest = int(dims.max(initial=0))
        raise InputError(f"{where}: axis {along}, but its tensors have at most {widest} dimensions")
    return _Cut((dims[c.src_tensor] > along) & (dims[c.dst_tensor] > along), along)


def _piece_counts(plan: Plan, cut: _Cut, parts: int) -> Array:
    c = plan.columns
    extent = c.src_hi[:, cut.axis] - c.src_lo[:, cut.axis]
    return np.where(cut.rows, np.clip(extent, 1, parts), 1).astype(np.int64)


def _cut_rows(c: Columns, count: Array, axis: int) -> _Pieces:
    first = np.cumsum(count) - count
    row = np.repeat(np.arange(c.n), count)
    place = np.arange(len(row)) - first[row]

    def bounds(lo: Array, hi: Array) -> tuple[Array, Array]:
        low = lo[:, axis].astype(np.int64)
        size, rest = (half[row] for half in np.divmod(hi[:, axis] - low, count))
        start = low[row] + place * size + np.minimum(place, rest)
        return start, start + size + (place < rest)

    src, dst = bounds(c.src_lo, c.src_hi), bounds(c.dst_lo, c.dst_hi)
    return _Pieces(axis, count, first, row, src, dst)


def _split_deps(plan: Plan, pieces: _Pieces) -> dict[str, Array]:
    """Operation dependencies of the pieces; those on what does not exist are kept as they are."""
    c = plan.columns
    owner, target = c.dep_owner(), c.dep_row(plan.num_ranks)
    known = target >= 0
    rows, needs = [], []
    for after, before, edge in _pairs(pieces, owner[known], target[known]):
        touches = np.zeros(len(after), bool)
        related = np.zeros(len(after), bool)
        for meets, near, far in _meetings(c, pieces, owner[known], target[known]):
            met = meets[edge]
            related |= met
            touches |= met & (near[0][after] < far[1][before]) & (far[0][before] < near[1][after])
        keep = touches | ~related
        rows.append(after[keep])
        needs.append(before[keep])
    after, before = (np.concatenate((np.zeros(0, np.int64), *parts)) for parts in (rows, needs))
    start = pieces.first[np.minimum(c.row_start(plan.num_ranks), c.n - 1)]
    rank = c.rank[pieces.row[before]]
    index = before - start[rank]
    lost = _lost_deps(c, pieces, owner[~known], ~known)
    after, rank, index = (
        np.concatenate(pair) for pair in zip((after, rank, index), lost, strict=True)
    )
    # Edges of one piece stay in the order in which its row lists them.
    order = np.argsort(after, kind="stable")
    starts = np.searchsorted(after[order], np.arange(len(pieces.row) + 1))
    return {"dep_start": starts, "dep_rank": rank[order], "dep_index": index[order]}


def _lost_deps(
    c: Columns, pieces: _Pieces, owner: Array, lost: Array
) -> tuple[Array, Array, Array]:
    after, edge = _all_pieces(pieces, owner)
    return after, c.dep_rank[lost][edge], c.dep_index[lost][edge]


def _all_pieces(pieces: _Pieces, owner: Array) -> tuple[Array, Array]:
    """Every piece of each owner, and which of the owners it is of."""
    count = pieces.count[owner]
    edge = np.repeat(np.arange(len(owner)), count)
    place = np.arange(len(edge)) - np.repeat(np.cumsum(count) - count, count)
    return pieces.first[owner[edge]] + place, edge


def _pairs(pieces: _Pieces, owner: Array, target: Array) -> Iterator[tuple[Array, Array, Array]]:
    """All pairs of a piece of ``owner`` and one of ``target``, in blocks of edges."""
    size = pieces.count[owner] * pieces.count[target]
    ends = np.cumsum(size)
    lo = 0
    while lo < len(owner):
        done = int(ends[lo - 1]) if lo else 0
        hi = max(lo + 1, int(np.searchsorted(ends, done + _BLOCK, side="right")))
        edge = np.repeat(np.arange(lo, hi), size[lo:hi])
        place = np.arange(len(edge)) - (ends - size)[edge] + done
        near, far = np.divmod(place, pieces.count[target[edge]])
        yield pieces.first[owner[edge]] + near, pieces.first[target[edge]] + far, edge
        lo = hi


def _meetings(
    c: Columns, pieces: _Pieces, owner: Array, target: Array
) -> Iterator[tuple[Array, tuple[Array, Array], tuple[Array, Array]]]:
    """For each way in which an operation can touch what another touched: which edges do, and the
    bounds along the cut axis to compare, of the later piece and of the earlier one."""
    for near, far in (("src", "dst"), ("dst", "src"), ("dst", "dst")):
        yield (
            _meets(c, near, far, owner, target),
            getattr(pieces, near),
            getattr(pieces, far),
        )


def _meets(c: Columns, near: str, far: str, owner: Array, target: Array) -> Array:
    def column(side: str, what: str, rows: Array) -> Array:
        return getattr(c, f"{side}_{what}")[rows]

    same = column(near, "rank", owner) == column(far, "rank", target)
    same &= column(near, "tensor", owner) == column(far, "tensor", target)
    apart = column(near, "lo", owner) >= column(far, "hi", target)
    apart |= column(far, "lo", target) >= column(near, "hi", owner)
    return same & ~np.any(apart, axis=1)


def _split_compute_deps(c: Columns, pieces: _Pieces) -> dict[str, Array]:
    """Compute dependencies of the pieces, each cut to what its piece reads or writes."""
    owner = c.cdep_owner()
    after, edge = _all_pieces(pieces, owner)
    lo, hi = c.cdep_lo[edge].astype(np.int64), c.cdep_hi[edge].astype(np.int64)
    reads, writes = (_produces(c, side, owner) for side in ("src", "dst"))
    for produces, bounds in ((reads & ~writes, pieces.src), (writes & ~reads, pieces.dst)):
        narrow = produces[edge]
        low = np.maximum(lo[:, pieces.axis], bounds[0][after])
        high = np.minimum(hi[:, pieces.axis], bounds[1][after])
        lo[:, pieces.axis] = np.where(narrow, low, lo[:, pieces.axis])
        hi[:, pieces.axis] = np.where(narrow, high, hi[:, pieces.axis])
    keep = hi[:, pieces.axis] > lo[:, pieces.axis]
    keep |= ~(reads ^ writes)[edge]
    after, edge, lo, hi = after[keep], edge[keep], lo[keep], hi[keep]
    order = np.argsort(after, kind="stable")
    return {
        "cdep_start": np.searchsorted(after[order], np.arange(len(pieces.row) + 1)),
        "cdep_rank": c.cdep_rank[edge][order],
        "cdep_tensor": c.cdep_tensor[edge][order],
        "cdep_lo": lo[order],
        "cdep_hi": hi[order],
    }


def _produces(c: Columns, side: str, owner: Array) -> Array:
    """[compute dependencies] whether the chunk meets what its operation touches on ``side``."""
    same = c.cdep_rank == getattr(c, f"{side}_rank")[owner]
    same &= c.cdep_tensor == getattr(c, f"{side}_tensor")[owner]
    apart = c.cdep_lo >= getattr(c, f"{side}_hi")[owner]
    apart |= getattr(c, f"{side}_lo")[owner] >= c.cdep_hi
    return same & ~np.any(apart, axis=1)


def _check_collectives(plan: Plan, where: str, cut: _Cut, count: Array) -> None:
    c = plan.columns
    rows = np.flatnonzero(c.kind != 0)
    listed: dict[tuple[int, int], int] = {}
    cuts: dict[tuple[int, int], tuple[int, int]] = {}
    for row in rows.tolist():
        kind, rank = comm.KINDS[c.kind[row]], int(c.rank[row])
        group = int(c.group[row])
        if count[row] > 1:
            _check_axis(plan, where, row, cut.axis)
        place = listed.get((group, rank), 0)
        listed[group, rank] = place + 1
        first = cuts.setdefault((group, place), (int(count[row]), rank))
        if first[0] != count[row]:
            raise UnsupportedError(
                f"{where}: {kind} {place} over {plan.groups[group]} would be cut into {first[0]} "
                f"pieces by rank {first[1]} but {count[row]} by rank {rank}; name no tensor, or "
                "one that all members use"
            )


def _check_axis(plan: Plan, where: str, row: int, axis: int) -> None:
    c = plan.columns
    kind = comm.KINDS[c.kind[row]]
    if axis in (c.split_axis[row], c.concat_axis[row]):
        raise UnsupportedError(
            f"{where}: {kind} of rank {c.rank[row]} splits or concatenates axis {axis}; cut "
            "another axis, or run expand_collectives first"
        )
    src, dst = (
        int(getattr(c, f"{side}_hi")[row, axis] - getattr(c, f"{side}_lo")[row, axis])
        for side in ("src", "dst")
    )
    if src != dst:
        raise UnsupportedError(
            f"{where}: {kind} of rank {c.rank[row]} reads {src} elements along axis {axis} but "
            f"writes {dst}; run expand_collectives first"
        )
