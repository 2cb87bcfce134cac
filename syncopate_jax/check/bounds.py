"""Is every index of a plan in range, and every box inside its tensor and of the right shape?"""

from __future__ import annotations

import numpy as np

from syncopate_jax.check.report import Report
from syncopate_jax.ir import comm
from syncopate_jax.ir.plan import Plan


def check_indices(plan: Plan, report: Report) -> None:
    """Finds indices that point nowhere: ranks, tensors, channels, groups, dependencies.

    Nothing else about a plan can be looked at until this finds nothing.
    """
    c = plan.columns
    falls = np.flatnonzero(np.diff(c.rank) < 0)
    if len(falls):
        i = int(falls[0])
        report.add(
            "unsorted", -1, -1,
            f"rows must be sorted by rank; row {i} is of rank {c.rank[i]}, "
            f"row {i + 1} of rank {c.rank[i + 1]}",
        )  # fmt: skip
        return
    _check_columns(plan, report)
    check_groups(plan, report)
    _check_dependencies(plan, report)
    p2p = c.kind == 0
    ends = (c.rank == c.src_rank) | (c.rank == c.dst_rank)
    report.rows(
        "not-an-end",
        np.flatnonzero(p2p & ~ends),
        lambda row: (
            f"rank {c.rank[row]} lists a transfer from rank {c.src_rank[row]} to rank "
            f"{c.dst_rank[row]}; list it on its source (push) or its destination (pull)"
        ),
    )
    here = (c.rank == c.src_rank) & (c.rank == c.dst_rank)
    report.rows(
        "not-an-end",
        np.flatnonzero(~p2p & ~here),
        lambda row: (
            f"a collective has src_rank {c.src_rank[row]} and dst_rank {c.dst_rank[row]}; "
            f"both must be the rank that lists it, {c.rank[row]}"
        ),
    )


def _check_columns(plan: Plan, report: Report) -> None:
    c = plan.columns
    limits = {
        "rank": plan.num_ranks,
        "src_rank": plan.num_ranks,
        "dst_rank": plan.num_ranks,
        "kind": len(comm.KINDS),
        "reduce": len(comm.REDUCTIONS),
        "channel": len(plan.channels),
        "origin": len(plan.origins),
        "src_tensor": len(plan.tensors),
        "dst_tensor": len(plan.tensors),
    }
    for name, limit in limits.items():
        _check_column(report, name, getattr(c, name), limit, np.arange(c.n))
    collective = np.flatnonzero(c.kind != 0)
    _check_column(report, "group", c.group[collective], len(plan.groups), collective)
    _check_column(report, "compute dependency rank", c.cdep_rank, plan.num_ranks, c.cdep_owner())
    tensors = len(plan.tensors)
    _check_column(report, "compute dependency tensor", c.cdep_tensor, tensors, c.cdep_owner())


def _check_column(
    report: Report, name: str, column: np.ndarray, limit: int, rows: np.ndarray
) -> None:
    bad = np.flatnonzero((column < 0) | (column >= limit))
    value = dict(zip(rows[bad].tolist(), column[bad].tolist(), strict=True))
    report.rows(
        "bad-index",
        rows[bad],
        lambda row: f"{name} is {value[row]}, but must be at least 0 and less than {limit}",
    )


def check_groups(plan: Plan, report: Report) -> None:
    """Finds groups that hold no rank of the plan, or one twice, and members outside of theirs."""
    c = plan.columns
    for group in plan.groups:
        outside = sorted({rank for rank in group if not 0 <= rank < plan.num_ranks})
        if outside:
            report.add(
                "bad-group", -1, -1,
                f"group {group} holds ranks {outside}; the plan has {plan.num_ranks} ranks",
            )  # fmt: skip
        if len(set(group)) != len(group):
            twice = sorted({rank for rank in group if group.count(rank) > 1})
            report.add("bad-group", -1, -1, f"group {group} holds ranks {twice} more than once")
    rows = np.flatnonzero((c.kind != 0) & (c.group >= 0) & (c.group < len(plan.groups)))
    members = [frozenset(group) for group in plan.groups]
    inside = [
        rank in members[group]
        for rank, group in zip(c.rank[rows].tolist(), c.group[rows].tolist(), strict=True)
    ]
    report.rows(
        "bad-group",
        rows[~np.array(inside, bool)],
        lambda row: (
            f"rank {c.rank[row]} takes part in a collective over {plan.groups[c.group[row]]}, "
            "which it is not in; list it on the ranks of the group"
        ),
    )


def _check_dependencies(plan: Plan, report: Report) -> None:
    c = plan.columns
    bad = np.flatnonzero(c.dep_row(plan.num_ranks) < 0)
    owner = c.dep_owner()[bad]
    start = c.row_start(plan.num_ranks)
    wanted = dict(zip(owner.tolist(), bad.tolist(), strict=True))

    def text(row: int) -> str:
        rank, index = int(c.dep_rank[wanted[row]]), int(c.dep_index[wanted[row]])
        if not 0 <= rank < plan.num_ranks:
            return f"waits for r{rank}.{index}, but the plan has {plan.num_ranks} ranks"
        count = start[rank + 1] - start[rank]
        return f"waits for r{rank}.{index}, but rank {rank} lists only {count}"

    report.rows("no-such-op", np.unique(owner), text)


