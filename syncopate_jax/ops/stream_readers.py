"""A matrix product whose operand some CTAs of its launch bring in from host memory meanwhile.

Pinned host memory has an address on the device, and the copy unit reads it as it reads any other:
CTAs that only communicate (paper section 5.2) load the operand piece by piece into shared memory,
store it in device memory and raise a counter for every part of a chunk; the CTAs that compute wait
for the part of K that they are about to load. All parts of a chunk come one after the other, and a
chunk is as much as is multiplied at a time: when its last part is there the others are done.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.backends.gpu_signals import Signals
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.arguments import integer
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu_kernel as body
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import (
    CLUSTER_AXES,
    Limits,
    MatmulConfig,
)
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_operands import Operands
from syncopate_jax.pallas_kernels.tile_loop_mosaic_gpu import ScheduledOrder, Tile, TileLoop

COPIED_ELEMENTS = 256  # the most the copy unit copies along a dimension
COPY_BYTES = 16  # its unit of length
MOST_BARRIERS = 32  # that Mosaic GPU has in one array of them


@dataclass(frozen=True, slots=True)
class Readers:
    """The CTAs that bring the operand in, and how.

    Attributes:
      ctas: how many. One reads at most 38 GB/s from an H200's host, 2 and more 51.
      parts: pieces of K that a chunk comes in, at most; as many as divide a tile's k steps.
      snake: every other chunk comes from its end along K, and is multiplied so: what its tiles read
        first of the other operand is what those before read last, and may still be in the cache.
      in_step: no warpgroup is further ahead of the others than what all have on their way: parts
        come in order even where some are served faster.
      stages: pieces that a warpgroup has in shared memory.
      ahead: those of them that are being loaded; the others leave.
      rows, row_bytes: of a piece, at most.

    Raises:
      InputError: a field has another type or range.
    """

    ctas: int = 4
    parts: int = 8
    snake: bool = False
    in_step: bool = True
    stages: int = 8
    ahead: int = 6
    rows: int = 64
    row_bytes: int = 128

    def __post_init__(self) -> None:
        for name in ("ctas", "parts", "stages", "ahead", "rows", "row_bytes"):
            integer("Readers", name, getattr(self, name), 1)
        for name in ("snake", "in_step"):
            if not isinstance(getattr(self, name), bool):
                found = getattr(self, name)
                raise InputError(f"Readers: {name} needs True or False, found {found!r}")
        if self.ahead >= self.stages:
            raise InputError(
                f"Readers: ahead={self.ahead} must be less than stages={self.stages}: a piece that "
                "leaves has a stage too"
            )
        if self.rows > COPIED_ELEMENTS or self.row_bytes % COPY_BYTES:
            raise InputError(
                f"Readers: a piece of {self.rows} rows of {self.row_bytes} bytes cannot be copied; "
                f"it has at most {COPIED_ELEMENTS} rows, of a multiple of {COPY_BYTES} bytes"
            )


@dataclass(frozen=True, slots=True)
class Arrival:
    """In which order the operand comes in, in elements: chunk by chunk, each part by part.

    Attributes:
      shape: of the operand.
      axis: the dimension that is cut into chunks; the other one is K.
      chunk, part: of a chunk along the axis, of a part along K.
      piece: rows and columns that are copied at a time; they divide a part of a chunk.
      snake: every other chunk's parts come in reverse.
    """

    shape: tuple[int, int]
    axis: int
    chunk: int
    part: int
    piece: tuple[int, int]
    snake: bool

    @classmethod
    def of(
        cls,
        readers: Readers,
        config: MatmulConfig,
        shape: tuple[int, int],
        itemsize: int,
        *,
        side: int,
        axis: int,
        bands: int,
    ) -> Self:
        """The arrival of operand ``side`` in chunks of ``bands`` bands of tiles."""
        steps = -(-shape[1 - axis] // config.tile_k)
        parts = max(n for n in range(1, min(readers.parts, steps) + 1) if steps % n == 0)
        chunk = bands * (config.tile_m, config.tile_n)[side]
        part = steps // parts * config.tile_k
        rows, columns = (chunk, part) if axis == 0 else (part, chunk)
        width = min(readers.row_bytes // itemsize, COPIED_ELEMENTS)
        piece = math.gcd(rows, readers.rows), math.gcd(columns, width)
        return cls(shape, axis, chunk, part, piece, readers.snake)

    @property
    def chunks(self) -> int:
        return -(-self.shape[self.axis] // self.chunk)

    @property
    def parts(self) -> int:
        """Parts of a chunk."""
        return -(-self.shape[1 - self.axis] // self.part)

    @property
    def grid(self) -> tuple[int, int]:
        """Pieces of a part of a chunk along its rows and columns."""
        sizes = (self.chunk, self.part) if self.axis == 0 else (self.part, self.chunk)
        return sizes[0] // self.piece[0], sizes[1] // self.piece[1]

    @property
    def of_part(self) -> int:
        """Pieces of a part of a chunk."""
        return math.prod(self.grid)

    @property
    def slots(self) -> int:
        """Parts of all chunks: that many counters."""
        return self.chunks * self.parts

    def raised(self, copiers: int) -> int:
        """How often a counter is raised: once by each of ``copiers`` with pieces of its part."""
        return min(copiers, self.of_part)

    def slot(self, piece: Any) -> Any:
        """The counter of a piece's part."""
        return lax.div(piece, jnp.int32(self.of_part))

    def corner(self, piece: Any) -> tuple[Any, Any]:
        """Row and column of the piece of that number; past the edge the copy unit clips."""
        slot, within = _divmod(piece, self.of_part)
        chunk, part = _divmod(slot, self.parts)
        if self.snake:
            back = lax.rem(chunk, jnp.int32(2)) == 1
            part = lax.select(back, self.parts - 1 - part, part)
        row, column = _divmod(within, self.grid[1])
        starts = [chunk * self.chunk, part * self.part]
        if self.axis == 1:
            starts.reverse()
        return starts[0] + row * self.piece[0], starts[1] + column * self.piece[1]


