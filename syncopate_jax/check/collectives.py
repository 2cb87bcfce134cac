"""Which parts form one collective, whether they agree, and what each moves to each other one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.report import Report
from syncopate_jax.ir import comm
from syncopate_jax.ir.plan import Plan

Array = np.ndarray

PLAIN = comm.REDUCTIONS.index("none")
REDUCING = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True, eq=False)
class Instances:
    """The collectives of one group: ``rows[k, m]`` is the part of member ``m`` in the k-th."""

    group: tuple[int, ...]
    rows: Array


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Every movement of a plan, between two rows (the same row for a P2P).

    Attributes:
      src_row, dst_row: [n] rows that read and that write.
      src_lo, src_hi, dst_lo, dst_hi: [n, d] boxes of equal shape.
      reduce: [n] index into ``comm.REDUCTIONS``.
    """

    src_row: Array
    dst_row: Array
    src_lo: Array
    src_hi: Array
    dst_lo: Array
    dst_hi: Array
    reduce: Array


def find_instances(plan: Plan, report: Report) -> list[Instances]:
    """The collectives of a plan; those that some member does not list are left out and reported."""
    c = plan.columns
    rows = np.flatnonzero(c.kind != 0)
    found = []
    by_group: dict[tuple[int, ...], list[int]] = {}
    for row, group in zip(rows.tolist(), c.group[rows].tolist(), strict=True):
        by_group.setdefault(plan.groups[group], []).append(row)
    for group, listed in sorted(by_group.items()):
        members: dict[int, list[int]] = {rank: [] for rank in group}
        for row in listed:
            members[int(c.rank[row])].append(row)
        counts = {rank: len(parts) for rank, parts in members.items()}
        count = min(counts.values())
        most = max(counts, key=lambda rank: counts[rank])
        for rank, number in counts.items():
            if number < counts[most]:
                report.add(
                    "collective-count", rank, -1,
                    f"rank {rank} lists {number} collectives over group {group}, but rank {most} "
                    f"lists {counts[most]}; every member must list its part",
                )  # fmt: skip
        parts = np.array([members[rank][:count] for rank in group], np.int64)
        found.append(Instances(group, parts.reshape(len(group), count).T))
    return found


def check_collectives(plan: Plan, instances: list[Instances], report: Report) -> None:
    """Finds members of one collective that disagree, and sizes that do not fit together."""
    c = plan.columns
    fields: tuple[tuple[str, Array, tuple[str, ...] | None], ...] = (
        ("kind", c.kind, comm.KINDS),
        ("reduce", c.reduce, comm.REDUCTIONS),
        ("channel", c.channel, plan.channels),
        ("split_axis", c.split_axis, None),
        ("concat_axis", c.concat_axis, None),
        ("src tensor", c.src_tensor, tuple(tensor.name for tensor in plan.tensors)),
        ("dst tensor", c.dst_tensor, tuple(tensor.name for tensor in plan.tensors)),
    )
    for block in instances:
        for k, rows in enumerate(block.rows):
            before = len(report.findings)
            for name, column, words in fields:
                _check_agree(report, block, k, rows, name, column, words)
            if len(report.findings) == before:
                _check_sizes(plan, report, rows)


def _check_agree(
    report: Report,
    block: Instances,
    k: int,
    rows: Array,
    name: str,
    column: Array,
    words: tuple[str, ...] | None,
) -> None:
    values = column[rows]
    for row in rows[values != values[0]].tolist():
        first, own = int(values[0]), int(column[row])
        report.add(
            "collective-mismatch", *report.place(row),
            f"is collective {k} over group {block.group} with {name} "
            f"{words[own] if words else own}, but {report.name(int(rows[0]))} has "
            f"{words[first] if words else first}; members must agree and list collectives "
            "in one order",
        )  # fmt: skip


