"""The initial regions and the goals of a plan as arrays, and whether they make sense."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.report import Report
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.comm import REDUCTIONS
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor

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
      reduce: [k] how they are reduced, index into ``comm.REDUCTIONS``.
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
    reduce: Array
    index: Array


def check_regions(plan: Plan, report: Report) -> None:
    """Finds initial regions and goals that lie outside the plan's ranks and tensors."""
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    for region in plan.initial:
        _check_place(plan, report, "initial", region, tensors[region.tensor].shape)
    for goal in plan.goals:
        _check_place(plan, report, "goal", goal, tensors[goal.tensor].shape)
        _check_source(plan, report, goal, tensors)


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
    source = np.array([index[goal.source or goal.tensor] for _, goal in kept], np.int64)
    origins = [(*(goal.source_lo or goal.box.lo), *[0] * ndim)[:ndim] for _, goal in kept]
    source_lo = np.array(origins, np.int64).reshape(len(kept), ndim)
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
        source_lo + (hi - lo),
        np.array(ranks, np.int64),
        tuple(distinct),
        np.array([REDUCTIONS.index(goal.reduce) for _, goal in kept], np.int64),
        np.array([i for i, _ in kept], np.int64),
    )


def _boxes(boxes: list[Box], ndim: int) -> tuple[Array, Array]:
    lo = [box.lo + (0,) * (ndim - len(box.lo)) for box in boxes]
    hi = [box.hi + (1,) * (ndim - len(box.hi)) for box in boxes]
    shape = (len(boxes), ndim)
    return np.array(lo, np.int64).reshape(shape), np.array(hi, np.int64).reshape(shape)


def _check_place(
    plan: Plan, report: Report, what: str, item: Region | Goal, shape: tuple[int, ...]
) -> None:
    if not 0 <= item.rank < plan.num_ranks:
        report.add(
            "bad-index", -1, -1,
            f"{what} {item.tensor}{item.box} is on rank {item.rank}, but the plan has "
            f"{plan.num_ranks} ranks",
        )  # fmt: skip
    elif not _is_inside(item.box.lo, item.box.hi, shape):
        report.add(
            "out-of-bounds", item.rank, -1,
            f"{what} {item.tensor}{item.box} does not lie inside {item.tensor} of shape {shape}",
        )  # fmt: skip


def _is_inside(lo: tuple[int, ...], hi: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if not len(lo) == len(hi) == len(shape):
        return False
    return min(lo, default=0) >= 0 and all(b <= e for b, e in zip(hi, shape, strict=True))


def _check_source(plan: Plan, report: Report, goal: Goal, tensors: dict[str, Tensor]) -> None:
    source = tensors.get(goal.source or goal.tensor)
    for code, why in _source_faults(plan, goal, source, tensors):
        report.add(code, goal.rank, -1, f"goal {goal.tensor}{goal.box} {why}")


def _source_faults(
    plan: Plan, goal: Goal, source: Tensor | None, tensors: dict[str, Tensor]
) -> Iterator[tuple[str, str]]:
    """Code and reason of each fault in what a goal says about its value."""
    if source is None:
        yield "bad-goal", f"has source {goal.source!r}, which is no tensor of {sorted(tensors)}"
        return
    box = goal.box
    lo = goal.source_lo or box.lo
    hi = tuple(a + q - p for a, p, q in zip(lo, box.lo, box.hi, strict=False))
    if not _is_inside(lo, hi, source.shape) or len(lo) != box.ndim:
        yield (
            "out-of-bounds",
            f"has its source at {tuple(lo)} of {source.name}, where a box of shape {box.shape} "
            f"does not lie inside {source.name} of shape {source.shape}",
        )
    own = tensors[goal.tensor]
    if source.dtype != own.dtype:
        yield (
            "dtype-mismatch",
            f"is of type {own.dtype}, its source {source.name} of {source.dtype}",
        )
    ranks = goal.ranks
    if len(set(ranks)) != len(ranks) or (
        ranks and not 0 <= min(ranks) <= max(ranks) < plan.num_ranks
    ):
        yield (
            "bad-goal",
            f"reduces over ranks {tuple(ranks)}; they must be distinct and less than "
            f"{plan.num_ranks}",
        )
    if source.per_rank and not ranks:
        yield (
            "bad-goal",
            f"has the per-rank source {source.name} but names no ranks; say whose data it is",
        )