def _divmod(number: Any, by: int) -> tuple[Any, Any]:
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


@dataclass(frozen=True, slots=True)
class Reader:
    """One warpgroup's share of the pieces: every ``copiers``-th from ``number`` on.

    Attributes:
      source, target: the operand in host memory, and its place in device memory.
      smem, loaded: a stage of this warpgroup, and its barrier, by their number.
    """

    readers: Readers
    arrival: Arrival
    signals: Signals
    source: Any
    target: Any
    smem: Any
    loaded: Any
    number: Any
    copiers: int

    @property
    def window(self) -> int:
        """How many parts behind the one that is begun must be complete.

        More than a warpgroup has pieces of on their way or not yet told of, at most as many pieces
        as stages: it would wait for itself.
        """
        return -(-(self.readers.stages - 1) * self.copiers // self.arrival.of_part) + 1

    def run(self) -> None:
        """Brings all of them in; a part's counter is raised while later ones are on their way."""
        readers = self.readers
        leaving = readers.stages - readers.ahead
        total = self.arrival.slots * self.arrival.of_part
        steps = lax.div(total - self.number + self.copiers - 1, jnp.int32(self.copiers))

        def step(i: jax.Array, _: None) -> None:
            at = lax.rem(i, jnp.int32(readers.stages))
            plgpu.barrier_wait(self.loaded(at))
            plgpu.copy_smem_to_gmem(self.smem(at), self._box(self.target, self._piece(i)))
            # All but the newest have landed, not only left shared memory: the next takes a place.
            plgpu.wait_smem_to_gmem(leaving)
            pl.when(i >= leaving)(lambda: self._raise(i - leaving))
            pl.when(i + readers.ahead < steps)(lambda: self._load(i + readers.ahead))

        for i in range(readers.ahead):
            pl.when(i < steps)(functools.partial(self._load, jnp.int32(i)))
        lax.fori_loop(jnp.int32(0), steps, step, None)
        plgpu.wait_smem_to_gmem(0)
        lax.fori_loop(lax.max(steps - leaving, 0), steps, lambda i, _: self._raise(i), None)

    def _raise(self, i: Any) -> None:
        """Raises the counter of a part whose last piece of this warpgroup has landed."""
        piece = self._piece(i)
        slot = self.arrival.slot(piece)
        following = self.arrival.slot(piece + self.copiers)
        pl.when(following != slot)(lambda: self.signals.signal(0, slot))

    def _load(self, i: Any) -> None:
        piece = self._piece(i)
        if self.readers.in_step:
            slot = self.arrival.slot(piece)
            before = self.arrival.slot(piece - self.copiers)
            raised = self.arrival.raised(self.copiers)
            first = (slot >= self.window) & (before != slot)
            pl.when(first)(lambda: self.signals.wait(slot - self.window, raised))
        at = lax.rem(i, jnp.int32(self.readers.stages))
        plgpu.copy_gmem_to_smem(self._box(self.source, piece), self.smem(at), self.loaded(at))

    def _piece(self, i: Any) -> Any:
        return self.number + i * self.copiers

    def _box(self, matrix: Any, piece: Any) -> Any:
        row, column = self.arrival.corner(piece)
        rows, columns = self.arrival.piece
        return matrix.at[pl.ds(row, rows), pl.ds(column, columns)]


def read(
    readers: Readers,
    arrival: Arrival,
    signals: Signals,
    source: Any,
    target: Any,
    warpgroups: int,
) -> None:
    """Copies all of ``source`` to ``target``; called by every warpgroup of the first CTAs."""
    wg = lax.axis_index(body.WARPGROUP_AXIS)

    def scope(smem: Any, loaded: Any) -> None:
        Reader(
            readers,
            arrival,
            signals,
            source,
            target,
            smem=lambda at: smem.at[wg, at],
            loaded=lambda at: loaded.at[wg * readers.stages + at],
            number=lax.axis_index(body.CTA_AXIS) * warpgroups + wg,
            copiers=readers.ctas * warpgroups,
        ).run()

    pl.run_scoped(
        scope,
        plgpu.SMEM((warpgroups, readers.stages, *arrival.piece), source.dtype),
        plgpu.Barrier(num_barriers=warpgroups * readers.stages),
        collective_axes=body.WARPGROUP_AXIS,
    )


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    side: int,
    arrival: Arrival,
    readers: Readers,
    table: np.ndarray,
    config: MatmulConfig,
    num_sms: int,
    out_dtype: Any,
    w_transposed: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """``x @ w``, of which operand ``side`` is read from wherever it is while tiles are computed.

    Args:
      x, w: the operands, as of the matrix product without readers; the streamed one by its address.
      side: 0 where ``x`` is streamed, 1 for ``w``.
      arrival: in which order it comes in.
      readers: who brings it in.
      table: int32 [tiles, 3], the order of tiles; the third column is not read.
      config: how the product is cut.
      num_sms: multiprocessors, those of the readers among them.
      out_dtype: of the result.
      w_transposed: ``w`` is [N, K].
      interpret: ``plgpu.InterpretGPUParams()`` to run on a CPU.

    Raises:
      UnsupportedError: the kernel cannot compute this product, or not beside so many readers.
    """
    if num_sms <= readers.ctas:
        raise UnsupportedError(
            f"stream_matmul: tma_dedicated: {readers.ctas} of {num_sms} multiprocessors read; none "
            "is left to compute"
        )
    limits = Limits.of(jax.local_devices()[0], sms=num_sms - readers.ctas)
    bands = arrival.chunk // (config.tile_m, config.tile_n)[side]
    config = dataclasses.replace(
        config.fit(limits.shared_memory, x.dtype, out_dtype),
        k_snake=bands * arrival.snake,
        minor="n" if side == 0 else "m",
    )
    m, n = x.shape[0], w.shape[0 if w_transposed else 1]
    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    reason = matmul_mosaic_gpu.unsupported_reason(
        Operands(x, w, out, w_transposed=w_transposed), config, limits
    )
    if config.cluster > 1:
        reason = f"tiles are computed by clusters of {config.cluster} CTAs; readers have none"
    warpgroups = config.warpgroups + 1
    held = warpgroups * readers.stages * math.prod(arrival.piece) * x.dtype.itemsize
    if held > limits.shared_memory:
        reason = f"readers hold {held} bytes of {limits.shared_memory}; take fewer stages"
    if warpgroups * readers.stages > MOST_BARRIERS:
        reason = (
            f"{warpgroups} warpgroups with {readers.stages} stages each have more than "
            f"{MOST_BARRIERS} barriers; take fewer stages, of larger pieces"
        )
    if reason is not None:
        raise UnsupportedError(f"stream_matmul: tma_dedicated: {reason}")
    workers = config.workers(m, n, limits.sms)
    copiers = readers.ctas * warpgroups
    steps = arrival.part // config.tile_k

    def kernel(x_ref: Any, w_ref: Any, table_ref: Any, y_ref: Any, arrived_ref: Any) -> None:
        counters = pl.get_global(plgpu.SemaphoreType.REGULAR((arrival.slots,)))
        signals = Signals(counters, arrival.slots, 0, False, None)
        cta = lax.axis_index(body.CTA_AXIS)
        refs = [x_ref, w_ref]

        @pl.when(cta < readers.ctas)
        def _read() -> None:
            read(readers, arrival, signals, refs[side], arrived_ref, warpgroups)

        def before_k_step(tile: Tile, step: Any) -> None:
            part, within = _divmod(step, steps)
            chunk = lax.div((tile.m, tile.n)[side], jnp.int32(bands))

            @pl.when(within == 0)
            def _first_of_its_part() -> None:
                signals.wait(chunk * arrival.parts + part, arrival.raised(copiers))

        @pl.when(cta >= readers.ctas)
        def _compute() -> None:
            order = ScheduledOrder(table_ref, len(table))
            loop = TileLoop(order, cta - readers.ctas, workers, before_k_step=before_k_step)
            found = [*refs]
            found[side] = arrived_ref
            operands = Operands(found[0], found[1], y_ref, w_transposed=w_transposed)
            body.compute_tiles(operands, config, loop, flat_views=not interpret)

    y, _ = plgpu.kernel(
        kernel,
        out_type=[out, jax.ShapeDtypeStruct(arrival.shape, x.dtype)],
        grid=(readers.ctas + workers,),
        grid_names=(body.CTA_AXIS,),
        cluster=(1, 1),
        cluster_names=CLUSTER_AXES,
        num_threads=warpgroups,
        thread_name=body.WARPGROUP_AXIS,
        compiler_params=plgpu.CompilerParams(
            # Safe: no warpgroup reads shared memory that it wrote, but where commit_smem fences.
            unsafe_no_auto_barriers=True,
            skip_device_barrier=True,  # the counters are this device's own
        ),
        interpret=interpret,
    )(x, w, jnp.asarray(table))
    return y
