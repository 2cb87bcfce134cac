"""The layout of a Triton kernel in which the program that computes a tile also communicates."""

from __future__ import annotations

import numpy as np

from syncopate_jax.backends.gpu_buffers import INPUT, LANDING, RESULT
from syncopate_jax.backends.gpu_colocated import ColocatedMaker
from syncopate_jax.backends.triton_layout import TritonMaker
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.triton_source.scheme import Spot

Array = np.ndarray


class ColocatedTritonMaker(TritonMaker, ColocatedMaker):
    """Of a kernel whose tiles read and write at peers themselves."""

    title = "tiles read and write at peers"
    kinds = (INPUT, RESULT, LANDING)

    def _other(
        self, operand: str, tensor: str, lo: Array, hi: Array, wanted: Array
    ) -> tuple[Spot | None, Array, Array]:
        """The place of what a rank did not have: with the rank that has it from the start."""
        zero = np.zeros(wanted.shape, np.int64)
        if not wanted.any():
            return None, zero, zero
        source, _ = self._sources(operand, tensor)
        if np.any(source[wanted] < 0):
            raise UnsupportedError(
                f"plan {self.plan.name} brings only part of what tiles read of {operand}; use "
                f"'ldst_dedicated' or 'xla'"
            )
        row, held = np.where(wanted, source, 0), self.places.items[tensor, INPUT]
        rank, ndim = self.c.src_rank[row], lo.shape[-1]
        away = (self.c.src_lo - self.c.dst_lo)[row, :ndim] - held.lo[rank]
        shift = self._shift(operand, (tensor, INPUT), lo + away, lo, hi, wanted)
        return Spot(self.name((tensor, INPUT)), peer=True), np.where(wanted, rank, 0), shift
