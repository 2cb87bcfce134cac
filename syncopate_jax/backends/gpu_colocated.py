"""Backends in which the CTA that computes a tile also communicates (paper section 5.2).

What a plan sends of a tile, the tile's epilogue stores at the destination itself; what a plan
brings to a tile, the tile reads where it is from the start. No CTA only communicates, nothing is
gathered or kept to be sent, and an operation's signals are raised by the tiles of its chunk.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from syncopate_jax.backends import gpu_kernel
from syncopate_jax.backends.gpu_buffers import INPUT, LANDING, RESULT, Key
from syncopate_jax.backends.gpu_kernel import FusedKernel
from syncopate_jax.backends.gpu_layout import Layout
from syncopate_jax.backends.gpu_tables import LayoutMaker, Points
from syncopate_jax.backends.interface import Emitted, Work, once_a_work, too_wide, wrong_target
from syncopate_jax.backends.rank_table import Lists
from syncopate_jax.errors import SyncopateError, UnsupportedError
from syncopate_jax.ir.text import row_text
from syncopate_jax.options import Launch

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Colocated:
    """Every CTA computes, and communicates for its own tiles.

    Attributes:
      direct: tiles are stored from registers; else by the copy unit.
    """

    name: str
    direct: bool
    targets: tuple[str, ...] = ("mosaic_gpu",)
    folds: bool = True

    def workers(self, launch: Launch, ranks: int) -> int:
        """CTAs of a rank that compute: all."""
        return launch.ctas(ranks)

    def unsupported_reason(self, work: Work, target: str) -> str | None:
        """Why the work cannot be done here; None when it can."""
        if target not in self.targets:
            return wrong_target(self.name, self.targets, target)
        if reason := too_wide(work):
            return f"{self.name}: {reason}"
        if work.launch.ctas(work.schedule.plan.num_ranks) < 1:
            return f"{self.name} needs at least 1 CTA a rank; see Launch(sms)"
        try:
            layout = lay_out(work)
        except SyncopateError as error:
            return str(error)
        return self._direct_reason(work, layout) if self.direct else None

    def _direct_reason(self, work: Work, layout: Layout) -> str | None:
        """What stores from registers cannot do: they are not clipped at an edge."""
        if layout.reads and any(read.dims for read in layout.reads.values()):
            return (
                f"{self.name} stores tiles at peers, but plan {work.schedule.plan.name} brings "
                f"data to tiles, which the tensor cores take from shared memory: use "
                f"'tma_colocated'"
            )
        for spec, out in zip(work.kernel.out_specs, work.kernel.out_shape, strict=True):
            for size, extent in zip(spec.block_shape or (), out.shape, strict=True):
                if size and extent % size:
                    return (
                        f"{self.name}: tiles of {size} do not divide {extent}, and a store from "
                        f"registers is not clipped: use 'tma_colocated'"
                    )
        return None

    def emit(self, work: Work, target: str) -> Emitted:
        """The fused kernel of one rank, or of all if they are folded."""
        kernel = FusedKernel(work, lay_out(work), work.launch, None, 0, self.direct)
        return gpu_kernel.emitted(self.name, kernel)


@once_a_work
def lay_out(work: Work) -> Layout:
    """The layout of a kernel whose tiles communicate."""
    return ColocatedMaker(work, 0).make()


class ColocatedMaker(LayoutMaker):
    """Tables of a kernel whose tiles read from peers, or store at peers, what operations move."""

    kinds = (INPUT, RESULT, LANDING)

    def _check(self) -> None:
        super()._check()
        self.tiles_of = {row: self._tiles_of(row) for row in range(self.c.n) if self._sends(row)}

    def _sends(self, row: int) -> bool:
        """Whether an operation moves what tiles write; else it brings what they read."""
        found = self.written()
        if found is None:
            return False
        if self.plan.tensors[self.c.src_tensor[row]].name == found[1]:
            return True
        raise UnsupportedError(
            f"plan {self.plan.name}: {row_text(self.plan, row)} forwards what it received; a tile "
            f"stores its own result: use a plan of one hop, or 'tma_dedicated'"
        )

    def _tiles_of(self, row: int) -> list[int]:
        """Positions of the tiles that produce an operation's source, on its source rank."""
        operand, tensor = self.written() or ("", "")
        rank, ndim = int(self.c.src_rank[row]), len(self.plan.tensor(tensor).shape)
        lo, hi = (box[rank] for box in self._written_boxes)
        start, stop = self.c.src_lo[row, :ndim], self.c.src_hi[row, :ndim]
        meets = np.all((lo < stop) & (hi > start), axis=-1)
        inside = np.all((lo >= start) & (hi <= stop), axis=-1)
        bad = np.zeros((self.ranks, self.tiles), bool)
        bad[rank] = meets & ~inside
        self._refuse_straddling(operand, bad)
        self._check_dependencies(row)
        return np.flatnonzero(meets).tolist()

    def _check_dependencies(self, row: int) -> None:
        """An operation follows its tiles, and what those add before they are stored."""
        dep_row = self.c.dep_row(self.ranks)
        for j in range(self.c.dep_start[row], self.c.dep_start[row + 1]):
            before = int(dep_row[j])
            here = self.c.dst_rank[before] == self.c.src_rank[row]
            if self.schedule.landing[before] < 0 or not here:
                raise UnsupportedError(
                    f"plan {self.plan.name}: {row_text(self.plan, row)} waits for "
                    f"{row_text(self.plan, before)}, which its tiles do not add: use "
                    f"'tma_dedicated'"
                )

    @functools.cached_property
    def _written_boxes(self) -> tuple[Array, Array]:
        found = self.written()
        assert found is not None
        return self.tile_boxes(found[0])

    # --- slots: raised by tiles ----------------------------------------------------------------

    def copiers_of(self, row: int) -> int:
        return len(self.tiles_of[row])

    def _scale_slots(self) -> None:
        rows = self.schedule.op_signals
        for row, (rank, slot) in zip(rows.owner.tolist(), rows.values.tolist(), strict=True):
            if row in self.tiles_of:
                self._raise_scale(rank, slot, self.copiers_of(row))

    def waited(self, rank: int, slot: int, epilogue: bool) -> bool:
        return epilogue

    def _signals(self) -> Lists:
        points: Points = [[[] for _ in range(self.tiles)] for _ in range(self.ranks)]
        extra = self._arrivals() if self.tiles_of else {}
        for row, positions in self.tiles_of.items():
            raised = [*map(list, self.schedule.op_signals.row(row)), *extra[row]]
            for position in positions:
                points[int(self.c.src_rank[row])][position] += raised
        return self.maker.lists(points, 2)

    # --- writing: every place of a tile --------------------------------------------------------

    def targets(
        self, operand: str, tensor: str, rank: int, position: int, lo: Array, hi: Array
    ) -> list[tuple[Key, int, list[int]]]:
        found = []
        own = self.places.items.get((tensor, RESULT))
        if own is not None and np.all((lo < own.hi[rank]) & (hi > own.lo[rank])):
            found.append(self.home(operand, tensor, rank, position, lo, hi))
        for row in self._rows_of.get((rank, position), ()):
            key, starts = self.arrival(row)
            shift = (lo - self.c.src_lo[row, : len(lo)]).tolist()
            extra = len(starts) - len(shift)
            at = [*starts[:extra], *(a + b for a, b in zip(starts[extra:], shift, strict=True))]
            found.append((key, int(self.c.dst_rank[row]), at))
        return found

    @functools.cached_property
    def _rows_of(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for row, positions in self.tiles_of.items():
            for position in positions:
                found.setdefault((int(self.c.src_rank[row]), position), []).append(row)
        return found

    def _operations(self) -> dict[str, Any]:
        nothing: Points = [[[]] for _ in range(self.ranks)]
        zeros = np.zeros((self.ranks, 2, 1), np.int64)
        return {
            "moves": [],
            "ops": self.maker.section(zeros),
            "op_waits": self.maker.lists(nothing, 2),
            "op_signals": self.maker.lists(nothing, 2),
            "programs": self.maker.section(zeros),
            "channels": 1,
        }

    # --- reading: where data is from the start -------------------------------------------------

    def _elsewhere(
        self, operand: str, tensor: str, own: Array
    ) -> tuple[Key, Array, dict[str, Any]]:
        key = (tensor, INPUT)
        nowhere = np.zeros_like(self.origin(operand))
        if own.all():
            return key, nowhere, {}
        source, shift = self._sources(operand, tensor)
        source[own] = -1
        by_step = bool(np.all(source == source.max(axis=1, keepdims=True)))
        if not by_step and np.any(source != source.max(axis=2, keepdims=True)):
            raise UnsupportedError(
                f"plan {self.plan.name}: where {operand} lies depends on the tile and on the step; "
                f"a tile reads its peers by one of them: use 'tma_dedicated'"
            )
        row = source.max(axis=1 if by_step else 2)
        rank = np.where(row >= 0, self.c.src_rank[row], np.arange(self.ranks)[:, None])
        away = np.where((row >= 0)[..., None], shift[row], 0)
        away = away + self.origin(operand)[:, None] * (row >= 0)[..., None]
        self.readers: list[set[int]] = [set(one.tolist()) for one in rank]
        section = self.maker.section(np.concatenate([rank[..., None], away], axis=-1))
        return key, nowhere, {"peer": section, "peer_by_step": by_step}

    def _sources(self, operand: str, tensor: str) -> tuple[Array, Array]:
        """Operation that brings each box, [ranks, tiles, steps], -1 for none; and how far away the
        sender has it, [operations, dims], from the tensor's coordinates."""
        lo, hi = self.boxes(operand)
        ndim = lo.shape[-1]
        index = self.plan.tensor_index(tensor)
        source = np.full(lo.shape[:3], -1)
        shift = np.zeros((max(self.c.n, 1), ndim), np.int64)
        for row in np.flatnonzero(self.c.dst_tensor == index).tolist():
            held = self.places.source(row)
            if held.kind != INPUT:
                raise UnsupportedError(
                    f"plan {self.plan.name}: {row_text(self.plan, row)} forwards what it received; "
                    f"a tile reads from the owner: use a plan of one hop, or 'tma_dedicated'"
                )
            rank, src_rank = int(self.c.dst_rank[row]), int(self.c.src_rank[row])
            start, stop = self.c.dst_lo[row, :ndim], self.c.dst_hi[row, :ndim]
            inside = np.all((lo[rank] >= start) & (hi[rank] <= stop), axis=-1)
            meets = np.all((lo[rank] < stop) & (hi[rank] > start), axis=-1)
            bad = np.zeros((self.ranks, self.tiles), bool)
            bad[rank] = np.any(meets & ~inside, axis=-1)
            self._refuse_straddling(operand, bad)
            source[rank][meets] = row
            shift[row] = self.c.src_lo[row, :ndim] - start - held.lo[src_rank]
        return source, shift

    def _exit_signals(self) -> Lists:
        """Every CTA tells those it has read from; they stay until all have."""
        points: Points = [[[]] for _ in range(self.ranks)]
        readers = getattr(self, "readers", [])
        for source in sorted(set().union(*readers)):
            slot = self.new_slot(source)
            told = [r for r in range(self.ranks) if source in readers[r] and r != source]
            for rank in told:
                points[rank][0].append([source, slot])
            if told:
                self.exits[source][0].append([slot, len(told) * self.schedule.workers])
        return self.maker.lists(points, 2)