def check_boxes(plan: Plan, report: Report) -> None:
    """Finds boxes that are empty, leave their tensor, or do not fit each other."""
    c = plan.columns
    _check_inside(plan, report, "reads", "src", c.src_tensor, c.src_lo, c.src_hi)
    _check_inside(plan, report, "writes", "dst", c.dst_tensor, c.dst_lo, c.dst_hi)
    _check_compute_boxes(plan, report)
    p2p = c.kind == 0
    shape = c.src_hi.astype(np.int64) - c.src_lo
    differs = np.any(shape != c.dst_hi.astype(np.int64) - c.dst_lo, axis=1)
    report.rows(
        "shape-mismatch",
        np.flatnonzero(p2p & differs),
        lambda row: (
            f"reads {report.side(row, 'src')} but writes {report.side(row, 'dst')}; "
            "both boxes of a transfer must have the same shape"
        ),
    )
    code = {dtype: i for i, dtype in enumerate({t.dtype: None for t in plan.tensors})}
    dtype = np.array([code[tensor.dtype] for tensor in plan.tensors], np.int64)
    if c.n:
        report.rows(
            "dtype-mismatch",
            np.flatnonzero(dtype[c.src_tensor] != dtype[c.dst_tensor]),
            lambda row: (
                f"reads {plan.tensors[c.src_tensor[row]].name} of type "
                f"{plan.tensors[c.src_tensor[row]].dtype} but writes "
                f"{plan.tensors[c.dst_tensor[row]].name} of type "
                f"{plan.tensors[c.dst_tensor[row]].dtype}; communication converts nothing"
            ),
        )
    same = p2p & (c.src_rank == c.dst_rank) & (c.src_tensor == c.dst_tensor)
    meets = np.all((c.src_lo < c.dst_hi) & (c.dst_lo < c.src_hi), axis=1)
    report.rows(
        "self-overlap",
        np.flatnonzero(same & meets),
        lambda row: (
            f"copies {report.side(row, 'src')} onto {report.side(row, 'dst')} of the same rank; "
            "the boxes of a local copy must not overlap"
        ),
    )


def padded_shapes(plan: Plan, ndim: int) -> np.ndarray:
    """[number of tensors, ndim] shapes, padded with 1."""
    shapes = [(*tensor.shape, *[1] * (ndim - len(tensor.shape))) for tensor in plan.tensors]
    return np.array(shapes, np.int64).reshape(len(plan.tensors), ndim)


def _check_inside(
    plan: Plan,
    report: Report,
    verb: str,
    side: str,
    tensor: np.ndarray,
    lo: np.ndarray,
    hi: np.ndarray,
) -> None:
    if not len(tensor):
        return
    # A member of a collective takes part even if its own share is empty.
    empty = np.any((hi < lo) | ((hi == lo) & (plan.columns.kind == 0)[:, None]), axis=1)
    outside = np.any((lo < 0) | (hi > padded_shapes(plan, lo.shape[1])[tensor]), axis=1)
    report.rows(
        "empty-box",
        np.flatnonzero(empty),
        lambda row: f"{verb} {report.side(row, side)}, which is empty; leave such operations out",
    )
    report.rows(
        "out-of-bounds",
        np.flatnonzero(outside & ~empty),
        lambda row: (
            f"{verb} {report.side(row, side)}, but {plan.tensors[tensor[row]].name} has shape "
            f"{plan.tensors[tensor[row]].shape}; keep the box inside the tensor"
        ),
    )


def _check_compute_boxes(plan: Plan, report: Report) -> None:
    c = plan.columns
    if not len(c.cdep_rank):
        return
    shape = padded_shapes(plan, c.ndim)[c.cdep_tensor]
    empty = np.any(c.cdep_hi <= c.cdep_lo, axis=1)
    outside = np.any((c.cdep_lo < 0) | (c.cdep_hi > shape), axis=1)
    owner = c.cdep_owner()
    for code, bad, why in (
        ("empty-box", empty, "which is empty; leave such dependencies out"),
        ("out-of-bounds", outside & ~empty, "which is not inside the tensor of shape"),
    ):
        at = dict(zip(owner[bad].tolist(), np.flatnonzero(bad).tolist(), strict=True))

        def text(row: int, at: dict[int, int] = at, code: str = code, why: str = why) -> str:
            i = at[row]
            box = report.box(int(c.cdep_tensor[i]), c.cdep_lo[i], c.cdep_hi[i])
            shape = plan.tensors[c.cdep_tensor[i]].shape
            tail = f" {shape}" if code == "out-of-bounds" else ""
            return f"waits for the tiles of {box} on rank {c.cdep_rank[i]}, {why}{tail}"

        report.rows(code, np.array(sorted(at), np.int64), text)
