"""Copying pieces by loads and stores of a warpgroup's threads: any alignment, no shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.backends import gpu_signals
from syncopate_jax.backends.gpu_buffers import box_of
from syncopate_jax.backends.gpu_copy import Part, Piece
from syncopate_jax.backends.gpu_layout import Layout
from syncopate_jax.errors import UnsupportedError

THREADS = 128  # of a warpgroup
ACCESS_BYTES = 16  # the widest access of a thread
LOADS = 8  # of a thread, in flight at once


@dataclass(frozen=True, slots=True)
class LdstMover:
    """Each thread of a warpgroup keeps up to ``loads`` accesses in flight.

    Attributes:
      loads: accesses of a thread for one piece, at most.
    """

    loads: int = LOADS
    copied: bool = False

    def pieces(self, layout: Layout) -> dict[Any, Piece]:
        """Rows, columns and the elements of a thread's access."""
        found = {}
        for dtype in dict.fromkeys(layout.by_key[move.src].dtype for move in layout.moves):
            moves = [
                m for m in layout.moves if layout.by_key[m.src].dtype == dtype and 0 not in m.shape
            ]
            if moves:
                found[dtype] = self._choose(layout, dtype, moves)
        return found

    def _choose(self, layout: Layout, dtype: Any, moves: list[Any]) -> Piece:
        rows = min(m.shape[layout.by_key[m.src].cut[0]] for m in moves)
        columns = min(m.shape[-1] for m in moves)
        vector = math.gcd(ACCESS_BYTES // dtype.itemsize, *self._columns(layout, moves))
        while vector >= 1:
            found = [
                (height * width, width, height)
                for height in range(1, min(rows, THREADS * self.loads) + 1)
                if (width := self._width(height, columns, vector))
            ]
            if found:
                _, width, height = max(found)
                return height, width, vector
            vector //= 2
        raise UnsupportedError(
            f"chunks of {rows} x {columns} elements are fewer than the {THREADS} threads that copy "
            f"one: use larger chunks, or backend 'tma_dedicated'"
        )

    def _width(self, height: int, columns: int, vector: int) -> int:
        """The most columns of a piece that gives every thread as many accesses; 0 if none does."""
        access = THREADS * vector
        unit = math.lcm(vector, access // math.gcd(height, access))
        return min(access * self.loads // height, columns) // unit * unit

    @staticmethod
    def _columns(layout: Layout, moves: list[Any]) -> set[int]:
        """Columns at which chunks and rows start and end."""
        found = set()
        width = (layout.ops.width - 2) // 2
        for m in moves:
            found.add(m.shape[-1])
            for key, column in ((m.src, 2), (m.dst, 2 + width)):
                buffer = layout.by_key[key]
                found |= {buffer.shape[-1], layout.ops.multiples[column + len(buffer.shape) - 1]}
        return found

    def scratch(self, layout: Layout, warpgroups: int) -> dict[str, Any]:
        return {}

    def run(
        self, scratch: dict[str, Any], warpgroup: Any, part: Part, piece: Piece, dtype: Any
    ) -> None:
        rows, columns, vector = piece

        def step(i: jax.Array, _: None) -> None:
            number = part.first + i * part.stride

            def copy(matrix: Any, row: Any, column: Any) -> None:
                spread = plgpu.Layout.WG_STRIDED((rows, columns), vec_size=vector)
                value = plgpu.load(box_of(matrix, row, column, (rows, columns)), layout=spread)

                def store(there: Any, to_row: Any, to_column: Any) -> None:
                    there[pl.ds(to_row, rows), pl.ds(to_column, columns)] = value

                part.dst(number, store)

            part.src(number, copy)

        lax.fori_loop(jnp.int32(0), part.steps, step, None)
        gpu_signals.publish()
