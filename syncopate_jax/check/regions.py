"""The initial regions and the goals of a plan as arrays, and whether they make sense."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.report import Report
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.plan import Goal, Plan

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Initial regions that hold something; ``k`` rows, boxes padded to ``d`` dimensions."""

    rank: Array
    tensor: Array
    lo: Array
    hi: Array
    produced: Array


@dataclass(frozen=True, slots=True, eq=False)
class Goals:
    """Goals that ask for something, one row each.

    Attributes:
      rank, tensor, lo, hi: what must hold the value.
      source, source_lo, source_hi: the chunk it must equal.
      ranks: [k] index into ``contributors``.
      contributors: the distinct tuples of ranks; ``()`` for a shared source.
      index: [k] position in the plan's goals.
    """

    rank: Array
    tensor: Array
    lo: Array
    hi: Array
    source: Array
    source_lo: Array
    source_hi: Array
    ranks: Array
    contributors: tuple[tuple[int, ...], ...]
    index: Array


def check_regions(plan: Plan, report: Report) -> None:
    """Finds initial regions and goals that lie outside the plan's ranks and tensors."""
    for region in plan.initial:
        _check_place(plan, report, "initial", region.rank, region.tensor, region.box)
    for goal in plan.goals:
        _check_place(plan, report, "goal", goal.rank, goal.tensor, goal.box)
        _check_source(plan, report, goal)


def region_arrays(plan: Plan, ndim: int) -> Regions:
    """The initial regions of a plan in which ``check_regions`` finds nothing."""
    kept = [region for region in plan.initial if region.box.size]
    index = {tensor.name: i for i, tensor in enumerate(plan.tensors)}
    lo, hi = _boxes([region.box for region in kept], ndim)
    return Regions(
        np.array([region.rank for region in kept], np.int64),
        np.array([index[region.tensor] for region in kept], np.int64),
        lo,
        hi,
        np.array([region.produced for region in kept], bool),
    )


def goal_arrays(plan: Plan, ndim: int) -> Goals:
    """The goals of a plan in which ``check_regions`` finds nothing."""
    kept = [(i, goal) for i, goal in enumerate(plan.goals) if goal.box.size]
    index = {tensor.name: i for i, tensor in enumerate(plan.tensors)}
    lo, hi = _boxes([goal.box for _, goal in kept], ndim)
    sources = [goal.source_chunk for _, goal in kept]
    source_lo, source_hi = _boxes([chunk.box for chunk in sources], ndim)
    source = np.array([index[chunk.tensor] for chunk in sources], np.int64)
    distinct: dict[tuple[int, ...], int] = {}
    ranks = [
        distinct.setdefault(tuple(goal.ranks) if plan.tensors[at].per_rank else (), len(distinct))
        for (_, goal), at in zip(kept, source.tolist(), strict=True)
    ]
    return Goals(
        np.array([goal.rank for _, goal in kept], np.int64),
        np.array([index[goal.tensor] for _, goal in kept], np.int64),
        lo,
        hi,
        source,
        source_lo,
        source_hi,
        np.array(ranks, np.int64),
        tuple(distinct),
        np.array([i for i, _ in kept], np.int64),
    )


def _boxes(boxes: list[Box], ndim: int) -> tuple[Array, Array]:
    lo = [box.lo + (0,) * (ndim - len(box.lo)) for box in boxes]
    hi = [box.hi + (1,) * (ndim - len(box.hi)) for box in boxes]
    shape = (len(boxes), ndim)
    return np.array(lo, np.int64).reshape(shape), np.array(hi, np.int64).reshape(shape)


def _check_place(plan: Plan, report: Report, what: str, rank: int, name: str, box: Box) -> None:
    if not 0 <= rank < plan.num_ranks:
        report.add(
            "bad-index", -1, -1,
            f"{what} {name}{box} is on rank {rank}, but the plan has {plan.num_ranks} ranks",
        )  # fmt: skip
        return
    shape = plan.tensor(name).shape
    if len(shape) != box.ndim or any(b > e for b, e in zip(box.hi, shape, strict=True)):
        report.add(
            "out-of-bounds", rank, -1,
            f"{what} {name}{box} does not lie inside {name} of shape {shape}",
        )  # fmt: skip


def _check_source(plan: Plan, report: Report, goal: Goal) -> None:
    what = f"goal {goal.tensor}{goal.box}"
    name = goal.source or goal.tensor
    known = {tensor.name: tensor for tensor in plan.tensors}
    if name not in known:
        report.add(
            "bad-goal", goal.rank, -1,
            f"{what} has source {name!r}, which is no tensor of {sorted(known)}",
        )  # fmt: skip
        return
    source = known[name]
    lo = tuple(goal.source_lo) or goal.box.lo
    hi = tuple(a + e for a, e in zip(lo, goal.box.shape, strict=False))
    inside = len(lo) == len(source.shape) == goal.box.ndim and all(
        a >= 0 and b <= e for a, b, e in zip(lo, hi, source.shape, strict=True)
    )
    if not inside:
        report.add(
            "out-of-bounds", goal.rank, -1,
            f"{what} has its source at {lo} of {name}, where a box of shape {goal.box.shape} "
            f"does not lie inside {name} of shape {source.shape}",
        )  # fmt: skip
    if source.dtype != known[goal.tensor].dtype:
        report.add(
            "dtype-mismatch", goal.rank, -1,
            f"{what} is of type {known[goal.tensor].dtype}, its source {name} of {source.dtype}",
        )  # fmt: skip
    outside = [rank for rank in goal.ranks if not 0 <= rank < plan.num_ranks]
    if outside or len(set(goal.ranks)) != len(goal.ranks):
        report.add(
            "bad-goal", goal.rank, -1,
            f"{what} reduces over ranks {tuple(goal.ranks)}; they must be distinct and "
            f"less than {plan.num_ranks}",
        )  # fmt: skip
    if source.per_rank and not goal.ranks:
        report.add(
            "bad-goal", goal.rank, -1,
            f"{what} has the per-rank source {name} but names no ranks; say whose data it is",
        )  # fmt: skip
