"""Makes the tables of the ``remote_dma`` backend from a schedule and a local kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncopate_jax.backends.buffers import Buffers, place_buffers, result_tensor
from syncopate_jax.backends.dma_code import Coder
from syncopate_jax.backends.dma_layout import (
    LANDING,
    Block,
    BlockTable,
    Layout,
    Placed,
    Program,
    Section,
)
from syncopate_jax.backends.in_order import START, WAIT, sequence
from syncopate_jax.backends.interface import Work, once_a_work
from syncopate_jax.backends.rank_table import as_int32
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir.text import row_text
from syncopate_jax.kernel.blocks import block_shape, kept_sizes
from syncopate_jax.kernel.traced_body import reordered_axes


@once_a_work
def lay_out(work: Work) -> Layout:
    """Buffers and tables for ``work``; raises UnsupportedError when this backend cannot do it."""
    return _LayoutMaker(work).make()


class _LayoutMaker:
    def __init__(self, work: Work):
        self.work, self.plan, self.schedule = work, work.schedule.plan, work.schedule
        self.kernel, self.space = work.kernel, work.space
        self.ranks, self.tiles = self.plan.num_ranks, work.schedule.num_tiles
        self.steps = work.schedule.num_steps
        self.operand_of = {b.tensor: b.operand for b in work.axis_map.bindings}
        self.tensor_of = {b.operand: b.tensor for b in work.axis_map.bindings}
        self.specs = dict(zip(self.kernel.operands, self.kernel.in_specs, strict=True))
        self.specs |= dict(zip(self.kernel.results, self.kernel.out_specs, strict=True))
        self.places: Buffers = place_buffers(self.plan, work.axis_map, self.kernel.results)
        self.vector: list[np.ndarray] = []
        self.length = 0

    def make(self) -> Layout:
        self._check()
        placed = self._placed()
        layout_parts = self._operands(placed)
        tile, step = self._coordinates()
        orders = tuple(map(tuple, np.unique(self.schedule.k_order, axis=0).tolist()))
        return Layout(
            **layout_parts,
            **self._programs(placed),
            tile=tile,
            step=step,
            step_counts=tuple(axis.count for axis in self.space.reduction),
            reduction_axes=self.kernel.reduction_axes,
            orders=orders,
            reordered=reordered_axes(self.kernel, orders),
            bound=frozenset(self.tensor_of),
            table=np.concatenate(self.vector, axis=1),
        )

    def _check(self) -> None:
        c, name = self.plan.columns, self.plan.name
        if self.schedule.workers != 1:
            raise UnsupportedError(
                f"remote_dma: a TPU core is one worker, the schedule is for "
                f"{self.schedule.workers}; schedule with workers=1"
            )
        if self.tiles == 0:
            raise UnsupportedError("remote_dma: there is nothing to compute; use backend 'xla'")
        pulls = np.flatnonzero((c.src_rank != c.dst_rank) & (c.rank != c.src_rank))
        if len(pulls):
            raise UnsupportedError(
                f"remote_dma: plan {name} has {len(pulls)} pulls (first: rank "
                f"{c.rank[pulls[0]]} from rank {c.src_rank[pulls[0]]}); a TPU core can only push: "
                f"use mode='push'"
            )
        if np.any(c.reduce > 1):
            raise UnsupportedError(
                f"remote_dma: plan {name} reduces by other than sum; use backend 'xla'"
            )
        unplaced = np.flatnonzero((c.reduce > 0) & (self.schedule.landing < 0))
        if len(unplaced):
            raise UnsupportedError(
                f"remote_dma: plan {name} reduces into data that no tile writes: "
                f"{row_text(self.plan, int(unplaced[0]))}; use backend 'xla'"
            )
        if np.any(c.reduce > 0) and not self.kernel.has_addend:
            raise UnsupportedError(
                f"remote_dma: plan {name} adds partial results in the epilogue, but kernel "
                f"{self.kernel.name} takes no addend; give it has_addend=True"
            )
        for tensor in sorted(set(c.dst_tensor[c.reduce > 0].tolist())):
            summed = self.plan.tensors[tensor]
            if not jnp.issubdtype(summed.dtype, jnp.floating):
                raise UnsupportedError(
                    f"remote_dma: plan {name} adds up tensor {summed.name} of {summed.dtype}, but "
                    f"addends are added in float32, which cannot hold each of its values; use "
                    f"backend 'xla'"
                )
        self.work.axis_map.require_in_order()

    # --- buffers -----------------------------------------------------------------------------

    def _placed(self) -> list[Placed]:
        out = []
        for key, buffer in self.places.items.items():
            tensor, kind = key
            operand = self.operand_of.get(tensor, "")
            blocks = self._block_shape(operand, buffer.shape) if operand else None
            padded = buffer.shape
            if blocks and kind != "input":
                padded = tuple(-(-n // b) * b for n, b in zip(buffer.shape, blocks, strict=True))
            padded = tuple(max(n, 1) for n in padded)
            out.append(Placed(key, kind, buffer.shape, padded, self._dtype(tensor), operand))
        return out + self._landing_buffers()

    def _landing_buffers(self) -> list[Placed]:
        c, out = self.plan.columns, []
        for t, tensor in enumerate(self.plan.tensors):
            rows = np.flatnonzero((c.reduce > 0) & (c.dst_tensor == t))
            if not len(rows):
                continue
            ndim = len(tensor.shape)
            extent = (c.dst_hi[rows, :ndim] - c.dst_lo[rows, :ndim]).max(axis=0)
            operand = self.operand_of[tensor.name]
            block = self._block_shape(operand, tuple(extent))
            padded = tuple(int(-(-n // b) * b) for n, b in zip(extent, block, strict=True))
            number = max(int(self.schedule.num_landings.max()), 1)
            shape = (number, *map(int, extent))
            dtype = self._dtype(tensor.name)
            key = (tensor.name, LANDING)
            out.append(Placed(key, LANDING, shape, (number, *padded), dtype, operand))
        return out

    def _dtype(self, tensor: str) -> Any:
        return jax.numpy.dtype(self.plan.tensor(tensor).dtype)

    def _block_shape(self, operand: str, shape: Sequence[int]) -> tuple[int, ...]:
        return block_shape(self.specs[operand], tuple(shape))

    # --- operands ----------------------------------------------------------------------------

    def _operands(self, placed: list[Placed]) -> dict[str, Any]:
        by_key = {b.key: b for b in placed}
        parts: dict[str, Any] = {
            "buffers": placed,
            "inputs": {b.operand: i for i, b in enumerate(placed) if b.kind == "input"},
            "results": {},
            "blocks": [],
            "loads": {},
            "stores": {},
            "landings": None,
        }
        for binding in self.work.axis_map.bindings:
            operand, tensor = binding.operand, binding.tensor
            written = operand in self.kernel.results
            sample = by_key[tensor, "send" if written else "gathered"]
            sizes = kept_sizes(self.specs[operand], sample.shape)
            block = tuple(n for n in sizes if n is not None)
            parts["blocks"].append(Block(operand, block, sample.dtype))
            if written:
                parts["stores"][operand] = self._store(operand, tensor, sizes)
                home = result_tensor(self.plan, binding)
                parts["results"][operand] = (home, "result")
                if (tensor, LANDING) in by_key:
                    parts["landings"] = self._landings(operand, tensor, sizes)
                    parts["blocks"].append(Block(LANDING, block, sample.dtype))
            else:
                parts["loads"][operand] = self._load(operand, tensor, sizes)
        parts["addends"] = Program(
            self._section(self._starts(self.schedule.addends, self.tiles)), False
        )
        return parts

    def _boxes(self, operand: str, tensor: str) -> tuple[np.ndarray, np.ndarray]:
        """Boxes in the tensor's coordinates: [ranks, tiles, steps, dims] in visiting order."""
        lo, hi = self.work.accesses[operand].boxes(self.space)
        origin = self._origin(operand, tensor)
        order, k_order = self.schedule.order, self.schedule.k_order
        picks = (order[:, :, None], k_order[:, None, :])
        return lo[picks] + origin[:, None, None], hi[picks] + origin[:, None, None]

    def _origin(self, operand: str, tensor: str) -> np.ndarray:
        """[ranks, dims] where the operand's coordinates start in the tensor's."""
        if operand in self.kernel.results:
            return self.places.items[tensor, "send"].lo
        return self.places.origins[tensor]

    def _load(self, operand: str, tensor: str, sizes: tuple[int | None, ...]) -> BlockTable:
        lo, _ = self._boxes(operand, tensor)
        key = (tensor, "gathered")
        offsets = lo - self.places.items[key].lo[:, None, None]
        offsets = offsets.reshape(self.ranks, self.tiles * self.steps, -1)
        fresh = np.ones((self.ranks, self.tiles * self.steps, 1), np.int64)
        fresh[:, 1:, 0] = np.any(offsets[:, 1:] != offsets[:, :-1], axis=-1)
        rows = np.concatenate([fresh, offsets], axis=-1)
        return BlockTable(operand, (key,), sizes, self._section(rows))

    def _store(self, operand: str, tensor: str, sizes: tuple[int | None, ...]) -> BlockTable:
        lo, hi = (box[:, :, 0] for box in self._boxes(operand, tensor))
        keys = [(tensor, "send")]
        choice = np.zeros((self.ranks, self.tiles, 1), np.int64)
        base = np.broadcast_to(self.places.items[keys[0]].lo[:, None], lo.shape)
        own = self.places.items.get((tensor, "result"))
        if own is not None:
            keys.append((tensor, "result"))
            meets = np.all((lo < own.hi[:, None]) & (hi > own.lo[:, None]), axis=-1)
            inside = np.all((lo >= own.lo[:, None]) & (hi <= own.hi[:, None]), axis=-1)
            self._refuse_straddling(operand, meets & ~inside)
            choice[..., 0] = inside
            base = np.where(inside[..., None], own.lo[:, None], base)
        rows = np.concatenate([choice, lo - base], axis=-1)
        return BlockTable(operand, tuple(keys), sizes, self._section(rows))

    def _refuse_straddling(self, operand: str, bad: np.ndarray) -> None:
        if bad.any():
            rank, position = (int(i) for i in np.argwhere(bad)[0])
            raise UnsupportedError(
                f"remote_dma: rank {rank}: tile {self.schedule.order[rank, position]} of "
                f"{operand} straddles the edge of a chunk; choose tiles that end where chunks end"
            )

    def _landings(self, operand: str, tensor: str, sizes: tuple[int | None, ...]) -> BlockTable:
        """Per addend: landing number, then the tile's place in the landing."""
        c, schedule = self.plan.columns, self.schedule
        ndim = len(self.plan.tensor(tensor).shape)
        lo, hi = (box[:, :, 0] for box in self._boxes(operand, tensor))
        row_of = {
            (int(c.dst_rank[row]), int(n)): row for row, n in enumerate(schedule.landing) if n >= 0
        }
        rows: list[list[list[int]]] = [[] for _ in range(self.ranks)]
        for at, (number,) in zip(
            schedule.addends.owner, schedule.addends.values.tolist(), strict=True
        ):
            rank, position = divmod(int(at), self.tiles)
            row = row_of[rank, number]
            start, stop = c.dst_lo[row, :ndim], c.dst_hi[row, :ndim]
            inside = np.all(lo[rank, position] >= start) and np.all(hi[rank, position] <= stop)
            bad = np.zeros((self.ranks, self.tiles), bool)
            bad[rank, position] = not inside
            self._refuse_straddling(operand, bad)
            rows[rank].append([1, number, *(lo[rank, position] - start).tolist()])
        section = self._section(_stack(rows, 2 + ndim))
        return BlockTable(LANDING, ((tensor, LANDING),), (None, *sizes), section)

    def _coordinates(self) -> tuple[Section, Section]:
        """Index along the parallel axes by tile position, along the reduction axes by step."""
        index = self.space.grid_indices()
        parallel = [index[axis.name][:, 0] for axis in self.space.parallel]
        reduction = [index[axis.name][0] for axis in self.space.reduction]
        order, k_order = self.schedule.order, self.schedule.k_order
        tile = np.stack([i[order] for i in parallel], -1) if parallel else order[..., None] * 0
        step = np.stack([i[k_order] for i in reduction], -1) if reduction else k_order[..., None]
        return self._section(tile), self._section(step)

    # --- instructions ------------------------------------------------------------------------

    def _programs(self, placed: list[Placed]) -> dict[str, Any]:
        ndim = max(len(b.padded) for b in placed)
        coder = Coder(self.schedule, self.places, ndim)
        sequences = sequence(self.schedule)
        for rank, found in enumerate(sequences):
            fills = coder.fills(rank)
            found.before[0] = self._with_fills(found.before[0], fills)
            for name, points in (
                ("before", found.before),
                ("epilogue", found.epilogue),
                ("after", found.after),
                ("end", [found.end]),
            ):
                coder.add(rank, name, points)
        code = self._section(_stack(coder.code, 4 + 2 * ndim))
        programs = {
            name: Program(self._section(np.array(starts)[..., None]), empty=not any_code)
            for name, (starts, any_code) in coder.programs().items()
        }
        return {
            **programs,
            "code": code,
            "branches": coder.branches,
            "num_arrivals": coder.num_arrivals,
            "num_sends": coder.num_sends,
            "ndim": ndim,
            "leave_together": not all(found.heard_all for found in sequences),
        }

    @staticmethod
    def _with_fills(first: list[tuple[int, int]], fills: list[int]) -> list[tuple[int, int]]:
        """Sends that need nothing, then the rank's own data moves into place, then the rest."""
        lead = next((i for i, (code, _) in enumerate(first) if code != START), len(first))
        local = [(START, row) for row in fills] + [(WAIT, row) for row in fills]
        return first[:lead] + local + first[lead:]

    def _starts(self, rows: Any, points: int) -> np.ndarray:
        """[ranks, points + 1, 1] starts of rows, counted from each rank's first entry."""
        starts = np.stack(
            [rows.start[r * points : (r + 1) * points + 1] for r in range(self.ranks)]
        )
        return (starts - starts[:, :1])[..., None]

    def _section(self, rows: np.ndarray) -> Section:
        """Appends [ranks, rows, width] to the vector."""
        section = Section(self.length, rows.shape[-1])
        flat = as_int32(rows).reshape(self.ranks, -1)
        self.vector.append(flat)
        self.length += flat.shape[1]
        return section


def _stack(rows: list[list[list[int]]], width: int) -> np.ndarray:
    """[ranks, longest, width] with shorter ranks padded by zeros."""
    longest = max((len(row) for row in rows), default=0)
    out = np.zeros((len(rows), max(longest, 1), width), np.int64)
    for rank, row in enumerate(rows):
        if row:
            out[rank, : len(row)] = row
    return out
