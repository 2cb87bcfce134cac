"""The end of a tile of the Hopper matrix product: addends, rounding, stores.

Called by the compute warpgroups of ``matmul_mosaic_gpu_kernel``, each for its part of the tile.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.kernel.loop import Use
from syncopate_jax.pallas_kernels import tile_loop_mosaic_gpu as tile_loop
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import WGMMA_ROWS, MatmulConfig
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_operands import Operands


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What becomes of an accumulator; a part of a tile is stored in several output stores.

    Args:
      transform: elementwise function of the float32 result, after the addend and before rounding.
      y_smem: slots that output stores lie in until the copy unit has read them.
      stored: barrier at which each warpgroup says that its part is in memory; None if none asks.
      addend_smem, addend_full: where the copy unit brings addends, and the barrier of that.
    """

    operands: Operands
    config: MatmulConfig
    loop: tile_loop.TileLoop
    transform: Callable[[jax.Array], jax.Array] | None
    y_smem: Any
    stored: Any = None
    addend_smem: Any = None
    addend_full: Any = None

    @property
    def store_columns(self) -> int:
        return self.config.store_columns(self.operands.y.dtype)

    @property
    def subtiles(self) -> list[tuple[int, int]]:
        """Row and column, in a warpgroup's part, of each output store."""
        rows, columns = self.config.part
        return [
            (row, column)
            for row in range(0, rows, WGMMA_ROWS)
            for column in range(0, columns, self.store_columns)
        ]

    def on_part(self, use: Callable[[Any], None], index: int, wg: jax.Array) -> Use:
        """``use`` called with the ref of an output store's part of the tile."""
        first_row, first_column = self.subtiles[index]
        rows, columns = self.config.part
        row = first_row + (wg * rows if self.config.split == "m" else 0)
        column = first_column + (wg * columns if self.config.split == "n" else 0)
        # Not known when traced: JAX refuses known starts past an edge, the copy unit clips there.
        nothing = wg * 0

        def on_tile(matrix: Any, tile_row: Any, tile_column: Any) -> None:
            at = pl.ds(tile_row + row + nothing, WGMMA_ROWS)
            use(matrix.at[at, pl.ds(tile_column + column + nothing, self.store_columns)])

        return on_tile

    def corner(self, tile: tile_loop.Tile) -> tuple[jax.Array, jax.Array]:
        return tile.m * self.config.tile_m, tile.n * self.config.tile_n

    def read_addends(self, tile: tile_loop.Tile, wg: jax.Array) -> tuple[jax.Array, ...]:
        """Each output store's addend, or zeros where the tile has none."""
        assert self.operands.addends is not None
        count, addend_at = self.operands.addends(tile)
        dtype = self.operands.addend.dtype

        def read() -> tuple[jax.Array, ...]:
            found: list[jax.Array] = []

            def keep(ref: Any) -> None:
                found.append(plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False))

            for index, _ in enumerate(self.subtiles):
                addend_at(jnp.int32(0), self.on_part(keep, index, wg))
            return tuple(found)

        def nothing() -> tuple[jax.Array, ...]:
            zeros = jnp.zeros((WGMMA_ROWS, self.store_columns), dtype)
            return tuple(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA) for _ in self.subtiles)

        # Else LLVM widens to float32 inside both branches, which takes twice the registers, more
        # than there are, and waits for the loads at once.
        return lax.optimization_barrier(lax.cond(count > 0, read, nothing))

    def round_part(
        self,
        tile: tile_loop.Tile,
        index: int,
        value: jax.Array,
        wg: jax.Array,
        addends: Sequence[jax.Array] = (),
    ) -> jax.Array:
        """One output store's values: addends and transform in float32, then one rounding."""
        row, column = self.subtiles[index]
        part = value[row : row + WGMMA_ROWS, column : column + self.store_columns]
        load = self.on_part(functools.partial(self.load_addend, wg=wg), index, wg)
        if addends:
            part += addends[index].astype(jnp.float32)
        elif self.operands.addends is not None:
            count, addend_at = self.operands.addends(tile)

            def add(i: jax.Array, total: jax.Array) -> jax.Array:
                addend_at(i, load)
                return total + self.take_addend(wg)

            part = lax.fori_loop(jnp.int32(0), count, add, part)
        elif self.operands.addend is not None:
            load(self.operands.addend, *self.corner(tile))
            part += self.take_addend(wg)
        if self.transform is not None:
            part = self.transform(part)
        return part.astype(self.operands.y.dtype)

    def load_addend(self, ref: Any, wg: jax.Array) -> None:
        plgpu.copy_gmem_to_smem(ref, self.addend_smem.at[wg], self.addend_full.at[wg])

    def take_addend(self, wg: jax.Array) -> jax.Array:
        plgpu.barrier_wait(self.addend_full.at[wg])
        smem = self.addend_smem.at[wg]
        found = plgpu.load(smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        plgpu.commit_smem()  # every thread has read before the next copy overwrites
        return found

    def store_part(
        self,
        tile: tile_loop.Tile,
        index: int,
        part: jax.Array,
        wg: jax.Array,
        only_if: jax.Array | None = None,
    ) -> None:
        """Starts one output store, once the store that used its slot before has been read."""
        slots = self.config.epilogue_slots
        smem = self.y_smem.at[wg, index % slots]
        direct = self.operands.direct
        if not direct:
            plgpu.wait_smem_to_gmem(self.stores_since(index), wait_read_only=True)
            smem[...] = part
            plgpu.commit_smem()

        def put(ref: Any) -> None:
            if not direct:
                plgpu.copy_smem_to_gmem(smem, ref)
            elif hasattr(plgpu, "store"):  # JAX 0.12, which calls a store of half sectors slow
                plgpu.store(ref, part, optimized=False)
            else:
                ref[...] = part

        def send() -> None:
            to_place = self.on_part(put, index, wg)
            if self.operands.y_at is not None:
                self.operands.y_at(tile, to_place)
            else:
                to_place(self.operands.y, *self.corner(tile))

        if only_if is None:
            send()
        else:
            pl.when(only_if)(send)

    def stores_since(self, index: int) -> int:
        """Output stores begun, at least, since the one that used this part's slot before."""
        count, slots = len(self.subtiles), self.config.epilogue_slots
        if index >= slots:
            return slots - 1
        last = max(range(index, count, slots))  # of the tile before
        return min(count - last + index, slots) - 1

    def say_stored(self) -> None:
        """Tells the warpgroup that loads, and signals, once this one's part of a tile is stored."""
        if self.loop.after_tile is not None:
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(self.stored)  # by every thread, of its own stores
