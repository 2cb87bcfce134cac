"""The body of the Hopper matrix product: what each warpgroup of a CTA does, phase by phase.

One warpgroup feeds the TMA unit, the others the tensor cores. A ring of stages in shared memory
lies between them and runs on from tile to tile, so that the loads of a tile begin during the one
before. ``compute_tiles`` is called inside a Mosaic GPU kernel and is handed its loop over tiles.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.kernel.loop import Use
from syncopate_jax.pallas_kernels import tile_loop_mosaic_gpu as tile_loop
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_beside import Beside
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import (
    CLUSTER_AXES,
    WGMMA_ROWS,
    MatmulConfig,
)
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_epilogue import Epilogue
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_operands import Operands, scratch

# Names that the types of JAX leave out, or call abstract.
_untyped: Any = plgpu

CTA_AXIS, WARPGROUP_AXIS = "cta", "wg"
EPILOGUE_BUFFERS = "y_smem", "stored", "addend_smem", "addend_full"


def compute_tiles(
    operands: Operands,
    config: MatmulConfig,
    loop: tile_loop.TileLoop,
    *,
    transform: Callable[[jax.Array], jax.Array] | None = None,
    flat_views: bool = True,
) -> None:
    """Computes the tiles of ``loop``; called by every warpgroup of a kernel's body.

    The kernel's mesh has the axes ``CLUSTER_AXES`` and, of size ``config.warpgroups + 1``,
    ``WARPGROUP_AXIS``. The last warpgroup loads and calls the loop's hooks that wait for operands.

    Args:
      operands: GMEM refs.
      config: how the product is cut.
      loop: which tiles, in units of a cluster's tile, and the hooks around them. Its hooks see
        CTA tiles.
      transform: elementwise function of the float32 result, after the addend and before rounding.
      flat_views: False in interpret mode, whose views of a buffer do not share its bytes.
    """
    allocated = scratch(operands, config, loop.after_tile is not None, flat_views)

    def body(**buffers: Any) -> None:
        for name in "x", "w":
            views = buffers.pop(f"{name}_smem")
            is_union = isinstance(allocated[f"{name}_smem"], plgpu.RefUnion)
            tiled, rows = views if is_union else (views, views)
            buffers |= {f"{name}_smem": tiled, f"{name}_rows": rows}
        own = {name: buffers.pop(name) for name in EPILOGUE_BUFFERS if name in buffers}
        epilogue = Epilogue(operands, config, loop, transform, **own)
        worker = _Worker(operands, config, loop, epilogue, **buffers)
        wg = lax.axis_index(WARPGROUP_AXIS)

        @pl.when(wg == config.warpgroups)
        def _produce() -> None:
            worker.produce()

        @pl.when(wg < config.warpgroups)
        def _consume() -> None:
            worker.consume(wg)

    pl.run_scoped(body, **allocated, collective_axes=WARPGROUP_AXIS)


@dataclasses.dataclass(frozen=True)
class _Worker:
    """The named phases of the kernel body, for one CTA."""

    operands: Operands
    config: MatmulConfig
    loop: tile_loop.TileLoop
    epilogue: Epilogue
    x_smem: Any
    x_rows: Any
    w_smem: Any
    w_rows: Any
    empty: Any
    full: Any

    @property
    def k_steps(self) -> int:
        return self.operands.k_steps or -(-self.operands.mkn[1] // self.config.tile_k)

    @property
    def beside(self) -> Beside:
        """What runs beside which k step."""
        return Beside(
            self.k_steps,
            self.config.stages,
            len(self.epilogue.subtiles),
            looks_up=self.loop.look_up is not None,
            signals=self.loop.after_tile is not None,
            sends=self.loop.sends,
            adds=self.operands.addends_ahead,
        )

    @property
    def overlaps(self) -> bool:
        """Whether a tile is stored during the next one."""
        possible = self.config.overlaps(self.operands.y.dtype, self.k_steps)
        return possible and not self.loop.in_turn

    @property
    def signal_step(self) -> int:
        """The k step before whose loads the tile before is signalled, before any is waited for."""
        if self.overlaps:
            return min(self.beside.signal_step, self.addend_wait_step)
        return min(self.config.stages + 1, self.addend_wait_step)

    @property
    def addend_wait_step(self) -> int:
        """The k step before whose loads the tile's addends are waited for."""
        ahead = self.operands.addends_ahead and self.overlaps
        return self.beside.addend_step if ahead else self.k_steps - 1

    def next_slot(self, slot: jax.Array) -> jax.Array:
        following = slot + 1
        return lax.select(following == self.config.stages, jnp.int32(0), following)

    def previous_slot(self, slot: jax.Array) -> jax.Array:
        return lax.select(slot == 0, jnp.int32(self.config.stages - 1), slot - 1)

    def cta_tile(self, tile: tile_loop.Tile) -> tile_loop.Tile:
        """This CTA's tile of its cluster's tile."""
        if self.config.cluster == 1:
            return tile
        m_axis, n_axis = CLUSTER_AXES
        return dataclasses.replace(
            tile,
            m=tile.m * self.config.cluster_m + lax.axis_index(m_axis),
            n=tile.n * self.config.cluster_n + lax.axis_index(n_axis),
        )

    # -- load ------------------------------------------------------------------------------------

    def produce(self) -> None:
        plgpu.set_max_registers(self.config.producer_registers, action="decrease")
        zero = jnp.int32(0)
        state = (zero, jnp.bool_(False), (zero,) * 4)
        _, pending, last = self.loop.run(self.load_tile, state)
        # Every stage is released once more than it was filled. Taking these keeps the barriers in
        # place until the last arrival of a peer in the cluster.
        for slot in range(self.config.stages):
            plgpu.barrier_wait(self.empty.at[slot])
        if self.loop.after_tile is not None:
            pl.when(pending)(lambda: self.signal(tile_loop.Tile(*last)))

    def load_tile(self, tile: tile_loop.Tile, state: Any) -> Any:
        """A tile's loads, between which the tile before is signalled and addends are awaited."""
        slot, pending, last = state
        backwards = self.walks_k_backwards(tile)
        tile = self.cta_tile(tile)
        found = (tile.step, tile.m, tile.n, tile.chunk)
        before = tile_loop.Tile(*last)
        if self.loop.in_turn and self.loop.after_tile is not None:
            pl.when(pending)(lambda: self.signal(before))
            pending = jnp.bool_(False)
        if self.loop.before_tile is not None:
            self.loop.before_tile(tile)
        if self.loop.look_up_signals is not None:
            before, tile = self.loop.look_up_signals(before, tile)

        def load_k_step(k: jax.Array, slot: jax.Array) -> jax.Array:
            if self.loop.before_k_step is not None:
                self.loop.before_k_step(tile, k)
            block = k if backwards is None else lax.select(backwards, self.k_steps - 1 - k, k)
            plgpu.barrier_wait(self.empty.at[slot])
            self.load_blocks(tile, block, slot)
            return self.next_slot(slot)

        done = 0

        def load_until(end: int) -> None:
            nonlocal slot, done
            if done < end:
                slot = lax.fori_loop(jnp.int32(done), jnp.int32(end), load_k_step, slot)
            done = end

        if self.loop.after_tile is not None:
            load_until(self.signal_step)
            pl.when(pending)(lambda: self.signal(before))
        if self.loop.before_addend is not None:
            load_until(self.addend_wait_step)
            self.loop.before_addend(tile)
        load_until(self.k_steps)
        return slot, jnp.bool_(True), found

    def signal(self, tile: tile_loop.Tile) -> None:
        """Signals a tile once every compute warpgroup has said that its part is in memory."""
        plgpu.barrier_wait(self.epilogue.stored)
        assert self.loop.after_tile is not None
        self.loop.after_tile(tile)

    def walks_k_backwards(self, tile: tile_loop.Tile) -> jax.Array | None:
        """Whether this cluster tile starts at the end of K; all CTAs of a cluster agree."""
        span = self.config.k_snake
        if not span:
            return None
        major = tile.n if self.config.minor == "m" else tile.m
        return lax.rem(lax.div(major, jnp.int32(span)), jnp.int32(2)) == 1

    def load_blocks(self, tile: tile_loop.Tile, block: jax.Array, slot: jax.Array) -> None:
        config, operands = self.config, self.operands
        shapes = operands.blocks(config)
        m_axis, n_axis = CLUSTER_AXES

        def load(name: str, rows: Any, shared: str | None) -> Use:
            height, width = shapes[name]

            def copy(matrix: Any, row: Any, column: Any) -> None:
                plgpu.copy_gmem_to_smem(
                    matrix.at[pl.ds(row, height), pl.ds(column, width)],
                    rows.at[slot],
                    self.full.at[slot],
                    collective_axes=shared,
                )

            return copy

        load_x = load("x", self.x_rows, n_axis if config.cluster_n > 1 else None)
        load_w = load("w", self.w_rows, m_axis if config.cluster_m > 1 else None)
        if operands.x_at is not None:
            operands.x_at(tile, block, load_x)
        else:
            at = tile.m * config.tile_m, block * config.tile_k
            load_x(operands.x, *(at[::-1] if operands.x_transposed else at))
        if operands.w_at is not None:
            operands.w_at(tile, block, load_w)
        else:
            at = block * config.tile_k, tile.n * config.tile_n
            load_w(operands.w, *(at[::-1] if operands.w_transposed else at))

    # -- compute ---------------------------------------------------------------------------------

    def consume(self, wg: jax.Array) -> None:
        plgpu.set_max_registers(self.config.consumer_registers, action="increase")
        for slot in range(self.config.stages):
            plgpu.barrier_arrive(self.empty.at[slot])
        if self.overlaps:
            self.consume_overlapped(wg)
        else:
            self.loop.run(lambda tile, slot: self.compute_tile(tile, slot, wg), jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def compute_tile(self, tile: tile_loop.Tile, slot: jax.Array, wg: jax.Array) -> jax.Array:
        """One tile, stored before the next is begun."""
        tile = self.cta_tile(tile)

        def scope(acc: Any) -> jax.Array:
            end = self.multiply(acc, 0, self.k_steps, slot, wg)
            value = self.finish_product(acc, end)
            for index, _ in enumerate(self.epilogue.subtiles):
                self.epilogue.store_part(
                    tile, index, self.epilogue.round_part(tile, index, value, wg), wg
                )
            return end

        end = pl.run_scoped(scope, _untyped.ACC(self.config.part, jnp.float32))
        self.epilogue.say_stored()
        return end

    def consume_overlapped(self, wg: jax.Array) -> None:
        """All tiles, each stored, rounded and held in registers, while the next is computed."""
        zero = jnp.int32(0)
        dtype = self.operands.y.dtype
        parts = tuple(
            plgpu.layout_cast(
                jnp.zeros((WGMMA_ROWS, self.epilogue.store_columns), dtype), plgpu.Layout.WGMMA
            )
            for _ in self.epilogue.subtiles
        )
        state = (zero, jnp.bool_(False), (zero,) * 4, parts)
        _, pending, last, parts = self.loop.run(
            lambda tile, state: self.compute_tile_overlapped(tile, state, wg), state
        )

        @pl.when(pending)
        def _store_last() -> None:
            tile = tile_loop.Tile(*last)
            if self.loop.look_up is not None:
                tile, _ = self.loop.look_up(tile, tile)
            for index, part in enumerate(parts):
                self.epilogue.store_part(tile, index, part, wg)
            self.epilogue.say_stored()

    def compute_tile_overlapped(self, tile: tile_loop.Tile, state: Any, wg: jax.Array) -> Any:
        """One tile, beside whose products the tile before it is stored."""
        tile = self.cta_tile(tile)
        steps = self.beside
        slot, pending, last, parts = state
        before = tile_loop.Tile(*last)

        def look_up() -> None:
            nonlocal before, tile
            assert self.loop.look_up is not None
            before, tile = self.loop.look_up(before, tile)

        def store(index: int) -> None:
            self.epilogue.store_part(before, index, parts[index], wg, only_if=pending)

        def scope(acc: Any) -> Any:
            addends: list[jax.Array] = []
            done: int | jax.Array = 0
            end = slot
            if steps.looks_up:
                end, done = self.multiply(acc, 0, 0, end, wg, look_up), 1
            for index, k in enumerate(steps.store_steps):
                at = k if steps.stagger == 1 else k + self.late(wg)
                end = self.multiply(acc, done, at, end, wg, functools.partial(store, index))
                done = at + 1
            if steps.signals:
                say = functools.partial(pl.when(pending), self.epilogue.say_stored)
                end = self.multiply(acc, done, steps.stored_step, end, wg, say)
                done = steps.stored_step + 1
            if steps.adds:

                def read() -> None:
                    addends.extend(self.epilogue.read_addends(tile, wg))

                end = self.multiply(acc, done, steps.addend_step, end, wg, read)
                done = steps.addend_step + 1
            end = self.multiply(acc, done, self.k_steps, end, wg)
            value = self.finish_product(acc, end)
            rounded = [
                self.epilogue.round_part(tile, i, value, wg, addends)
                for i, _ in enumerate(self.epilogue.subtiles)
            ]
            return end, tuple(rounded)

        end, rounded = pl.run_scoped(scope, _untyped.ACC(self.config.part, jnp.float32))
        return end, jnp.bool_(True), (tile.step, tile.m, tile.n, tile.chunk), rounded

    def late(self, wg: jax.Array) -> jax.Array:
        """K steps by which this warpgroup puts stores off; those of a CTA are far apart."""
        stagger = self.beside.stagger
        return lax.rem(self.loop.worker + wg * (stagger // 2), jnp.int32(stagger))

    def multiply(
        self,
        acc: Any,
        begin: int | jax.Array,
        end: int | jax.Array,
        slot: jax.Array,
        wg: jax.Array,
        beside: Callable[[], None] | None = None,
    ) -> jax.Array:
        """K steps ``begin`` to ``end``; returns the slot after the last.

        With ``beside`` the k step ``end`` too, beside which it runs.
        """

        def step(k: jax.Array, slot: jax.Array) -> jax.Array:
            return self.multiply_step(acc, k, slot, wg)

        known = isinstance(begin, int) and isinstance(end, int)
        if not known or begin < end:
            first, last = jnp.asarray(begin, jnp.int32), jnp.asarray(end, jnp.int32)
            slot = lax.fori_loop(first, last, step, slot)
        return slot if beside is None else self.multiply_step(acc, end, slot, wg, beside)

    def multiply_step(
        self,
        acc: Any,
        k: jax.Array | int,
        slot: jax.Array,
        wg: jax.Array,
        beside: Callable[[], None] | None = None,
    ) -> jax.Array:
        """One k step; ``beside`` runs while the tensor cores are at it."""
        config, operands = self.config, self.operands
        rows, columns = config.part
        wg_rows = pl.ds(wg * rows, rows) if config.split == "m" else slice(None)
        wg_columns = pl.ds(wg * columns, columns) if config.split == "n" else slice(None)
        plgpu.barrier_wait(self.full.at[slot])
        x, w = self.x_smem.at[slot], self.w_smem.at[slot]
        x = x.at[:, wg_rows].transpose((1, 0)) if operands.x_transposed else x.at[wg_rows, :]
        w = w.at[wg_columns, :].transpose((1, 0)) if operands.w_transposed else w.at[:, wg_columns]
        plgpu.wgmma(acc, x, w)
        if beside is not None:
            beside()
        plgpu.wgmma_wait(config.in_flight)
        if config.in_flight == 0:
            plgpu.barrier_arrive(self.empty.at[slot])
            return self.next_slot(slot)

        def release() -> None:
            plgpu.barrier_arrive(self.empty.at[self.previous_slot(slot)])

        # The stage before a tile's first belongs to the tile before, which released it.
        if not isinstance(k, int):
            pl.when(k > 0)(release)
        elif k > 0:
            release()
        return self.next_slot(slot)

    def finish_product(self, acc: Any, slot: jax.Array) -> jax.Array:
        """The accumulator once its products have completed; ``slot`` is the one after the last."""
        value = plgpu.wgmma_accumulator_load(acc)
        if self.config.in_flight:
            plgpu.barrier_arrive(self.empty.at[self.previous_slot(slot)])
        return value
