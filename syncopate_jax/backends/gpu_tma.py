"""Copying pieces by the TMA unit: GMEM to shared memory to a peer's GMEM, several at a time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.backends.gpu_buffers import box_of
from syncopate_jax.backends.gpu_copy import Part, Piece, common_pieces
from syncopate_jax.backends.gpu_layout import Layout
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import COPY_BYTES

ROW_BYTES = 512  # of a piece: 256 elements is the most the unit copies along a dimension
ROWS = 32
STAGES = 4
AHEAD = 2


@dataclass(frozen=True, slots=True)
class TmaMover:
    """Each warpgroup of a CTA keeps ``stages`` pieces in flight.

    Attributes:
      stages: pieces in shared memory, at least 2.
      rows: of a piece, at most.
      ahead: pieces that are being loaded, at least 1 and fewer than ``stages``; the others leave.
    """

    stages: int = STAGES
    rows: int = ROWS
    ahead: int = AHEAD
    copied: bool = True

    def pieces(self, layout: Layout) -> dict[Any, Piece]:
        self._check(layout)
        return common_pieces(
            layout,
            lambda dtype: (self.rows, min(ROW_BYTES // dtype.itemsize, 256)),
            lambda dtype: COPY_BYTES // dtype.itemsize,
        )

    def _check(self, layout: Layout) -> None:
        width = (layout.ops.width - 2) // 2
        for number, move in enumerate(layout.moves):
            for key, column in ((move.src, 2), (move.dst, 2 + width)):
                buffer = layout.by_key[key]
                at = layout.ops.offset + column + len(buffer.shape) - 1
                last = layout.programs
                stops = layout.table[:, last.offset + layout.channels]
                starts = {
                    int(row[at + op * layout.ops.width])
                    for row, stop in zip(layout.table, stops, strict=True)
                    for op in range(stop)
                    if row[layout.ops.offset + op * layout.ops.width] == number
                }
                found = {move.shape[-1], buffer.shape[-1], *starts}
                if any(n * buffer.dtype.itemsize % COPY_BYTES for n in found):
                    raise UnsupportedError(
                        f"tensor {key[0]}: chunks start or end at columns {sorted(found)} of "
                        f"{buffer.dtype}; the copy unit needs multiples of {COPY_BYTES} bytes: use "
                        f"backend 'ldst_dedicated'"
                    )

    def scratch(self, layout: Layout, warpgroups: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            f"smem_{dtype}": plgpu.SMEM((warpgroups, self.stages, *piece), dtype)
            for dtype, piece in self.pieces(layout).items()
        }
        return found | {"loaded": plgpu.Barrier(num_barriers=warpgroups * self.stages)}

    def run(
        self, scratch: dict[str, Any], warpgroup: Any, part: Part, piece: Piece, dtype: Any
    ) -> None:
        stages, ahead, steps = self.stages, self.ahead, part.steps
        smem, loaded = scratch[f"smem_{dtype}"], scratch["loaded"]

        def slot_of(i: Any) -> Any:
            return lax.rem(i, jnp.int32(stages))

        def load(i: Any) -> None:
            slot = slot_of(i)
            part.src(
                part.first + i * part.stride,
                lambda m, r, c: plgpu.copy_gmem_to_smem(
                    box_of(m, r, c, piece),
                    smem.at[warpgroup, slot],
                    loaded.at[warpgroup * stages + slot],
                ),
            )

        def step(i: jax.Array, _: None) -> None:
            slot = slot_of(i)
            plgpu.barrier_wait(loaded.at[warpgroup * stages + slot])
            part.dst(
                part.first + i * part.stride,
                lambda m, r, c: plgpu.copy_smem_to_gmem(
                    smem.at[warpgroup, slot], box_of(m, r, c, piece)
                ),
            )
            # All but the newest pieces have left shared memory: the next may take a place there.
            plgpu.wait_smem_to_gmem(stages - ahead, wait_read_only=True)
            pl.when(i + ahead < steps)(lambda: load(i + ahead))

        for i in range(ahead):
            pl.when(i < steps)(functools.partial(load, jnp.int32(i)))
        lax.fori_loop(jnp.int32(0), steps, step, None)
        plgpu.wait_smem_to_gmem(0)  # landed, not only read
