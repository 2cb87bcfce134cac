"""Hopper matrix product in Pallas Mosaic GPU whose loop over tiles is handed in.

``y[M, N] = x[M, K] @ w[K, N]``: persistent, warp-specialised (one warpgroup feeds the TMA unit,
the others feed the tensor cores), float32 accumulation. ``matmul`` runs it alone; a fused operator
calls ``compute_tiles`` inside its own kernel, with its own ``TileLoop``.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.pallas_kernels import tile_loop_mosaic_gpu as tile_loop

CTA_AXIS, WARPGROUP_AXIS = "cta", "wg"
CLUSTER_AXES = ("cluster_m", "cluster_n")
SWIZZLE_BYTES = 128  # the widest TMA swizzle: rows of 128 bytes, so 64 elements of 2 bytes
SMALLEST_SWIZZLE = 32  # bytes; wgmma takes 32, 64 and 128
WGMMA_ROWS = 64  # rows of one wgmma instruction


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulConfig:
    """How the product is cut; every size in elements.

    Args:
      tile_m, tile_n: the tile of one CTA.
      tile_k: depth of one pipeline stage.
      stages: operand stages in shared memory.
      warpgroups: compute warpgroups; they share the tile along ``split``.
      split: "m" gives each warpgroup a band of rows, "n" a band of columns.
      cluster_m, cluster_n: CTAs of a cluster along m and n, on neighbouring tiles; an operand block
        that several of them need is loaded once and multicast.
      group, minor: bands of the natural order, see ``NaturalOrder``; in cluster tiles.
      epilogue_n: columns of one output store.
      epilogue_slots: output stores in flight per warpgroup.
      overlap_epilogue: store a tile during the next tile's first k steps (16-bit outputs).
      flat: copy operands as plain rows where their layout in shared memory allows, see
        ``_operand_buffer``; not for interpret mode, whose aliases do not share bytes.
      in_flight: k steps of wgmma left running when a stage is released, 0 or 1.
      producer_registers: registers per thread kept by the warpgroup that loads.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    warpgroups: int = 2
    split: Literal["m", "n"] = "m"
    cluster_m: int = 1
    cluster_n: int = 1
    group: int = 8
    minor: Literal["m", "n"] = "m"
    epilogue_n: int = 64
    epilogue_slots: int = 2
    overlap_epilogue: bool = True
    in_flight: int = 1
    flat: bool = True
    producer_registers: int = 40
    k_snake: int = 0
    producer_warps: int = 4

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of one warpgroup's part of the tile."""
        if self.split == "m":
            return self.tile_m // self.warpgroups, self.tile_n
        return self.tile_m, self.tile_n // self.warpgroups

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Cluster tiles along m and n that cover an [m, n] output."""
        return -(-m // (self.tile_m * self.cluster_m)), -(-n // (self.tile_n * self.cluster_n))


Use = Callable[[Any, Any, Any], None]
"""``use(matrix, row, column)``: a GMEM ref of two dimensions and where a block starts in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """The GMEM refs of one product, and how they lie in memory.

    ``x`` is [M, K], or [K, M] if ``x_transposed``; ``w`` is [K, N], or [N, K] if ``w_transposed``;
    ``y`` and the optional ``addend`` are [M, N].

    Blocks may also lie elsewhere: the optional finders know where, and then ``x`` and the others
    need only ``shape`` and ``dtype``. A finder calls what it is given, under a condition if need
    be, with the matrix that holds the block.

    Args:
      x_at, w_at: called with the tile, the k step and what to do with the block.
      y_at: called with the tile and what to do with the tile's place; it may have several.
      addends: called with the tile; the number of tiles to add, and a function of a number and of
        what to do with that tile.
      k_steps: how many k steps there are, if not as many as ``x`` and ``w`` are deep.
      direct: store from registers, where the matrices are not known before the launch; the tile
        must then divide them, and ``after_tile`` must publish what all threads stored.
    """

    x: Any
    w: Any
    y: Any
    addend: Any = None
    x_transposed: bool = False
    w_transposed: bool = False
    x_at: Callable[[tile_loop.Tile, Any, Use], None] | None = None
    w_at: Callable[[tile_loop.Tile, Any, Use], None] | None = None
    y_at: Callable[[tile_loop.Tile, Use], None] | None = None
    addends: Callable[[tile_loop.Tile], tuple[Any, Callable[[Any, Use], None]]] | None = None
    k_steps: int | None = None
    direct: bool = False

    @property
    def k(self) -> int:
        return self.w.shape[1] if self.w_transposed else self.w.shape[0]


