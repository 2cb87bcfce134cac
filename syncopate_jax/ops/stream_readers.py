"""A matrix product whose operand some CTAs of its launch bring in from host memory meanwhile.

Pinned host memory has an address on the device, and the copy unit reads it as it reads any other:
CTAs that only communicate (paper section 5.2) load the operand piece by piece into shared memory,
store it in device memory and raise a counter for every part of a chunk; the CTAs that compute wait
for the part of K that they are about to load. All parts of a chunk come one after the other, and a
chunk is as much as is multiplied at a time: when its last part is there the others are done.
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
      ctas: how many; one alone does not fill the link.
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
      snake: every other chunk's parts come in reverse.
    """

    shape: tuple[int, int]
    axis: int
    band: int
    turn: Fraction
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
        turn: Fraction,
    ) -> Self:
        """The arrival of operand ``side``."""
        steps = -(-shape[1 - axis] // config.tile_k)
        parts = max(n for n in range(1, min(readers.parts, steps) + 1) if steps % n == 0)
        band, part = (config.tile_m, config.tile_n)[side], steps // parts * config.tile_k
        rows, columns = (band, part) if axis == 0 else (part, band)
        width = min(readers.row_bytes // itemsize, COPIED_ELEMENTS)
        piece = math.gcd(rows, readers.rows), math.gcd(columns, width)
        return cls(shape, axis, band, max(turn, Fraction(1)), part, piece, readers.snake)

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

    def raised(self, chunk: Any, copiers: int) -> Any:
        """How often a chunk's counters are raised: by each of ``copiers`` with pieces of a part."""
        if self.fewest >= copiers:
            return copiers
        return lax.min(self.extent(chunk)[1] * self.of_part, jnp.int32(copiers))

    def reversed(self, chunk: Any) -> Any:
        """Whether a chunk comes from the end of K."""
        return lax.rem(chunk, jnp.int32(2)) == 1

    def place(self, piece: Any) -> Place:
        """Where the piece of that number is; past the last one, the counter is another than any."""
        of_band = self.parts * self.of_part
        chunk = self.chunk(lax.div(piece, jnp.int32(of_band)))
        first, bands = self.extent(chunk)
        part, within = self._divmod(piece - first * of_band, bands, self.of_part)
        columns = self.grid[1]
        if self.axis == 0:
            row, column = _divmod(within, columns)
        else:
            row, column = self._divmod(within, bands, columns)
        came = part
        if self.snake:
            came = lax.select(self.reversed(chunk), self.parts - 1 - part, part)
        starts = [first * self.band, came * self.part]
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
        return -(-(self.readers.stages - 1) * self.copiers // self.arrival.fewest) + 1

    def run(self) -> None:
        """Brings all of them in; a part's counter is raised while later ones are on their way."""
        readers = self.readers
        leaving = readers.stages - readers.ahead
        left = self.arrival.pieces - self.number
        steps = lax.div(lax.max(left + self.copiers - 1, 0), jnp.int32(self.copiers))

        def step(i: jax.Array, slots: tuple[Any, Any]) -> tuple[Any, Any]:
            newest, oldest = slots
            at = lax.rem(i, jnp.int32(readers.stages))
            plgpu.barrier_wait(self.loaded(at))
            plgpu.copy_smem_to_gmem(self.smem(at), self._box(self.target, self._place(i)))
            # All but the newest have landed, not only left shared memory: the next takes a place.
            plgpu.wait_smem_to_gmem(leaving)
            oldest = self._tell(i - leaving, oldest, i >= leaving)
            return self._load(i + readers.ahead, newest, steps), oldest

        first = self._place(jnp.int32(0)).slot
        newest = first
        for i in range(readers.ahead):
            newest = self._load(jnp.int32(i), newest, steps)
        _, oldest = lax.fori_loop(jnp.int32(0), steps, step, (newest, first))
        plgpu.wait_smem_to_gmem(0)
        lax.fori_loop(lax.max(steps - leaving, 0), steps, self._tell, oldest)

    def _tell(self, i: Any, slot: Any, landed: Any = True) -> Any:
        """Raises the counter of step i's piece, ``slot``, if that was the part's last one here.

        Returns the next step's counter; the same if the piece has not ``landed``.
        """
        following = self._place(i + 1).slot
        pl.when(landed & (following != slot))(lambda: self.signals.signal(0, slot))
        return lax.select(jnp.bool_(landed), following, slot)

    def _load(self, i: Any, newest: Any, steps: Any) -> Any:
        """Starts to load the piece of step i, if there is one; returns its counter.

        It comes after the piece of counter ``newest``: before the first of a part, the part that is
        a window behind must be complete.
        """
        place = self._place(i)
        behind = place.slot - self.window
        waits = (behind >= 0) & (place.slot != newest) & self.readers.in_step

        @pl.when(i < steps)
        def _() -> None:
            @pl.when(waits)
            def _keep_step() -> None:
                chunk = lax.div(behind, jnp.int32(self.arrival.parts))
                self.signals.wait(behind, self.arrival.raised(chunk, self.copiers))

            at = lax.rem(i, jnp.int32(self.readers.stages))
            plgpu.copy_gmem_to_smem(self._box(self.source, place), self.smem(at), self.loaded(at))

        return place.slot

    def _place(self, i: Any) -> Place:
        return self.arrival.place(self.number + i * self.copiers)

    def _box(self, matrix: Any, place: Place) -> Any:
        rows, columns = self.arrival.piece
        return matrix.at[pl.ds(place.row, rows), pl.ds(place.column, columns)]


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
    config = config.fit(limits.shared_memory, x.dtype, out_dtype)
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
    steps_of_part = arrival.part // config.tile_k
    steps = steps_of_part * arrival.parts

    def kernel(x_ref: Any, w_ref: Any, table_ref: Any, y_ref: Any, arrived_ref: Any) -> None:
        counters = pl.get_global(plgpu.SemaphoreType.REGULAR((arrival.slots,)))
        signals = Signals(counters, arrival.slots, 0, False, None)
        cta = lax.axis_index(body.CTA_AXIS)
        refs = [x_ref, w_ref]

        @pl.when(cta < readers.ctas)
        def _read() -> None:
            read(readers, arrival, signals, refs[side], arrived_ref, warpgroups)

        def chunk_of(tile: Tile) -> Any:
            return arrival.chunk((tile.m, tile.n)[side])

        def before_k_step(tile: Tile, step: Any) -> None:
            part, within = _divmod(step, steps_of_part)

            @pl.when(within == 0)
            def _first_of_its_part() -> None:
                chunk = chunk_of(tile)
                signals.wait(chunk * arrival.parts + part, arrival.raised(chunk, copiers))

        def k_block(tile: Tile, step: Any) -> Any:
            return lax.select(arrival.reversed(chunk_of(tile)), steps - 1 - step, step)

        @pl.when(cta >= readers.ctas)
        def _compute() -> None:
            order = ScheduledOrder(table_ref, len(table))
            loop = TileLoop(
                order,
                cta - readers.ctas,
                workers,
                before_k_step=before_k_step,
                k_block=k_block if arrival.snake else None,
            )
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
