"""The GMEM buffers of a fused GPU kernel, as matrices: how a box of one is addressed.

The copy unit addresses at most five dimensions and cuts two. So a buffer is held as
``[lead, rows, mid, columns]``: the two dimensions that tiles cut, and those before and between them
as one each (``mid`` is left out where it is 1). Folded ranks are a part of ``lead``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from syncopate_jax.backends.buffers import Buffers, place_buffers
from syncopate_jax.backends.interface import Work
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.kernel.loop import Use

Key = tuple[str, str]
LANDING = "landing"
INPUT, GATHERED, SEND, RESULT = "input", "gathered", "send", "result"


@dataclass(frozen=True, slots=True)
class Placed:
    """A buffer of every rank.

    Attributes:
      key: plan tensor and kind, see ``buffers.py``; a landing is where partial results arrive.
      shape: extents, each at least 1; of a landing, its number comes first.
      cut: the two dimensions that tiles cut.
      dtype: of its elements.
    """

    key: Key
    shape: tuple[int, ...]
    cut: tuple[int, int]
    dtype: Any

    @property
    def matrices(self) -> tuple[int, ...]:
        """Extents as the kernel holds it: lead, rows, mid unless 1, columns."""
        rows, columns = self.cut
        lead, mid = math.prod(self.shape[:rows]), math.prod(self.shape[rows + 1 : columns])
        middle = (mid,) if mid > 1 else ()
        return (lead, self.shape[rows], *middle, self.shape[columns])

    def matrix(self, ref: Any, starts: Sequence[Any], rank: Any, use: Use) -> None:
        """Calls ``use`` with the matrix that holds the block at ``starts``.

        ``rank`` is the position of a folded rank in ``lead``, or None.
        """
        rows, columns = self.cut
        lead = _linear(starts[:rows], self.shape[:rows])
        if rank is not None:
            lead = lead + rank * self.matrices[0]
        view = ref.at[lead]
        if len(self.matrices) > 3:
            mid = _linear(starts[rows + 1 : columns], self.shape[rows + 1 : columns])
            view = ref.at[lead, :, mid]
        use(view, starts[rows], starts[columns])


def _linear(starts: Sequence[Any], shape: Sequence[int]) -> Any:
    at: Any = jnp.int32(0)
    for start, extent in zip(starts, shape, strict=True):
        at = at * extent + start if extent > 1 else at
    return at


def box_of(view: Any, row: Any, column: Any, shape: Sequence[int]) -> Any:
    """The ref of a block of ``shape`` in a matrix."""
    return view.at[pl.ds(row, shape[0]), pl.ds(column, shape[1])]


def place(work: Work, places: Buffers, kinds: Sequence[str]) -> list[Placed]:
    """The buffers of ``kinds`` that the work needs; raises UnsupportedError where none fits."""
    plan = work.schedule.plan
    cuts = _cuts(work)
    found = []
    for (tensor, kind), buffer in places.items.items():
        if kind in kinds:
            shape = tuple(max(n, 1) for n in buffer.shape)
            dtype = jnp.dtype(plan.tensor(tensor).dtype)
            found.append(Placed((tensor, kind), shape, cuts[tensor], dtype))
    return found + (_landings(work, cuts) if LANDING in kinds else [])


def _landings(work: Work, cuts: dict[str, tuple[int, int]]) -> list[Placed]:
    plan, schedule = work.schedule.plan, work.schedule
    c, found = plan.columns, []
    for t, tensor in enumerate(plan.tensors):
        rows = np.flatnonzero((schedule.landing >= 0) & (c.dst_tensor == t))
        if len(rows):
            ndim = len(tensor.shape)
            extent = (c.dst_hi[rows, :ndim] - c.dst_lo[rows, :ndim]).max(axis=0)
            shape = (max(int(schedule.num_landings.max()), 1), *(max(int(n), 1) for n in extent))
            cut = (cuts[tensor.name][0] + 1, cuts[tensor.name][1] + 1)
            found.append(Placed((tensor.name, LANDING), shape, cut, jnp.dtype(tensor.dtype)))
    return found


def _cuts(work: Work) -> dict[str, tuple[int, int]]:
    """Per plan tensor the dimensions that tiles cut; a tensor no tile touches is cut alike."""
    plan, kernel = work.schedule.plan, work.kernel
    specs = dict(zip(kernel.operands, kernel.in_specs, strict=True))
    specs |= dict(zip(kernel.results, kernel.out_specs, strict=True))
    found: dict[str, tuple[int, int]] = {}
    work.axis_map.require_in_order()
    for binding in work.axis_map.bindings:
        ndim = len(plan.tensor(binding.tensor).shape)
        cut = cut_dimensions(specs[binding.operand])
        if len(cut) != 2 or cut[1] != ndim - 1:
            raise UnsupportedError(
                f"tensor {binding.tensor}: tiles cut dimensions {cut} of {ndim}; a GPU kernel cuts "
                f"two, the last of them the last: write the operand so, or use backend 'xla'"
            )
        found[binding.tensor] = (cut[0], cut[1])
    like = next(iter(found.values()), None)
    for tensor in plan.tensors:
        if tensor.name not in found:
            if like is None or len(tensor.shape) != like[1] + 1:
                raise UnsupportedError(
                    f"tensor {tensor.name} is no operand and has other dimensions than one that "
                    f"is; use backend 'xla'"
                )
            found[tensor.name] = like
    return found


def cut_dimensions(spec: pl.BlockSpec) -> list[int]:
    """The dimensions that blocks of an operand cut; the others are walked one index at a time."""
    return [d for d, size in enumerate(spec.block_shape or ()) if size is not None]


def placed_buffers(work: Work) -> Buffers:
    """``place_buffers`` of the work."""
    return place_buffers(work.schedule.plan, work.axis_map, work.kernel.results)
