"""Any contraction of two operands named by letters as a Hopper kernel handed its loop over tiles.

The operands are as in ``matmul_tpu``: two of the letters ``m``, ``n``, ``k`` in each are cut into
tiles, every other letter is walked one index at a time. A tile is then a product of two matrices,
computed by ``matmul_mosaic_gpu``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from syncopate_jax.errors import InputError
from syncopate_jax.kernel.blocks import block_shape
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.loop import Places, Use
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu_kernel, matmul_tpu, tile_columns
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import (
    CLUSTER_AXES,
    COPY_BYTES,
    HOPPER_SHARED_MEMORY,
    WGMMA_ROWS,
    MatmulConfig,
)
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_operands import Operands, memory_limits
from syncopate_jax.pallas_kernels.tile_loop_mosaic_gpu import Tile, TileLoop

SHARED_BYTES = 225 * 1024  # of the 227 KiB of a Hopper block; the rest is left for barriers
DTYPES = ("bfloat16", "float16")


def contraction(
    lhs: str,
    rhs: str,
    out: str,
    sizes: Mapping[str, int],
    *,
    config: MatmulConfig,
    dtype: jax.typing.DTypeLike,
    out_dtype: jax.typing.DTypeLike,
) -> PallasKernel:
    """``out = sum over the letters that out lacks of lhs * rhs``, accumulated in float32.

    Args:
      lhs, rhs, out: letters of each operand, such as ``"Gbmk"``, ``"kn"``, ``"b(Gm)n"``.
      sizes: extent of every letter, in elements.
      config: tiles and how they are computed; its m and n are the rows and columns of ``out``.
      dtype, out_dtype: of the operands and the result.

    Returns:
      A local kernel with operands ``lhs`` and ``rhs`` and result ``out``, with an addend.

    Raises:
      InputError: an operand has not two matrix letters, or a tile does not divide what is in
        brackets.
    """
    groups = {
        name: matmul_tpu.split_groups(given)
        for name, given in (("lhs", lhs), ("rhs", rhs), ("out", out))
    }
    flat = {name: "".join(found) for name, found in groups.items()}
    matrix = {
        name: [x for x in found if x in matmul_tpu.MATRIX_LETTERS] for name, found in flat.items()
    }
    for name, letters in matrix.items():
        if len(letters) != 2:
            raise InputError(f"contraction: {name} {flat[name]!r} needs two of the letters m, n, k")
    rows, columns = matrix["out"]
    (depth,) = [x for x in matrix["lhs"] if x in matrix["rhs"]]
    tiles = {rows: config.tile_m, columns: config.tile_n, depth: config.tile_k}
    _check_brackets(groups, sizes, tiles)
    reduced = [x for x in dict.fromkeys(flat["lhs"] + flat["rhs"]) if x not in flat["out"]]
    axes = [*flat["out"], *reduced]
    blocks = {letter: tiles[letter] for letter in axes if letter in tiles}
    grid = tuple(-(-sizes[letter] // blocks.get(letter, 1)) for letter in axes)
    x, w = ("lhs", "rhs") if rows in matrix["lhs"] else ("rhs", "lhs")
    lead = tuple(i for i, letter in enumerate(flat["out"]) if letter not in (rows, columns))
    row_axis, column_axis = axes.index(rows), axes.index(columns)
    body = ContractionLoop(
        config,
        x=x,
        w=w,
        x_transposed=matrix[x][0] == depth,
        w_transposed=matrix[w][0] == columns,
        lead=lead,
        row_axis=row_axis,
        column_axis=column_axis,
    )
    body = dataclasses.replace(body, limits=tuple(_limits(groups, sizes, dtype, out_dtype, body)))
    return PallasKernel(
        body=None,
        grid=grid,
        operands=("lhs", "rhs"),
        results=("out",),
        in_specs=tuple(
            matmul_tpu.block_spec(groups[name], axes, blocks, grid) for name in ("lhs", "rhs")
        ),
        out_specs=(matmul_tpu.block_spec(groups["out"], axes, blocks, grid),),
        out_shape=(jax.ShapeDtypeStruct(matmul_tpu.group_shape(groups["out"], sizes), out_dtype),),
        has_addend=True,
        reference=functools.partial(
            matmul_tpu.reference, groups=groups, sizes=sizes, out_dtype=out_dtype
        ),
        loop=body,
        name="matmul",
    )


def choose_config(
    out: str,
    sizes: Mapping[str, int],
    asked: Mapping[str, int],
    out_dtype: str,
    adds: bool = True,
    *,
    workers: int,
) -> tuple[dict[str, int], MatmulConfig]:
    """Tile sizes by letter, as asked or the usual, and the configuration that has them.

    Usual are 128 rows and 256 columns, or 128 where those leave executors idle or are done in a
    turn (``tile_columns``); 64 rows where there are no more in any block of the result.

    Args:
      out, sizes: as in ``contraction``.
      asked: tile sizes by letter, in elements.
      adds: whether results are added to what arrives from peers, which takes shared memory too.
      workers: CTAs of a rank that compute tiles.
    """
    rows, columns = (x for x in out if x in matmul_tpu.MATRIX_LETTERS)
    (depth,) = set(matmul_tpu.MATRIX_LETTERS) - {rows, columns}
    low = sizes[rows] <= WGMMA_ROWS and asked.get(columns, 0) % tile_columns.NARROW == 0
    height = asked.get(rows, WGMMA_ROWS if low else 2 * WGMMA_ROWS)
    usual = {rows: height, columns: tile_columns.columns(out, sizes, height, workers), depth: 64}
    tiles = {letter: asked.get(letter, size) for letter, size in usual.items()}
    itemsize = jnp.dtype(out_dtype).itemsize
    stage = 2 * tiles[depth] * (tiles[rows] + tiles[columns])
    config = MatmulConfig(
        tile_m=tiles[rows],
        tile_n=tiles[columns],
        tile_k=tiles[depth],
        # Two warpgroups share 64 rows by columns: each multiplies 64 rows at least.
        split="n" if tiles[rows] % (2 * WGMMA_ROWS) == WGMMA_ROWS else "m",
        epilogue_n=64 if itemsize == 2 else 32,
        # Stores to peers are far apart, so that one slot is as good as two.
        epilogue_slots=1 if adds else 2,
        overlap_epilogue=itemsize == 2,
    )
    part = config.warpgroups * WGMMA_ROWS * config.epilogue_n * itemsize
    left = SHARED_BYTES - (config.epilogue_slots + adds) * part
    return tiles, dataclasses.replace(config, stages=max(2, min(6, left // stage)))


def _check_brackets(
    groups: Mapping[str, Sequence[str]], sizes: Mapping[str, int], tiles: Mapping[str, int]
) -> None:
    """Where letters share a dimension, tiles must not reach from one block into the next."""
    for group in (group for found in groups.values() for group in found if len(group) > 1):
        letter = group[-1]
        if letter in tiles and sizes[letter] % tiles[letter]:
            raise InputError(
                f"contraction: letter {letter} of ({group}) has extent {sizes[letter]}, which its "
                f"tile {tiles[letter]} does not divide; give every letter a dimension"
            )


def _limits(
    groups: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    dtype: jax.typing.DTypeLike,
    out_dtype: jax.typing.DTypeLike,
    body: ContractionLoop,
) -> Iterator[str]:
    """What the tensor cores and the copy unit cannot do, in words."""
    config = body.config
    if str(jnp.dtype(dtype)) not in DTYPES:
        yield f"the tensor cores multiply {' or '.join(DTYPES)}, found {jnp.dtype(dtype)}"
        return
    if str(jnp.dtype(out_dtype)) not in (*DTYPES, "float32"):
        yield f"the epilogue stores {', '.join(DTYPES)} or float32, found {jnp.dtype(out_dtype)}"
    if (problem := config.problem()) is not None:
        yield problem
    taken = config.shared_memory(dtype, out_dtype)
    if taken > HOPPER_SHARED_MEMORY:
        yield (
            f"tile {config.tile_m}x{config.tile_n}x{config.tile_k} with {config.stages} stages "
            f"takes {taken} bytes of shared memory, and a block has {HOPPER_SHARED_MEMORY}; take "
            f"smaller tiles, such as 64 along k"
        )
    if config.cluster != 1:
        yield f"a fused matmul runs in clusters of 1 CTA, found {config.cluster}"
    shapes = {name: _matrix_shape(found, sizes) for name, found in groups.items()}
    for name, (_, columns) in shapes.items():
        size = columns * jnp.dtype(out_dtype if name == "out" else dtype).itemsize
        if size % COPY_BYTES:
            yield (
                f"rows of {name} are {size} bytes; the copy unit needs a multiple of {COPY_BYTES}: "
                f"pad its last dimension"
            )
    x, w = (jax.ShapeDtypeStruct(shapes[name], jnp.dtype(dtype)) for name in (body.x, body.w))
    operands = Operands(x, w, None, x_transposed=body.x_transposed, w_transposed=body.w_transposed)
    yield from memory_limits(operands, config)


def _matrix_shape(groups: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Extents of the two dimensions that are cut into tiles."""
    cut = [group for group in groups if group[-1] in matmul_tpu.MATRIX_LETTERS]
    rows, columns = matmul_tpu.group_shape(cut, sizes)
    return rows, columns


