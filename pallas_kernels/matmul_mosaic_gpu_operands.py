"""What the Hopper matrix product reads and writes, and how shared memory holds it."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.kernel.loop import Use
from syncopate_jax.pallas_kernels import tile_loop_mosaic_gpu as tile_loop
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import (
    CLUSTER_AXES,
    SWIZZLE_BYTES,
    WGMMA_ROWS,
    MatmulConfig,
)

# Names that the types of JAX leave out, or call abstract.
_untyped: Any = plgpu

NARROWEST_SWIZZLE = 32  # bytes; wgmma reads operands swizzled by 32, 64 or 128


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """One product's operands, as arrays, abstract values or GMEM refs, and how they are laid out.

    ``x`` is [M, K], or [K, M] if ``x_transposed``; ``w`` is [K, N], or [N, K] if ``w_transposed``;
    ``y`` and the optional ``addend``, which is added in float32 before the rounding, are [M, N].

    Blocks may also lie elsewhere: the optional finders know where, and then ``x`` and the others
    need only ``shape`` and ``dtype``. A finder calls what it is given, under a condition if need
    be, with the matrix that holds the block.

    Args:
      x_at, w_at: called with the tile, the k step and what to do with the block.
      y_at: called with the tile and what to do with the tile's place; it may have several.
      addends: called with the tile; the number of tiles to add, and a function of a number and of
        what to do with that tile.
      addends_ahead: no tile has more than one addend, and tiles divide the matrices: they are then
        read into registers during the product, not through shared memory after it.
      k_steps: how many k steps there are, if not as many as ``x`` and ``w`` are deep.
      direct: store from registers, where the matrices are not known before the launch; the tile
        must then divide them.
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
    addends_ahead: bool = False
    k_steps: int | None = None
    direct: bool = False

    @property
    def mkn(self) -> tuple[int, int, int]:
        """M, K, N."""
        m, k = self.x.shape[::-1] if self.x_transposed else self.x.shape
        return m, k, self.w.shape[0 if self.w_transposed else 1]

    def swizzle(self, config: MatmulConfig) -> int:
        """The widest swizzle, in bytes, that suits both operands; wgmma wants one for both."""
        columns = [config.tile_k]
        if self.x_transposed:
            columns += [config.tile_m, self.x.shape[1]]
        if not self.w_transposed:
            columns += [config.tile_n, self.w.shape[1]]
        itemsize = jnp.dtype(self.x.dtype).itemsize
        return math.gcd(SWIZZLE_BYTES, *(count * itemsize for count in columns))

    def blocks(self, config: MatmulConfig) -> dict[str, tuple[int, int]]:
        """The shape of one stage of x and of w, as they lie in memory."""
        x, w = (config.tile_m, config.tile_k), (config.tile_k, config.tile_n)
        return {
            "x": x[::-1] if self.x_transposed else x,
            "w": w[::-1] if self.w_transposed else w,
        }

    def is_flat(self, config: MatmulConfig, name: str) -> bool:
        """Whether ``name``'s blocks can be copied as plain rows: one swizzle wide, so that the
        bytes are the same tiled or not."""
        width = self.blocks(config)[name][1] * jnp.dtype(self.x.dtype).itemsize
        return width == self.swizzle(config)


def _tiled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """The shared-memory layout of wgmma operands: tiles of 8 rows and one swizzle's columns."""
    swizzle = columns * jnp.dtype(dtype).itemsize
    return _untyped.TilingTransform((8, columns)), _untyped.SwizzleTransform(swizzle)


def memory_limits(operands: Operands, config: MatmulConfig) -> Iterator[str]:
    """Why shared memory cannot hold blocks of operands of these shapes, in words."""
    swizzle = operands.swizzle(config)
    if swizzle < NARROWEST_SWIZZLE:
        yield (
            f"operands are contiguous in {operands.x.shape} and {operands.w.shape}; rows that the "
            f"tensor cores read across need a multiple of {NARROWEST_SWIZZLE} bytes"
        )
        return
    for name, operand in ("x", operands.x), ("w", operands.w):
        tile = 8, swizzle // jnp.dtype(operand.dtype).itemsize
        if not operands.is_flat(config, name) and not _tile_covers(tile, operand.shape):
            yield _uncovered(operand.shape, tile)
    addend = operands.addend
    if addend is not None and not _addend_is_flat(operands, config):
        tile = 8, SWIZZLE_BYTES // jnp.dtype(addend.dtype).itemsize
        if not _tile_covers(tile, addend.shape):
            yield _uncovered(addend.shape, tile)


