"""A matrix product whose operand some CTAs of its launch bring in from host memory meanwhile.

Pinned host memory has an address on the device, and the copy unit reads it as it reads any other:
CTAs that only communicate (paper section 5.2) load the operand piece by piece into shared memory,
store it in device memory and raise a counter for every part of a chunk; the CTAs that compute wait
for the part of K that they are about to load. All parts of a chunk come one after the other, and a
chunk is as much as is multiplied at a time: when its last part is there the others are done.

What a signal takes, microseconds, is more than what a piece does. So in a CTA that reads one
warpgroup only loads, as soon as a stage is free, and another stores and signals: a ring of stages
lies between them, and holds more than the link brings during a signal.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.backends.gpu_signals import Signals
from syncopate_jax.errors import UnsupportedError
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
PIECE_BYTES, ROW_BYTES = 16384, 512  # of a piece, at most
STAGES = 12
"""Pieces that a CTA has in shared memory. 6 on their way are what fills the link from two CTAs, 3
from four; the others are what comes in during a signal."""
LEAVING = 2  # those of them that are being stored, at most: the one before has landed long ago


@dataclass(frozen=True, slots=True)
class Readers:
    """The CTAs that bring the operand in.

    Attributes:
      ctas: how many; one alone does not fill the link.
      parts: pieces of K that a chunk comes in, at most; as many as divide a tile's k steps. Where
        the copy takes longer than the product, a tile ends one part's product after its last part
        has come. It takes parts of every chunk: a tile that waits for a whole chunk puts off all
        after it, which win back little from chunk to chunk.

    Raises:
      InputError: a field has another type or range.
    """

    ctas: int = 4
    parts: int = 4

    def __post_init__(self) -> None:
        for name in ("ctas", "parts"):
            object.__setattr__(self, name, integer("Readers", name, getattr(self, name), 1))


@dataclass(frozen=True, slots=True)
class Arrival:
    """In which order the operand comes in: chunk by chunk, each part by part.

    Chunk t has the bands of tiles from ceil(t turn) on, to where the next begins: those whose first
    tile is computed in turn t, if a turn of the workers is ``turn`` bands long.

    Attributes:
      shape: of the operand.
      axis: the dimension that is cut into bands; the other one is K.
      band: elements of a band along the axis.
      turn: bands, at least 1.
      part: elements of a part along K.
      piece: rows and columns that are copied at a time; they divide a part of a band.
    """

    shape: tuple[int, int]
    axis: int
    band: int
    turn: Fraction
    part: int
    piece: tuple[int, int]

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
        turn: Fraction,
    ) -> Self:
        """The arrival of operand ``side``."""
        steps = -(-shape[1 - axis] // config.tile_k)
        parts = max(n for n in range(1, min(readers.parts, steps) + 1) if steps % n == 0)
        band, part = (config.tile_m, config.tile_n)[side], steps // parts * config.tile_k
        rows, columns = (band, part) if axis == 0 else (part, band)
        width = math.gcd(columns, min(ROW_BYTES // itemsize, COPIED_ELEMENTS))
        height = math.gcd(rows, min(PIECE_BYTES // (width * itemsize), COPIED_ELEMENTS))
        return cls(shape, axis, band, max(turn, Fraction(1)), part, (height, width))

    @property
    def bands(self) -> int:
        return -(-self.shape[self.axis] // self.band)

    @property
    def parts(self) -> int:
        """Parts of a chunk."""
        return -(-self.shape[1 - self.axis] // self.part)

    @property
    def bounds(self) -> list[int]:
        """Where each chunk starts, in bands, and the end."""
        chunks = range(self.bands)  # no more than that
        starts = (math.ceil(chunk * self.turn) for chunk in chunks)
        return [*(start for start in starts if start < self.bands), self.bands]

    @property
    def slots(self) -> int:
        """Parts of all chunks: that many counters."""
        return (len(self.bounds) - 1) * self.parts

    @property
    def grid(self) -> tuple[int, int]:
        """Pieces of a part of a band along its rows and columns."""
        rows, columns = (self.band, self.part) if self.axis == 0 else (self.part, self.band)
        return rows // self.piece[0], columns // self.piece[1]

    @property
    def of_part(self) -> int:
        """Pieces of a part of a band."""
        return math.prod(self.grid)

    @property
    def pieces(self) -> int:
        """Pieces of all bands."""
        return self.bands * self.parts * self.of_part

    @property
    def fewest(self) -> int:
        """Pieces of a part of a chunk, at least."""
        return self.of_part * min(hi - lo for lo, hi in itertools.pairwise(self.bounds))

    def chunk(self, band: Any) -> Any:
        """The chunk of a band."""
        return lax.div(band * self.turn.denominator, jnp.int32(self.turn.numerator))

    def extent(self, chunk: Any) -> tuple[Any, Any]:
        """The first band of a chunk, and how many it has."""
        count, of = self.turn.numerator, jnp.int32(self.turn.denominator)
        lo, hi = (lax.div(t * count + of - 1, of) for t in (chunk, chunk + 1))
        return lo, lax.min(hi, jnp.int32(self.bands)) - lo

    def raised(self, chunk: Any, ctas: int) -> Any:
        """How often a chunk's counters are raised: by each of ``ctas`` with pieces of a part."""
        if self.fewest >= ctas:
            return ctas
        return lax.min(self.extent(chunk)[1] * self.of_part, jnp.int32(ctas))

    def place(self, piece: Any) -> Place:
        """Where the piece of that number is."""
        of_band = self.parts * self.of_part
        chunk = self.chunk(lax.div(piece, jnp.int32(of_band)))
        first, bands = self.extent(chunk)
        part, within = self._divmod(piece - first * of_band, bands, self.of_part)
        columns = self.grid[1]
        if self.axis == 0:
            row, column = _divmod(within, columns)
        else:
            row, column = self._divmod(within, bands, columns)
        starts = [first * self.band, part * self.part]
        if self.axis == 1:
            starts.reverse()
        return Place(
            chunk * self.parts + part,
            starts[0] + row * self.piece[0],
            starts[1] + column * self.piece[1],
        )

    def _divmod(self, number: Any, bands: Any, of_band: int) -> tuple[Any, Any]:
        """Quotient and remainder by what a chunk's bands have; divisors known ahead are cheap."""
        sizes = sorted({hi - lo for lo, hi in itertools.pairwise(self.bounds)})
        quotient = lax.div(number, jnp.int32(sizes[0] * of_band))
        for size in sizes[1:]:
            other = lax.div(number, jnp.int32(size * of_band))
            quotient = lax.select(bands == size, other, quotient)
        return quotient, number - quotient * bands * of_band