def _check_sizes(plan: Plan, report: Report, rows: Array) -> None:
    c = plan.columns
    first = int(rows[0])
    kind = comm.KINDS[c.kind[first]]
    ndim = len(plan.tensors[c.src_tensor[first]].shape)
    if (kind in REDUCING) != (c.reduce[first] != PLAIN):
        wanted = "sum or max" if kind in REDUCING else "none"
        report.add(
            "collective-reduce", *report.place(first),
            f"{kind} has reduce {comm.REDUCTIONS[c.reduce[first]]}, needs {wanted}",
        )  # fmt: skip
        return
    for name in _axes(kind):
        axis = int(getattr(c, name)[first])
        if not 0 <= axis < ndim:
            report.add(
                "collective-axis", *report.place(first),
                f"{kind} has {name} {axis}, needs one of the {ndim} dimensions of "
                f"{plan.tensors[c.src_tensor[first]].name}",
            )  # fmt: skip
            return
    src = c.src_hi[rows].astype(np.int64) - c.src_lo[rows]
    dst = c.dst_hi[rows].astype(np.int64) - c.dst_lo[rows]
    shapes = _received_shapes(kind, src, dst, *_axis(plan, first))
    misfits = [m for m, (_, needed, got) in enumerate(shapes) if not np.array_equal(needed, got)]
    for m in misfits:
        verb, needed, got = shapes[m]
        report.add(
            "collective-size", *report.place(int(rows[m])),
            f"{kind} {verb} {tuple(got[:ndim].tolist())}, but the other members' boxes need "
            f"{tuple(needed[:ndim].tolist())}",
        )  # fmt: skip
    for row in rows[_out_of_place(plan, rows)].tolist() if not misfits else ():
        report.add(
            "self-overlap", *report.place(row),
            f"{kind} reads {report.side(row, 'src')} and writes {report.side(row, 'dst')}; "
            "they may meet only where a rank's own piece stays in place",
        )  # fmt: skip


def _axes(kind: str) -> tuple[str, ...]:
    return {
        "all_gather": ("concat_axis",),
        "reduce_scatter": ("split_axis",),
        "all_to_all": ("split_axis", "concat_axis"),
    }.get(kind, ())


def _axis(plan: Plan, row: int) -> tuple[int, int]:
    return int(plan.columns.split_axis[row]), int(plan.columns.concat_axis[row])


def _received_shapes(
    kind: str, src: Array, dst: Array, split: int, concat: int
) -> list[tuple[str, Array, Array]]:
    """For each member: which side is judged, its needed shape, its shape."""
    if kind == "all_gather":
        return _gathered(src, dst, concat)
    if kind == "reduce_scatter":
        other = {"writes": "reads", "reads": "writes"}
        return [(other[verb], needed, got) for verb, needed, got in _gathered(dst, src, split)]
    if kind in ("all_reduce", "broadcast"):
        wrong = np.any(src != src[0], axis=1)
        return [
            ("reads", src[0], src[m]) if wrong[m] else ("writes", src[0], dst[m])
            for m in range(len(src))
        ]
    return _exchanged(src, dst, split, concat)


def _gathered(src: Array, dst: Array, axis: int) -> list[tuple[str, Array, Array]]:
    whole = src[0].copy()
    whole[axis] = src[:, axis].sum()
    result = []
    for m in range(len(src)):
        alike = src[0].copy()
        alike[axis] = src[m, axis]
        fits = np.array_equal(alike, src[m])
        result.append(("writes", whole, dst[m]) if fits else ("reads", alike, src[m]))
    return result


def _exchanged(src: Array, dst: Array, split: int, concat: int) -> list[tuple[str, Array, Array]]:
    result = []
    received = _piece_sizes(src, dst, split, concat)[1].sum(axis=0)
    for m in range(len(src)):
        needed = src[0].copy()
        if split == concat:
            needed[split] = received[m]
            alike = src[0].copy()
            alike[split] = src[m, split]
        else:
            needed[split], needed[concat] = dst[m, split], received[m]
            alike = src[0].copy()
            alike[concat], alike[split] = src[m, concat], dst[:, split].sum()
        fits = np.array_equal(alike, src[m])
        result.append(("writes", needed, dst[m]) if fits else ("reads", alike, src[m]))
    return result


def _piece_sizes(src: Array, dst: Array, split: int, concat: int) -> tuple[Array, Array]:
    """[from, to] extents of an all_to_all's pieces along the split and the concatenated axis."""
    size = len(src)
    if split != concat:
        along = np.broadcast_to(dst[:, split], (size, size))
        return along, np.broadcast_to(src[:, concat, None], (size, size))
    each, rest = np.divmod(src[:, split], size)
    equal = each[:, None] + (np.arange(size) < rest[:, None])
    return equal, equal


def _out_of_place(plan: Plan, rows: Array) -> Array:
    """[members] whether a member's boxes meet other than with its own piece in place."""
    c = plan.columns
    kind = comm.KINDS[c.kind[rows[0]]]
    lo = np.maximum(c.src_lo[rows], c.dst_lo[rows])
    meets = np.all(lo < np.minimum(c.src_hi[rows], c.dst_hi[rows]), axis=1)
    meets &= c.src_tensor[rows] == c.dst_tensor[rows]
    if kind == "broadcast":
        meets[1:] = False  # what these members hold is not read
    if kind == "all_to_all" or not np.any(meets):
        return meets
    src_lo, _, dst_lo, _, _ = _pieces(plan, rows[None])
    own = np.arange(len(rows))
    apart: Array = meets & np.any(src_lo[0, own, own] != dst_lo[0, own, own], axis=1)
    return apart