def _swizzled(swizzle: int, dtype: Any) -> tuple[Any, ...]:
    """The shared-memory layout of a wgmma operand: tiles of 8 rows of ``swizzle`` bytes."""
    columns = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


def _operand_swizzle(operands: Operands, config: MatmulConfig) -> int:
    """The widest swizzle, in bytes, that suits both operands; wgmma wants one for both."""
    itemsize = jnp.dtype(operands.x.dtype).itemsize
    columns = [config.tile_k]
    if operands.x_transposed:
        columns += [config.tile_m, operands.x.shape[1]]
    if not operands.w_transposed:
        columns += [config.tile_n, operands.w.shape[1]]
    return math.gcd(SWIZZLE_BYTES, *(c * itemsize for c in columns))


def limits(operands: Operands, config: MatmulConfig) -> Iterator[str]:
    """Why shared memory cannot hold blocks of operands of these shapes, in words."""
    swizzle = _operand_swizzle(operands, config)
    if swizzle < SMALLEST_SWIZZLE:
        yield (
            f"operands are contiguous in {operands.x.shape} and {operands.w.shape}; rows that the "
            f"tensor cores read across need a multiple of {SMALLEST_SWIZZLE} bytes"
        )
        return
    blocks = (config.tile_m, config.tile_k), (config.tile_k, config.tile_n)
    turned = operands.x_transposed, operands.w_transposed
    for operand, block, transposed in zip((operands.x, operands.w), blocks, turned, strict=True):
        itemsize = jnp.dtype(operand.dtype).itemsize
        width = block[0 if transposed else 1] * itemsize
        tile = (8, swizzle // itemsize)
        if (width != swizzle or not config.flat) and (
            operand.shape[0] % tile[0] or operand.shape[1] % tile[1]
        ):
            yield (
                f"an operand {operand.shape} is copied in tiles of {tile}, which must divide it: "
                f"pad it"
            )


def _operand_buffer(block: tuple[int, int], stages: int, dtype: Any, swizzle: int, flat: bool) -> Any:
    """Shared memory for ``stages`` blocks of an operand, and, if ``flat``, its flat view.

    The TMA unit cannot clip inside a tile, so copies into a tiled buffer need sizes that are
    multiples of the tile. A block one swizzle wide is the same bytes tiled or not: the flat view
    lets the unit copy it as plain rows, clipped at any row and any 16 bytes.
    """
    tiled = plgpu.SMEM((stages, *block), dtype, transforms=_swizzled(swizzle, dtype))
    if not flat or block[1] * jnp.dtype(dtype).itemsize != swizzle:
        return tiled
    rows = plgpu.SMEM((stages, *block), dtype, transforms=(plgpu.SwizzleTransform(swizzle),))
    return plgpu.RefUnion(tiled, rows)


def scratch(operands: Operands, config: MatmulConfig) -> dict[str, Any]:
    """The shared memory and barriers that ``compute_tiles`` needs, by name."""
    dtype, out_dtype = operands.x.dtype, operands.y.dtype
    x_block = (config.tile_m, config.tile_k)
    w_block = (config.tile_k, config.tile_n)
    x_block = x_block[::-1] if operands.x_transposed else x_block
    w_block = w_block[::-1] if operands.w_transposed else w_block
    stages = config.stages
    swizzle = _operand_swizzle(operands, config)
    out_swizzle = math.gcd(config.epilogue_n * jnp.dtype(out_dtype).itemsize, SWIZZLE_BYTES)
    out_block = (config.warpgroups, config.epilogue_slots, WGMMA_ROWS, config.epilogue_n)
    found = {
        "x_smem": _operand_buffer(x_block, stages, dtype, swizzle, config.flat),
        "w_smem": _operand_buffer(w_block, stages, dtype, swizzle, config.flat),
        "y_smem": plgpu.SMEM(out_block, out_dtype, transforms=(plgpu.SwizzleTransform(out_swizzle),)),
        # A cluster barrier, also for one CTA: one thread arrives for its warpgroup, not 128.
        "empty": plgpu.ClusterBarrier(
            collective_axes=CLUSTER_AXES, num_arrivals=config.warpgroups, num_barriers=stages
        ),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }
    if operands.addend is not None:
        addend_dtype = operands.addend.dtype
        row_bytes = config.epilogue_n * jnp.dtype(addend_dtype).itemsize
        found["addend_smem"] = plgpu.SMEM(
            (config.warpgroups, WGMMA_ROWS, config.epilogue_n),
            addend_dtype,
            transforms=(plgpu.SwizzleTransform(math.gcd(row_bytes, SWIZZLE_BYTES)),),
        )
        found["addend_full"] = plgpu.Barrier(num_barriers=config.warpgroups)
    return found


def compute_tiles(
    operands: Operands,
    config: MatmulConfig,
    loop: tile_loop.TileLoop,
    *,
    transform: Callable[[jax.Array], jax.Array] | None = None,
) -> None:
    """Computes the tiles of ``loop``; to be called by all warpgroups of a kernel."""

    allocated = scratch(operands, config)

    def body(**buffers: Any) -> None:
        for name in "x", "w":
            views = buffers.pop(f"{name}_smem")
            flat = isinstance(allocated[f"{name}_smem"], plgpu.RefUnion)
            tiled, rows = views if flat else (views, views)
            buffers |= {f"{name}_smem": tiled, f"{name}_rows": rows}
        worker = _Worker(operands, config, loop, transform, **buffers)
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
    transform: Callable[[jax.Array], jax.Array] | None
    x_smem: Any
    x_rows: Any
    w_smem: Any
    w_rows: Any
    y_smem: Any
    empty: Any
    full: Any
    addend_smem: Any = None
    addend_full: Any = None

    @property
    def k_steps(self) -> int:
        return self.operands.k_steps or -(-self.operands.k // self.config.tile_k)

    @property
    def subtiles(self) -> list[tuple[int, int]]:
        """Row and column, in a warpgroup's part, of each output store."""
        rows, columns = self.config.part
        return [
            (row, column)
            for row in range(0, rows, WGMMA_ROWS)
            for column in range(0, columns, self.config.epilogue_n)
        ]

    def next_slot(self, slot: jax.Array) -> jax.Array:
        following = slot + 1
        return lax.select(following == self.config.stages, jnp.int32(0), following)

    def cta_tile(self, tile: tile_loop.Tile) -> tile_loop.Tile:
        """The CTA's tile of a cluster's tile."""
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
        if self.config.producer_warps == 4:
            self.load_tiles()
        else:

            @plgpu.warp_map
            def _warps(warp: jax.Array) -> None:
                pl.when(warp == 0)(self.load_tiles)

    def load_tiles(self) -> None:
        self.loop.run(self.load_tile, jnp.int32(0))
        # Every stage is released once more than it was filled. Taking these keeps the barriers in
        # place until the last arrival of a peer in the cluster.
        for slot in range(self.config.stages):
            plgpu.barrier_wait(self.empty.at[slot])

    def load_tile(self, tile: tile_loop.Tile, slot: jax.Array) -> jax.Array:
        backwards = self.backwards(tile)
        tile = self.cta_tile(tile)
        if self.loop.before_tile is not None:
            self.loop.before_tile(tile)

        def load_k_step(k: jax.Array, slot: jax.Array) -> jax.Array:
            if self.loop.before_k_step is not None:
                self.loop.before_k_step(tile, k)
            if self.loop.k_block is not None:
                block = self.loop.k_block(tile, k)
            elif backwards is not None:
                block = lax.select(backwards, self.k_steps - 1 - k, k)
            else:
                block = k
            plgpu.barrier_wait(self.empty.at[slot])
            self.load_blocks(tile, block, slot)
            return self.next_slot(slot)

        return lax.fori_loop(jnp.int32(0), jnp.int32(self.k_steps), load_k_step, slot)

    def backwards(self, tile: tile_loop.Tile) -> jax.Array | None:
        """Whether this cluster tile walks K from its end; a property of the tile, not the order."""
        span = self.config.k_snake
        if not span:
            return None
        major = tile.n if self.config.minor == "m" else tile.m
        return lax.rem(lax.div(major, jnp.int32(span)), jnp.int32(2)) == 1

    def load_blocks(self, tile: tile_loop.Tile, block: jax.Array, slot: jax.Array) -> None:
        config, operands = self.config, self.operands
        m_axis, n_axis = CLUSTER_AXES
        shared_x = n_axis if config.cluster_n > 1 else None
        shared_w = m_axis if config.cluster_m > 1 else None
        x_block, w_block = (config.tile_m, config.tile_k), (config.tile_k, config.tile_n)
        x_block = x_block[::-1] if operands.x_transposed else x_block
        w_block = w_block[::-1] if operands.w_transposed else w_block

        def load(
            smem: Any, shape: tuple[int, int], shared: Any, matrix: Any, row: Any, column: Any
        ) -> None:
            plgpu.copy_gmem_to_smem(
                matrix.at[pl.ds(row, shape[0]), pl.ds(column, shape[1])],
                smem.at[slot],
                self.full.at[slot],
                collective_axes=shared,
            )

        load_x = functools.partial(load, self.x_rows, x_block, shared_x)
        load_w = functools.partial(load, self.w_rows, w_block, shared_w)
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
        config = self.config
        registers = (512 - config.producer_registers) // config.warpgroups
        plgpu.set_max_registers(min(registers, 256) // 8 * 8, action="increase")
        for slot in range(config.stages):
            plgpu.barrier_arrive(self.empty.at[slot])
        if not config.overlap_epilogue:
            self.loop.run(lambda tile, slot: self.compute_tile(tile, slot, wg), jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)
            return
        zero = jnp.int32(0)
        nothing = tile_loop.Tile(zero, zero, zero, zero)
        parts = [
            plgpu.layout_cast(
                jnp.zeros((WGMMA_ROWS, config.epilogue_n), self.operands.y.dtype),
                plgpu.Layout.WGMMA,
            )
            for _ in self.subtiles
        ]
        state = (zero, jnp.bool_(False), _untile(nothing), tuple(parts))
        _, any_tile, last, parts = self.loop.run(
            lambda tile, state: self.compute_tile_overlapped(tile, state, wg), state
        )

        @pl.when(any_tile)
        def _drain() -> None:
            last_tile = tile_loop.Tile(*last)
            for index, part in enumerate(parts):
                self.store_part(last_tile, index, part, wg)
            self.finish_stores(last_tile)

        plgpu.wait_smem_to_gmem(0)

    def compute_tile(self, tile: tile_loop.Tile, slot: jax.Array, wg: jax.Array) -> jax.Array:
        """One tile, stored before the next is begun."""
        tile = self.cta_tile(tile)

        def scope(acc: Any) -> jax.Array:
            end = self.multiply(acc, jnp.int32(0), slot, wg, self.k_steps)
            if self.operands.addend is not None and self.loop.before_addend is not None:
                self.loop.before_addend(tile)
            value = plgpu.wgmma_accumulator_load(acc)
            self.release_last(slot=end)
            for index, _ in enumerate(self.subtiles):
                self.store_part(tile, index, self.round_part(tile, index, value, wg), wg)
            return end

        end = pl.run_scoped(scope, plgpu.ACC(self.config.part, jnp.float32))
        if self.loop.after_tile is not None:
            self.finish_stores(tile)
        return end

    def compute_tile_overlapped(self, tile: tile_loop.Tile, state: Any, wg: jax.Array) -> Any:
        """One tile, during whose first k steps the tile before it is stored."""
        tile = self.cta_tile(tile)
        slot, pending, before, parts = state
        before_tile = tile_loop.Tile(*before)
        # Steps that carry a store; a short contraction leaves stores for after the last step.
        head = min(len(self.subtiles), self.k_steps)
        signal_at = min(2 * head, self.k_steps)

        def scope(acc: Any) -> Any:
            end = slot
            for k in range(head):
                end = self.multiply_step(acc, jnp.int32(k), end, wg, first=k == 0, between=(
                    lambda index=k: self.store_part(
                        before_tile, index, parts[index], wg, predicate=pending
                    )
                ))
            for index in range(head, len(self.subtiles)):
                self.store_part(before_tile, index, parts[index], wg, predicate=pending)
            if self.loop.after_tile is not None:
                end = self.multiply(acc, jnp.int32(head), end, wg, signal_at)

                @pl.when(pending)
                def _signal() -> None:
                    self.finish_stores(before_tile)

                end = self.multiply(acc, jnp.int32(signal_at), end, wg, self.k_steps)
            else:
                end = self.multiply(acc, jnp.int32(head), end, wg, self.k_steps)
            if self.operands.addend is not None and self.loop.before_addend is not None:
                self.loop.before_addend(tile)
            value = plgpu.wgmma_accumulator_load(acc)
            self.release_last(slot=end)
            rounded = [
                self.round_part(tile, index, value, wg) for index, _ in enumerate(self.subtiles)
            ]
            return end, tuple(rounded)

        end, rounded = pl.run_scoped(scope, plgpu.ACC(self.config.part, jnp.float32))
        return end, jnp.bool_(True), _untile(tile), rounded

    def multiply(
        self, acc: Any, begin: jax.Array, slot: jax.Array, wg: jax.Array, end: int
    ) -> jax.Array:
        def step(k: jax.Array, slot: jax.Array) -> jax.Array:
            return self.multiply_step(acc, k, slot, wg)

        return lax.fori_loop(begin, jnp.int32(end), step, slot)

    def multiply_step(
        self,
        acc: Any,
        k: jax.Array,
        slot: jax.Array,
        wg: jax.Array,
        first: bool = False,
        between: Callable[[], None] | None = None,
    ) -> jax.Array:
        config, operands = self.config, self.operands
        rows, columns = config.part
        wg_rows = pl.ds(wg * rows, rows) if config.split == "m" else slice(None)
        wg_columns = pl.ds(wg * columns, columns) if config.split == "n" else slice(None)
        plgpu.barrier_wait(self.full.at[slot])
        x, w = self.x_smem.at[slot], self.w_smem.at[slot]
        x = x.at[:, wg_rows].transpose((1, 0)) if operands.x_transposed else x.at[wg_rows, :]
        w = w.at[wg_columns, :].transpose((1, 0)) if operands.w_transposed else w.at[:, wg_columns]
        plgpu.wgmma(acc, x, w)
        if between is not None:
            between()
        if config.in_flight == 0:
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.empty.at[slot])
        else:
            plgpu.wgmma_wait(1)
            previous = lax.select(slot == 0, jnp.int32(config.stages - 1), slot - 1)
            if first:
                pass
            elif isinstance(k, int):
                plgpu.barrier_arrive(self.empty.at[previous])
            else:

                @pl.when(k > 0)
                def _release() -> None:
                    plgpu.barrier_arrive(self.empty.at[previous])

        return self.next_slot(slot)

    def release_last(self, slot: jax.Array) -> None:
        """Releases the stage of the last k step, whose products have completed."""
        if self.config.in_flight:
            previous = lax.select(slot == 0, jnp.int32(self.config.stages - 1), slot - 1)
            plgpu.barrier_arrive(self.empty.at[previous])

    # -- store -----------------------------------------------------------------------------------

    def part_of(self, index: int, wg: jax.Array) -> tuple[Any, Any]:
        """Row and column, in the tile, of an output store."""
        config = self.config
        row, column = self.subtiles[index]
        rows, columns = config.part
        return (
            row + (wg * rows if config.split == "m" else 0),
            column + (wg * columns if config.split == "n" else 0),
        )

    def on_part(self, use: Callable[[Any], None], index: int, wg: jax.Array) -> Use:
        """``use`` called with the ref of an output store's part of the tile."""
        row, column = self.part_of(index, wg)

        def on_tile(matrix: Any, tile_row: Any, tile_column: Any) -> None:
            rows = pl.ds(tile_row + row, WGMMA_ROWS)
            use(matrix.at[rows, pl.ds(tile_column + column, self.config.epilogue_n)])

        return on_tile

    def corner(self, tile: tile_loop.Tile) -> tuple[jax.Array, jax.Array]:
        return tile.m * self.config.tile_m, tile.n * self.config.tile_n

    def round_part(
        self, tile: tile_loop.Tile, index: int, value: jax.Array, wg: jax.Array
    ) -> jax.Array:
        """One output store's values: addend and transform in float32, then one rounding."""
        row, column = self.subtiles[index]
        part = value[row : row + WGMMA_ROWS, column : column + self.config.epilogue_n]
        operands = self.operands
        if operands.addends is not None:
            count, addend_at = operands.addends(tile)

            def add(i: jax.Array, total: jax.Array) -> jax.Array:
                addend_at(i, self.on_part(lambda ref: self.load_addend(ref, wg), index, wg))
                return total + self.take_addend(wg)

            part = lax.fori_loop(jnp.int32(0), count, add, part)
        elif operands.addend is not None:
            load = self.on_part(lambda ref: self.load_addend(ref, wg), index, wg)
            load(operands.addend, *self.corner(tile))
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
        predicate: jax.Array | None = None,
    ) -> None:
        slots = self.config.epilogue_slots
        smem = self.y_smem.at[wg, index % slots]
        direct = self.operands.direct
        if not direct:
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            smem[...] = part
            plgpu.commit_smem()

        def put(ref: Any) -> None:
            if not direct:
                plgpu.copy_smem_to_gmem(smem, ref)
            elif hasattr(plgpu, "store"):  # JAX 0.12, which calls a store of half sectors slow
                plgpu.store(ref, part, optimized=False)
            else:
                ref[...] = part

        def copy() -> None:
            send = self.on_part(put, index, wg)
            if self.operands.y_at is not None:
                self.operands.y_at(tile, send)
            else:
                send(self.operands.y, *self.corner(tile))

        if predicate is None:
            copy()
        else:
            pl.when(predicate)(copy)

    def finish_stores(self, tile: tile_loop.Tile) -> None:
        if self.loop.after_tile is not None:
            plgpu.wait_smem_to_gmem(0)
            self.loop.after_tile(tile)


def _untile(tile: tile_loop.Tile) -> tuple[jax.Array, ...]:
    return tile.step, tile.m, tile.n, tile.chunk


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    config: MatmulConfig,
    num_sms: int = 132,
    out_dtype: Any = None,
    x_transposed: bool = False,
    w_transposed: bool = False,
    addend: jax.Array | None = None,
    table: jax.Array | None = None,
    flags: jax.Array | None = None,
    transform: Callable[[jax.Array], jax.Array] | None = None,
    interpret: Any = None,
) -> jax.Array:
    """``x @ w`` in the natural order, or in a table's."""
    m = x.shape[1] if x_transposed else x.shape[0]
    n = w.shape[0] if w_transposed else w.shape[1]
    out_dtype = out_dtype or x.dtype
    workers = num_sms // config.cluster
    extras = [a for a in (addend, table, flags) if a is not None]

    def kernel(x_ref: Any, w_ref: Any, *rest: Any) -> None:
        *rest, y_ref = rest
        rest = list(rest)
        addend_ref = rest.pop(0) if addend is not None else None
        table_ref = rest.pop(0) if table is not None else None
        flags_ref = rest.pop(0) if flags is not None else None
        operands = Operands(x_ref, w_ref, y_ref, addend_ref, x_transposed, w_transposed)
        if table_ref is not None:
            order: Any = tile_loop.ScheduledOrder(table_ref, table_ref.shape[0])
        else:
            order = tile_loop.NaturalOrder(config.tiles(m, n), config.group, "mn".index(config.minor))
        loop = tile_loop.TileLoop(
            order,
            lax.axis_index(CTA_AXIS),
            workers,
            before_tile=None
            if flags_ref is None
            else lambda tile: tile_loop.wait_flag(flags_ref, tile.chunk),
        )
        compute_tiles(operands, config, loop, transform=transform)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(workers,),
        grid_names=(CTA_AXIS,),
        cluster=(config.cluster_m, config.cluster_n),
        cluster_names=CLUSTER_AXES,
        num_threads=config.warpgroups + 1,
        thread_name=WARPGROUP_AXIS,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(x, w, *extras)