@dataclass(frozen=True, slots=True)
class ContractionLoop:
    """The text of a contraction; see ``kernel.loop.LoopBody``.

    Attributes:
      x, w: the operand whose rows are the result's, and the one whose columns are.
      x_transposed, w_transposed: as in ``matmul_mosaic_gpu_operands.Operands``.
      lead: grid axes of the result that are walked one index at a time.
      row_axis, column_axis: grid axes of the result's rows and columns.
      limits: what the tensor cores and the copy unit cannot do of it, in words.
    """

    config: MatmulConfig
    x: str
    w: str
    x_transposed: bool
    w_transposed: bool
    lead: tuple[int, ...]
    row_axis: int
    column_axis: int
    limits: tuple[str, ...] = ()

    @property
    def warpgroups(self) -> int:
        """Those that multiply, and one that loads."""
        return self.config.warpgroups + 1

    @property
    def tile_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Grid axes that make a tile's row and its column."""
        return (*self.lead, self.row_axis), (self.column_axis,)

    def launch(self) -> Mapping[str, Any]:
        """Arguments of ``plgpu.kernel`` that the text relies on."""
        return {
            "num_threads": self.warpgroups,
            "thread_name": matmul_mosaic_gpu_kernel.WARPGROUP_AXIS,
            "cluster": (1, 1),
            "cluster_names": CLUSTER_AXES,
        }

    def unsupported_reason(self, kernel: PallasKernel) -> str | None:
        """Limits of the tensor cores and of the copy unit."""
        return "; ".join(self.limits) or None

    def emit(self, kernel: PallasKernel, places: Places, loop: TileLoop) -> None:
        """The product's tiles; called by all warpgroups of a CTA."""
        specs = dict(zip(kernel.operands, kernel.in_specs, strict=True))
        specs |= dict(zip(kernel.results, kernel.out_specs, strict=True))
        (result,) = kernel.out_shape
        finder = _Finder(self, kernel, places, specs)
        steps = math.prod(kernel.grid[axis] for axis in kernel.reduction_axes)
        shape = {name: finder.matrix_shape(name) for name in specs}
        dtype = places.dtype(self.x)
        operands = Operands(
            x=jax.ShapeDtypeStruct(shape[self.x], dtype),
            w=jax.ShapeDtypeStruct(shape[self.w], dtype),
            y=jax.ShapeDtypeStruct(shape["out"], result.dtype),
            addend=jax.ShapeDtypeStruct(shape["out"], places.dtype("out"))
            if places.has_addends
            else None,
            x_transposed=self.x_transposed,
            w_transposed=self.w_transposed,
            x_at=functools.partial(finder.read, self.x),
            w_at=functools.partial(finder.read, self.w),
            y_at=finder.write,
            addends=places.addends if places.has_addends else None,
            addends_ahead=(
                places.has_addends
                and places.single_addends
                and not loop.in_turn
                and self.config.overlaps(result.dtype, steps)
                and shape["out"][0] % self.config.tile_m == 0
                and shape["out"][1] % self.config.tile_n == 0
            ),
            k_steps=steps,
            direct=places.direct,
        )
        matmul_mosaic_gpu_kernel.compute_tiles(operands, self.config, loop)