def _tile_covers(tile: tuple[int, int], shape: tuple[int, ...]) -> bool:
    """Whether copies in tiles reach all of an array; a tile is cut to an array that is smaller."""
    return all(size <= t or size % t == 0 for size, t in zip(shape, tile, strict=True))


def _uncovered(shape: tuple[int, ...], tile: tuple[int, int]) -> str:
    return f"an operand {shape} is copied in tiles of {tile}, which must divide it: pad it"


def _addend_is_flat(operands: Operands, config: MatmulConfig) -> bool:
    """Whether an output store's addend is at most one swizzle wide, so that it needs no tiles."""
    row = config.store_columns(operands.y.dtype) * jnp.dtype(operands.addend.dtype).itemsize
    return row <= SWIZZLE_BYTES


def _operand_buffer(operands: Operands, config: MatmulConfig, name: str, flat_views: bool) -> Any:
    """Shared memory for an operand's stages, and its flat view where there is one.

    The TMA unit cannot clip inside a tile, so that copies into a tiled buffer need sizes that are
    multiples of the tile; as plain rows they are clipped at any row and any 16 bytes. The view is
    a union's second member: each is alone in its group, so both start at the union's first byte.
    """
    dtype, swizzle = operands.x.dtype, operands.swizzle(config)
    shape = (config.stages, *operands.blocks(config)[name])
    tiled = plgpu.SMEM(shape, dtype, transforms=_tiled(swizzle // jnp.dtype(dtype).itemsize, dtype))
    if not (flat_views and operands.is_flat(config, name)):
        return tiled
    rows = plgpu.SMEM(shape, dtype, transforms=(_untyped.SwizzleTransform(swizzle),))
    return plgpu.RefUnion(tiled, rows)


def scratch(
    operands: Operands, config: MatmulConfig, signals: bool, flat_views: bool = True
) -> dict[str, Any]:
    """The shared memory and barriers that ``compute_tiles`` needs, by name."""
    out_dtype = operands.y.dtype
    columns = config.store_columns(out_dtype)
    out_swizzle = math.gcd(columns * jnp.dtype(out_dtype).itemsize, SWIZZLE_BYTES)
    found = {
        "x_smem": _operand_buffer(operands, config, "x", flat_views),
        "w_smem": _operand_buffer(operands, config, "w", flat_views),
        "y_smem": plgpu.SMEM(
            (config.warpgroups, config.epilogue_slots, WGMMA_ROWS, columns),
            out_dtype,
            transforms=(_untyped.SwizzleTransform(out_swizzle),),
        ),
        # A cluster barrier, also for one CTA: one thread arrives for its warpgroup, not 128.
        "empty": plgpu.ClusterBarrier(
            collective_axes=CLUSTER_AXES,
            num_arrivals=config.warpgroups,
            num_barriers=config.stages,
        ),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
    }
    if signals:
        found["stored"] = plgpu.Barrier(num_arrivals=config.warpgroups)
    if operands.addend is not None and not operands.addends_ahead:
        dtype = operands.addend.dtype
        itemsize = jnp.dtype(dtype).itemsize
        transforms = _tiled(SWIZZLE_BYTES // itemsize, dtype)
        if _addend_is_flat(operands, config):
            transforms = (_untyped.SwizzleTransform(columns * itemsize),)
        found["addend_smem"] = plgpu.SMEM(
            (config.warpgroups, WGMMA_ROWS, columns), dtype, transforms=transforms
        )
        found["addend_full"] = plgpu.Barrier(num_barriers=config.warpgroups)
    return found