class Place(NamedTuple):
    """Of a piece, the counter of its part, and its first row and column; they may be past the edge,
    where the copy unit clips."""

    slot: Any
    row: Any
    column: Any


def _divmod(number: Any, by: Any) -> tuple[Any, Any]:
    by = jnp.int32(by)
    return lax.div(number, by), lax.rem(number, by)


@dataclass(frozen=True, slots=True)
class Reader:
    """One CTA's share of the pieces: every ``ctas``-th from ``number`` on.

    Attributes:
      source, target: the operand in host memory, and its place in device memory.
      smem: the stages.
      full, empty: a barrier of each: its piece has come, or has left.
    """

    arrival: Arrival
    signals: Signals
    source: Any
    target: Any
    smem: Any
    full: Any
    empty: Any
    number: Any
    ctas: int

    @property
    def steps(self) -> Any:
        """How many pieces this is."""
        left = self.arrival.pieces - self.number + self.ctas - 1
        return lax.div(lax.max(left, 0), jnp.int32(self.ctas))

    @property
    def window(self) -> int:
        """How many parts behind the first of a chunk must be complete before that is begun.

        More than all CTAs have pieces of in shared memory: they would wait for each other's.
        """
        return -(-STAGES * self.ctas // self.arrival.fewest) + 1

    def load(self) -> None:
        """Brings all of them into shared memory.

        Where some are served faster, they wait once a chunk: parts come in order all the same.
        """
        parts = jnp.int32(self.arrival.parts)

        def step(i: jax.Array, before: Any) -> Any:
            place, at = self._place(i), lax.rem(i, jnp.int32(STAGES))
            chunk, behind = lax.div(place.slot, parts), place.slot - self.window

            @pl.when((chunk != before) & (behind >= 0))
            def _keep_step() -> None:
                self.signals.wait(behind, self.arrival.raised(lax.div(behind, parts), self.ctas))

            pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(self.empty.at[at]))
            source = self._box(self.source, place)
            plgpu.copy_gmem_to_smem(source, self.smem.at[at], self.full.at[at])
            return chunk

        lax.fori_loop(jnp.int32(0), self.steps, step, jnp.int32(0))

    def store(self) -> None:
        """Takes all of them to device memory; a part's counter is raised while later ones leave."""
        nothing, after_all = jnp.int32(-1), jnp.int32(self.arrival.slots)

        def step(i: jax.Array, leaving: tuple[Any, ...]) -> tuple[Any, ...]:
            place, at = self._place(i), lax.rem(i, jnp.int32(STAGES))
            plgpu.barrier_wait(self.full.at[at])
            plgpu.copy_smem_to_gmem(self.smem.at[at], self._box(self.target, place))
            # All but the newest have landed, not only left shared memory: a counter may be raised.
            plgpu.wait_smem_to_gmem(LEAVING)

            @pl.when(i >= LEAVING)
            def _landed() -> None:
                left = lax.rem(i + STAGES - LEAVING, jnp.int32(STAGES))
                plgpu.barrier_arrive(self.empty.at[left])

            landed, *others = *leaving, place.slot
            self._tell(landed, others[0])
            return tuple(others)

        leaving = lax.fori_loop(jnp.int32(0), self.steps, step, (nothing,) * LEAVING)
        plgpu.wait_smem_to_gmem(0)
        for landed, following in itertools.pairwise((*leaving, after_all)):
            self._tell(landed, following)

    def _tell(self, slot: Any, following: Any) -> None:
        """Raises the counter of a piece that has landed, if there is one, after a part's last."""
        pl.when((slot >= 0) & (slot != following))(lambda: self.signals.signal(0, slot))

    def _place(self, i: Any) -> Place:
        return self.arrival.place(self.number + i * self.ctas)

    def _box(self, matrix: Any, place: Place) -> Any:
        rows, columns = self.arrival.piece
        return matrix.at[pl.ds(place.row, rows), pl.ds(place.column, columns)]