@dataclass(frozen=True, slots=True)
class _Finder:
    """Turns tiles and steps into starts of blocks."""

    body: ContractionLoop
    kernel: PallasKernel
    places: Places
    specs: Mapping[str, Any]

    def read(self, operand: str, tile: Tile, step: Any, use: Use) -> None:
        self.places.read(operand, self.starts(operand, tile, step), tile, step, use)

    def write(self, tile: Tile, use: Use) -> None:
        self.places.write("out", self.starts("out", tile, None), tile, use)

    def starts(self, operand: str, tile: Tile, step: Any) -> list[Any]:
        """Where the block starts in the operand, in elements."""
        index: list[Any] = [jnp.int32(0)] * len(self.kernel.grid)
        index[self.body.column_axis] = tile.n
        left = tile.m
        for axis in reversed((*self.body.lead, self.body.row_axis)):
            count = self.kernel.grid[axis]
            index[axis] = _rem(left, count)
            left = _div(left, count)
        if step is not None:
            found = self.places.step(step)
            for axis, at in zip(self.kernel.reduction_axes, found, strict=True):
                index[axis] = at
        spec = self.specs[operand]
        shape = block_shape(spec, self.places.shape(operand))
        blocks = spec.index_map(*index)
        return [jnp.asarray(at, jnp.int32) * size for at, size in zip(blocks, shape, strict=True)]

    def matrix_shape(self, operand: str) -> tuple[int, int]:
        """Extents of the two dimensions that are cut into tiles."""
        shape = self.places.shape(operand)
        cut = [n for n, b in zip(shape, self.specs[operand].block_shape, strict=True) if b]
        return cut[0], cut[1]


def _div(value: Any, by: int) -> Any:
    return value if by == 1 else lax.div(value, jnp.int32(by))


def _rem(value: Any, by: int) -> Any:
    return jnp.int32(0) if by == 1 else lax.rem(value, jnp.int32(by))
