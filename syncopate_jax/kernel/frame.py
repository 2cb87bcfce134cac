"""Frames: where the coordinates of an operand lie in those of the plan tensor it is bound to.

On rank r, operand coordinates start at the low corner of the frame's box: the bounding box of that
rank's goals on a tensor that the kernel reads (of its initial regions if it has no goal there), of
its produced regions on one that it writes. Beyond that box tiles touch nothing that is
communicated, as on ranks whose shard is shorter than the operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.plan import Plan
from syncopate_jax.kernel.access import AnyAccess
from syncopate_jax.kernel.axis_map import AxisMap

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One bound tensor, seen from its operand.

    Attributes:
      tensor: position of the tensor in the plan.
      access: how tiles touch the operand.
      order: tensor dimension of each operand dimension.
      lo, hi: [ranks, dims] the frame's box, in the tensor's coordinates and order of dimensions;
        equal where the rank has none.
    """

    tensor: int
    access: AnyAccess
    order: tuple[int, ...]
    lo: Array
    hi: Array

    @property
    def write(self) -> bool:
        return self.access.write

    @property
    def extent(self) -> Array:
        """[ranks, operand dims] how far tiles of each rank reach, in operand order."""
        size = (self.hi - self.lo)[:, self.order]
        return np.minimum(size, np.asarray(self.access.shape, np.int64))

    def to_operand(self, rank: Array, lo: Array, hi: Array) -> tuple[Array, Array]:
        """Tensor boxes [n, >= dims] on ranks [n] as operand boxes [n, dims], cut to the extent.

        A box of which nothing is left has ``hi <= lo`` in some dimension.
        """
        order, base = list(self.order), self.lo[rank]
        low, high = (
            side[:, : base.shape[1]].astype(np.int64)[:, order] - base[:, order]
            for side in (lo, hi)
        )
        return np.maximum(low, 0), np.minimum(high, self.extent[rank])


def frames(plan: Plan, axis_map: AxisMap, accesses: Mapping[str, AnyAccess]) -> tuple[Frame, ...]:
    """The frame of every binding; raises InputError when the axis map does not fit."""
    axis_map.check(plan, accesses)
    found = []
    for binding in axis_map.bindings:
        tensor, access = plan.tensor(binding.tensor), accesses[binding.operand]
        dims = axis_map.dims(binding, len(tensor.shape))
        lo, hi = frame_box(plan, tensor.name, write=access.write)
        order = tuple(dims.index(d) for d in range(len(dims)))
        found.append(Frame(plan.tensor_index(tensor.name), access, order, lo, hi))
    return tuple(found)


def frame_box(plan: Plan, tensor: str, *, write: bool) -> tuple[Array, Array]:
    """[ranks, dims] corners of each rank's frame of a tensor that the kernel reads or writes."""
    mine = [region for region in plan.initial if region.tensor == tensor]
    if write:
        return corners(plan, tensor, ((r.rank, r.box) for r in mine if r.produced))
    starts = corners(plan, tensor, ((r.rank, r.box) for r in mine))
    goals = (goal for goal in plan.goals if goal.tensor == tensor)
    ends = corners(plan, tensor, ((goal.rank, goal.box) for goal in goals))
    empty = np.any(ends[0] >= ends[1], axis=1)[:, None]
    return np.where(empty, starts[0], ends[0]), np.where(empty, starts[1], ends[1])


def corners(plan: Plan, tensor: str, boxes: Iterable[tuple[int, Box]]) -> tuple[Array, Array]:
    """[ranks, dims] corners of the smallest box around the (rank, box) of each rank."""
    ndim = len(plan.tensor(tensor).shape)
    lo = np.full((plan.num_ranks, ndim), np.iinfo(np.int64).max)
    hi = np.zeros((plan.num_ranks, ndim), np.int64)
    for rank, box in boxes:
        if box.size:
            lo[rank] = np.minimum(lo[rank], box.lo)
            hi[rank] = np.maximum(hi[rank], box.hi)
    return np.minimum(lo, hi), hi