def read(readers: Readers, arrival: Arrival, signals: Signals, source: Any, target: Any) -> None:
    """Copies all of ``source`` to ``target``; called by every warpgroup of the first CTAs.

    The first warpgroup loads and the second stores; others have nothing to do.
    """
    wg = lax.axis_index(body.WARPGROUP_AXIS)

    def scope(smem: Any, full: Any, empty: Any) -> None:
        number = lax.axis_index(body.CTA_AXIS)
        reader = Reader(arrival, signals, source, target, smem, full, empty, number, readers.ctas)
        pl.when(wg == 0)(reader.load)
        pl.when(wg == 1)(reader.store)

    pl.run_scoped(
        scope,
        plgpu.SMEM((STAGES, *arrival.piece), source.dtype),
        plgpu.Barrier(num_barriers=STAGES),
        plgpu.Barrier(num_barriers=STAGES),
        collective_axes=body.WARPGROUP_AXIS,
    )


def counters(arrival: Arrival) -> Signals:
    """The counters of all parts; who raises them and who waits are of one device."""
    found = pl.get_global(plgpu.SemaphoreType.REGULAR((arrival.slots,)))
    return Signals(found, arrival.slots, 0, False, None, scope="gpu")


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
    config = config.fit(limits.shared_memory, x.dtype, out_dtype)
    m, n = x.shape[0], w.shape[0 if w_transposed else 1]
    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    reason = matmul_mosaic_gpu.unsupported_reason(
        Operands(x, w, out, w_transposed=w_transposed), config, limits
    )
    if config.cluster > 1:
        reason = f"tiles are computed by clusters of {config.cluster} CTAs; readers have none"
    if reason is not None:
        raise UnsupportedError(f"stream_matmul: tma_dedicated: {reason}")
    workers = config.workers(m, n, limits.sms)
    steps_of_part = arrival.part // config.tile_k

    def kernel(x_ref: Any, w_ref: Any, table_ref: Any, y_ref: Any, arrived_ref: Any) -> None:
        signals = counters(arrival)
        cta = lax.axis_index(body.CTA_AXIS)
        refs = [x_ref, w_ref]

        @pl.when(cta < readers.ctas)
        def _read() -> None:
            read(readers, arrival, signals, refs[side], arrived_ref)

        def before_k_step(tile: Tile, step: Any) -> None:
            part, within = _divmod(step, steps_of_part)

            @pl.when(within == 0)
            def _first_of_its_part() -> None:
                chunk = arrival.chunk((tile.m, tile.n)[side])
                signals.wait(chunk * arrival.parts + part, arrival.raised(chunk, readers.ctas))

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
        num_threads=config.warpgroups + 1,
        thread_name=body.WARPGROUP_AXIS,
        compiler_params=plgpu.CompilerParams(
            # Safe: no warpgroup reads shared memory that it wrote, but where commit_smem fences.
            unsafe_no_auto_barriers=True,
            skip_device_barrier=True,  # the counters are this device's own
        ),
        interpret=interpret,
    )(x, w, jnp.asarray(table))
    return y
