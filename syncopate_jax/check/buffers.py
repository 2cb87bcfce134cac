"""The buffers of every rank while a plan is executed in NumPy, and what a collective computes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.chunk import Chunk, split_points
from syncopate_jax.ir.comm import REDUCTIONS, Collective
from syncopate_jax.ir.plan import Plan

Array = np.ndarray

COMBINE = {"sum": np.add, "max": np.maximum}


class Buffers:
    """One array for each rank and tensor, NaN where nothing has been written.

    What tiles produce is NaN, too, until they have run. A reduction that arrives before them is
    kept, and met by what they produce; a plain write that does is overwritten.
    """

    def __init__(
        self, plan: Plan, inputs: Mapping[tuple[int, str], Array], dtype: type[np.floating]
    ):
        self.held: dict[tuple[int, str], Array] = {}
        self.made: dict[tuple[int, str], Array] = {}
        self.due: dict[tuple[int, str], Array] = {}
        self.early: dict[tuple[int, str], Array] = {}
        for rank in range(plan.num_ranks):
            for tensor in plan.tensors:
                self.held[rank, tensor.name] = np.full(tensor.shape, np.nan, dtype)
        for region in plan.initial:
            key = (region.rank, region.tensor)
            shape = plan.tensor(region.tensor).shape
            if key not in inputs or np.shape(inputs[key]) != shape:
                found = np.shape(inputs[key]) if key in inputs else "nothing"
                raise InputError(
                    f"plan {plan.name}: the input of tensor {region.tensor} on rank {region.rank} "
                    f"must have shape {shape}, found {found}"
                )
            values = np.asarray(inputs[key]).astype(dtype)
            if region.produced:
                self._expect(key, values, region.box.slices)
            else:
                self.held[key][region.box.slices] = values[region.box.slices]
        for key, due in self.due.items():
            self.held[key][due] = np.nan

    def _expect(self, key: tuple[int, str], values: Array, where: tuple[slice, ...]) -> None:
        self.made[key] = values
        self.due.setdefault(key, np.zeros(values.shape, bool))[where] = True
        self.early.setdefault(key, np.zeros(values.shape, np.uint8))

    def arrays(self) -> dict[tuple[int, str], Array]:
        """What every rank holds."""
        return self.held

    def read(self, rank: int, chunk: Chunk) -> Array:
        """A copy of a chunk as it is now."""
        return self.held[rank, chunk.tensor][chunk.box.slices].copy()

    def write(self, rank: int, chunk: Chunk, data: Array, reduce: str) -> None:
        """Overwrites a chunk, or reduces into it."""
        key, where = (rank, chunk.tensor), chunk.box.slices
        held = self.held[key][where]
        if reduce == "none":
            held[...] = data
            if key in self.early:
                self.early[key][where] = 0
            return
        both = COMBINE[reduce](held, data)
        if key in self.due:
            early = self.early[key][where]
            first = self.due[key][where] & (early == 0)
            both = np.where(first, data, both)
            early[first] = REDUCTIONS.index(reduce)
        held[...] = both

    def produce(self, rank: int, chunk: Chunk) -> None:
        """Runs the tiles of a chunk, as far as they have not run."""
        key, where = (rank, chunk.tensor), chunk.box.slices
        if key not in self.due:
            return
        held, made = self.held[key][where], self.made[key][where]
        due, early = self.due[key][where], self.early[key][where]
        plain = due & (early == 0)
        held[plain] = made[plain]
        for name, combine in COMBINE.items():
            met = due & (early == REDUCTIONS.index(name))
            held[met] = combine(held[met], made[met])
        due[...] = False


def collective_result(
    op: Collective, sent: Sequence[Array], received: Sequence[tuple[int, ...]]
) -> Array:
    """What the rank of ``op`` receives, from what each member sent, in group order.

    ``received`` has the shape that each member receives; reductions are made in group order.
    """
    me = op.ranks.index(op.rank)
    if op.kind == "broadcast":
        return sent[0]
    if op.kind == "all_gather":
        return np.concatenate(sent, axis=op.concat_axis)
    if op.kind == "all_to_all":
        pieces = [np.split(part, _cuts(op, part, received), op.split_axis)[me] for part in sent]
        return np.concatenate(pieces, axis=op.concat_axis)
    total = sent[0]
    for part in sent[1:]:
        total = COMBINE[op.reduce](total, part)
    if op.kind == "all_reduce":
        return total
    return np.split(total, _cuts(op, total, received), op.split_axis)[me]


def _cuts(op: Collective, part: Array, received: Sequence[tuple[int, ...]]) -> list[int]:
    """Where a member's data is cut along ``split_axis``, without the two ends."""
    if op.kind == "all_to_all" and op.split_axis == op.concat_axis:
        return list(split_points(part.shape[op.split_axis], len(op.ranks))[1:-1])
    extents = [shape[op.split_axis] for shape in received]
    return list(itertools.accumulate(extents[:-1]))