def find_transfers(plan: Plan, instances: list[Instances]) -> Transfers:
    """Every movement of the plan; an own piece that stays in place moves nothing."""
    c = plan.columns
    p2p = np.flatnonzero(c.kind == 0)
    boxes = (c.src_lo[p2p], c.src_hi[p2p], c.dst_lo[p2p], c.dst_hi[p2p])
    parts: list[tuple[Array, ...]] = [(p2p, p2p, *boxes, c.reduce[p2p])]
    parts += [_block_transfers(plan, rows) for rows in _alike(plan, instances)]
    if len(parts) == 1:
        return Transfers(*parts[0])
    return Transfers(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _alike(plan: Plan, instances: list[Instances]) -> Iterator[Array]:
    """The collectives' rows [k, members], gathered by kind, axes and number of members."""
    c = plan.columns
    gathered: dict[tuple[int, ...], list[Array]] = {}
    for block in instances:
        first = block.rows[:, 0]
        keys = np.stack([c.kind[first], c.split_axis[first], c.concat_axis[first]], axis=1)
        for key in np.unique(keys, axis=0):
            rows = block.rows[np.all(keys == key, axis=1)]
            gathered.setdefault((*key.tolist(), len(block.group)), []).append(rows)
    return (np.concatenate(rows) for _, rows in sorted(gathered.items()))


def _block_transfers(plan: Plan, rows: Array) -> tuple[Array, ...]:
    c = plan.columns
    size = rows.shape[1]
    src_lo, src_hi, dst_lo, dst_hi, sends = _pieces(plan, rows)
    src_row = np.broadcast_to(rows[:, :, None], (len(rows), size, size))
    dst_row = np.broadcast_to(rows[:, None, :], (len(rows), size, size))
    reduce = np.where(np.arange(size)[:, None] == 0, PLAIN, c.reduce[dst_row])
    in_place = (src_row == dst_row) & (c.src_tensor[src_row] == c.dst_tensor[dst_row])
    in_place &= np.all((src_lo == dst_lo) & (src_hi == dst_hi), axis=-1)
    in_place &= c.reduce[src_row] == PLAIN
    moves = sends & ~in_place & np.all(src_hi > src_lo, axis=-1)
    columns = (src_row, dst_row, src_lo, src_hi, dst_lo, dst_hi, reduce)
    return tuple(column[moves] for column in columns)


def _pieces(plan: Plan, rows: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Boxes [k, from, to, d] that collectives of one kind and size move, and where they do."""
    c = plan.columns
    count, size = rows.shape
    kind, (split, concat) = comm.KINDS[c.kind[rows[0, 0]]], _axis(plan, int(rows[0, 0]))
    src, dst = (c.src_hi - c.src_lo)[rows], (c.dst_hi - c.dst_lo)[rows]
    shape = (count, size, size, c.ndim)
    extent = np.broadcast_to(src[:, :, None], shape).copy()
    src_lo = np.broadcast_to(c.src_lo[rows][:, :, None], shape).copy()
    dst_lo = np.broadcast_to(c.dst_lo[rows][:, None, :], shape).copy()
    sends = np.ones(shape[:3], bool)
    if kind == "all_gather":
        dst_lo[..., concat] += _offsets(src[..., concat])[:, :, None]
    elif kind == "reduce_scatter":
        src_lo[..., split] += _offsets(dst[..., split])[:, None, :]
        extent[..., split] = dst[:, None, :, split]
    elif kind == "broadcast":
        sends[:, 1:] = False
    elif kind == "all_to_all":
        pieces = [_piece_sizes(src[k], dst[k], split, concat) for k in range(count)]
        along_split = np.array([piece[0] for piece in pieces])
        along_concat = np.array([piece[1] for piece in pieces])
        src_lo[..., split] += np.cumsum(along_split, axis=2) - along_split
        dst_lo[..., concat] += np.cumsum(along_concat, axis=1) - along_concat
        extent[..., split] = along_split
    return src_lo, src_lo + extent, dst_lo, dst_lo + extent, sends


def _offsets(extents: Array) -> Array:
    """Where each member's piece starts along an axis, [k, members] -> the same."""
    before: Array = np.cumsum(extents, axis=1) - extents
    return before
