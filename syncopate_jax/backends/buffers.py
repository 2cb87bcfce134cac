"""Where a plan's tensors live on a rank: the caller's arrays, results, and what lies between.

Every rank has the same buffers, of the largest shape any rank needs; where a buffer starts in the
tensor's coordinates differs from rank to rank.

========== ==================================================================================
kind       what it holds
========== ==================================================================================
input      an operand as the caller gave it: the rank's initial region of a tensor that is read
gathered   a tensor that is read, as tiles see it: the rank's frame and all that arrives there
send       what tiles write that is no goal of their own rank: the rank's produced regions
result     what the operator returns: the rank's goals of what tiles wrote
========== ==================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.ends import first_gap
from syncopate_jax.errors import InputError
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.plan import Plan, Tensor
from syncopate_jax.kernel.access import AnyAccess
from syncopate_jax.kernel.axis_map import AxisMap, Binding
from syncopate_jax.kernel.blocks import block_indices
from syncopate_jax.kernel.frame import corners, frame_box, frames
from syncopate_jax.kernel.local import PallasKernel


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """One buffer of every rank.

    Attributes:
      tensor: the plan tensor it holds a part of.
      kind: see the module's table.
      lo, hi: [ranks, dims] the part held on each rank; equal where it holds nothing.
    """

    tensor: str
    kind: str
    lo: np.ndarray
    hi: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents that fit every rank's part."""
        return tuple(int(n) for n in (self.hi - self.lo).max(axis=0))

    def holds(self, rank: int, lo: np.ndarray, hi: np.ndarray) -> bool:
        """Whether the box ``lo:hi`` lies in the part held on ``rank``."""
        return bool(np.all(self.lo[rank] <= lo) and np.all(hi <= self.hi[rank]))


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Every buffer of an operator, by tensor and kind.

    Attributes:
      origins: per tensor that is read, [ranks, dims]: where the operand's coordinates start.
    """

    plan: Plan
    items: dict[tuple[str, str], Buffer]
    origins: dict[str, np.ndarray]

    def source(self, row: int) -> Buffer:
        """What the operation in ``row`` reads, on its source rank."""
        c = self.plan.columns
        tensor = self.plan.tensors[c.src_tensor[row]]
        d = len(tensor.shape)
        box = (int(c.src_rank[row]), c.src_lo[row, :d], c.src_hi[row, :d])
        return self.find(tensor.name, ("input", "result", "gathered", "send"), *box)

    def destination(self, row: int) -> Buffer:
        """What the operation in ``row`` writes, on its destination rank, if it lands nowhere."""
        c = self.plan.columns
        tensor = self.plan.tensors[c.dst_tensor[row]]
        d = len(tensor.shape)
        box = (int(c.dst_rank[row]), c.dst_lo[row, :d], c.dst_hi[row, :d])
        return self.find(tensor.name, ("gathered", "result", "send"), *box)

    def find(
        self, tensor: str, kinds: Iterable[str], rank: int, lo: np.ndarray, hi: np.ndarray
    ) -> Buffer:
        """The first of ``kinds`` that holds a box; raises InputError when none does."""
        for kind in kinds:
            found = self.items.get((tensor, kind))
            if found is not None and found.holds(rank, lo, hi):
                return found
        raise InputError(
            f"plan {self.plan.name}: rank {rank} has no buffer for {tensor} "
            f"[{', '.join(f'{a}:{b}' for a, b in zip(lo, hi, strict=True))}]; a box must lie in "
            f"what the rank holds at the start, in what arrives, or in what its tiles write"
        )


def place_buffers(plan: Plan, axis_map: AxisMap, writes: Iterable[str]) -> Buffers:
    """Buffers for ``plan``, whose tensors ``axis_map`` binds; ``writes``: the kernel's results.

    Raises InputError if the plan starts from a tensor that is not bound.
    """
    require_bound(plan, axis_map)
    written = {b.tensor for b in axis_map.bindings if b.operand in set(writes)}
    read = {b.tensor for b in axis_map.bindings} - written
    items, origins = {}, {}
    for tensor in plan.tensors:
        name = tensor.name
        goals = corners(plan, name, ((g.rank, g.box) for g in plan.goals if g.tensor == name))
        if name in read:
            mine = ((r.rank, r.box) for r in plan.initial if r.tensor == name)
            starts = corners(plan, name, mine)
            items[name, "input"] = Buffer(name, "input", *starts)
            frame = frame_box(plan, name, write=False)
            held = _union(frame, _arrivals(plan, name))
            items[name, "gathered"] = Buffer(name, "gathered", *held)
            origins[name] = frame[0]
        elif name in written:
            items[name, "send"] = Buffer(name, "send", *frame_box(plan, name, write=True))
            if np.any(goals[0] < goals[1]):
                items[name, "result"] = Buffer(name, "result", *goals)
        else:
            items[name, "result"] = Buffer(name, "result", *_union(goals, _arrivals(plan, name)))
    return Buffers(plan, items, origins)


def require_bound(plan: Plan, axis_map: AxisMap) -> None:
    """Raises InputError if ranks start with data of a tensor that is bound to nothing."""
    bound = {b.tensor for b in axis_map.bindings}
    ends = {goal.tensor for goal in plan.goals if goal.box.size}
    for region in plan.initial:
        name = region.tensor
        if name not in bound and region.box.size:
            advice = (
                f"bind it, as in {{{name!r}: {'result' if region.produced else 'operand'}}}, since "
                f"nothing is bound by equal names, or use a plan that starts from what the kernel "
                f"reads or writes"
            )
            raise InputError(
                f"plan {plan.name}: rank {region.rank} starts with {name}{region.box}, but the "
                f"axis map binds {name} to no operand or result that could hold it; "
                f"{advice if region.produced or name in ends else _in_place(name)}"
            )


def require_reached(plan: Plan, axis_map: AxisMap, results: Iterable[str]) -> None:
    """Raises InputError if a goal lies where no tile reads it and no result has it.

    Tiles read the tensor that the operand is given for; a result is where goals made of its tensor
    lie, whichever tensor that is.
    """
    bound = {b.tensor: b.operand for b in axis_map.bindings}
    made = set(results)
    for goal in plan.goals:
        source = goal.source or goal.tensor
        kept = source == goal.tensor and source in bound
        if goal.box.size and not kept and bound.get(source) not in made:
            raise InputError(
                f"plan {plan.name}: rank {goal.rank} ends with {goal.tensor}{goal.box}, made of "
                f"{source}, which the axis map binds to {bound.get(source, 'nothing')!r}: no tile "
                f"would read it there and no result have it; {_in_place(source)}"
            )


def require_filled(plan: Plan, axis_map: AxisMap, results: Iterable[str]) -> None:
    """Raises InputError if what tiles or the caller get as one array has a gap on some rank.

    An array reaches around all that a rank ends with (or starts with, or produces), so the boxes of
    that must fill it.
    """
    bound, made = {b.tensor: b.operand for b in axis_map.bindings}, set(results)
    for tensor in plan.tensors:
        name, operand = tensor.name, bound.get(tensor.name)
        mine = [r for r in plan.initial if r.tensor == name]
        goals = [(g.rank, g.box) for g in plan.goals if g.tensor == name]
        if operand is not None and operand not in made:
            frame = frame_box(plan, name, write=False)
            held = [*((r.rank, r.box) for r in mine), *goals]
            _require_no_gap(plan, tensor, held, frame, "has", f"tiles read as operand {operand!r}")
            continue
        if operand is not None:
            frame = frame_box(plan, name, write=True)
            tiles = [(r.rank, r.box) for r in mine if r.produced]
            _require_no_gap(plan, tensor, tiles, frame, "produces", f"is result {operand!r}")
        frame = corners(plan, name, goals)
        _require_no_gap(plan, tensor, goals, frame, "ends with", "the operator returns")


def require_even(
    plan: Plan, axis_map: AxisMap, kernel: PallasKernel, accesses: Mapping[str, AnyAccess]
) -> None:
    """Raises InputError if a tile reads all of a dimension of which ranks have unequal parts.

    It would take in what nobody filled, on ranks that have less. Along what tiles follow, ranks may
    have unequal parts: tiles beyond them are nobody's. Ranks that have nothing are not asked.
    """
    specs = dict(zip(kernel.operands, kernel.in_specs, strict=True))
    bound = frames(plan, axis_map, accesses)
    for binding, frame in zip(axis_map.bindings, bound, strict=True):
        if frame.write or binding.operand not in specs:
            continue
        where = f"{kernel.name}: {binding.operand}"
        index = block_indices(specs[binding.operand], kernel.grid, where, len(frame.order))
        some = np.flatnonzero(np.prod(frame.extent, axis=1))
        for dim in np.flatnonzero(np.ptp(frame.extent[some], axis=0) if len(some) else []):
            along = [a for a in range(len(kernel.grid)) if np.ptp(index[..., dim], axis=a).any()]
            if along and not set(along) & set(kernel.reduction_axes):
                continue
            have = frame.extent[some, dim]
            least, most = some[np.argmin(have)], some[np.argmax(have)]
            raise InputError(
                f"plan {plan.name}: dimension {dim} of operand {binding.operand!r} ends with "
                f"{have.min()} elements on rank {least} and {have.max()} on rank {most}, but "
                f"kernel {kernel.name} takes in all of it for a tile; let all ranks end with as "
                f"much along it"
            )


def _require_no_gap(
    plan: Plan,
    tensor: Tensor,
    boxes: Iterable[tuple[int, Box]],
    frame: tuple[np.ndarray, np.ndarray],
    verb: str,
    use: str,
) -> None:
    gap = first_gap(tensor.shape, boxes, *frame)
    if gap is None:
        return
    rank, box = gap
    whole = Box(*(tuple(side[rank].tolist()) for side in frame))
    raise InputError(
        f"plan {plan.name}: rank {rank} {verb} no {tensor.name}{box}, a gap in the "
        f"{tensor.name}{whole} that {use} there; "
        + (
            "let its tiles produce that too"
            if verb == "produces"
            else "add the goal that is missing, and the operations that meet it"
        )
    )


def _in_place(tensor: str) -> str:
    """What to do about a plan that ends elsewhere than in the tensor that ranks start with."""
    return (
        f"use a plan that ends in {tensor} itself, or one in which tiles produce {tensor}, as "
        f"templates make with produced=True, and bind that to a result"
    )


def result_tensor(plan: Plan, binding: Binding) -> str:
    """The plan tensor whose goals are the final value of what a tile writes into ``binding``.

    Raises InputError unless it is exactly one.
    """
    found = {g.tensor for g in plan.goals if g.source_chunk.tensor == binding.tensor}
    if len(found) != 1:
        raise InputError(
            f"plan {plan.name}: goals made of tensor {binding.tensor} lie in "
            f"{sorted(found) or 'no tensor'}; the operator can return exactly one"
        )
    return found.pop()


def _arrivals(plan: Plan, tensor: str) -> tuple[np.ndarray, np.ndarray]:
    """[ranks, dims] corners of the smallest box around what operations write on each rank."""
    c = plan.columns
    ndim = len(plan.tensor(tensor).shape)
    lo = np.full((plan.num_ranks, ndim), np.iinfo(np.int64).max)
    hi = np.zeros((plan.num_ranks, ndim), np.int64)
    rows = np.flatnonzero(c.dst_tensor == plan.tensor_index(tensor))
    np.minimum.at(lo, c.dst_rank[rows], c.dst_lo[rows, :ndim])
    np.maximum.at(hi, c.dst_rank[rows], c.dst_hi[rows, :ndim])
    return np.minimum(lo, hi), hi


def _union(*bounds: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Corners around several boxes a rank, empty ones left out."""
    lo, hi = (np.stack([b[i] for b in bounds]) for i in (0, 1))
    empty = np.any(lo >= hi, axis=-1, keepdims=True)
    low = np.where(empty, np.iinfo(np.int64).max, lo).min(axis=0)
    high = np.where(empty, 0, hi).max(axis=0)
    return np.minimum(low, high), high
