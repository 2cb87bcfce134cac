"""The seam of a Mosaic GPU kernel: the loop over tiles, which the kernel is handed.

A local kernel asks its ``TileLoop`` for the tiles of this worker, one a step, and calls the
loop's hooks at fixed places. Alone it is given a ``NaturalOrder`` and no hooks; compiled with a
communication plan it is given a ``ScheduledOrder``, whose table says which tile is next, and hooks
that wait before a tile and signal after it (paper section 5). A hook that is absent leaves no code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

TABLE_COLUMNS = 3  # m, n, chunk


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """One step's tile: its step on this worker, its block indices, and its chunk, all int32.

    ``m`` and ``n`` count tiles of one CTA; ``chunk`` is the table's third column, 0 in a natural
    order. ``known`` is what the loop's owner has looked up of the tile ahead of its hooks.
    """

    step: jax.Array
    m: jax.Array
    n: jax.Array
    chunk: jax.Array
    known: Any = None


class TileOrder(Protocol):
    """Which tile comes at which position of the whole problem's sequence of tiles.

    ``fetch`` may read memory; the loop calls it one step ahead, so its latency is hidden.
    """

    @property
    def size(self) -> int | jax.Array:
        """Tiles in all."""

    def fetch(self, position: jax.Array) -> Any:
        """What there is to know of the tile at ``position``, perhaps still on its way."""

    def decode(self, fetched: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The tile's m, n and chunk."""


@dataclasses.dataclass(frozen=True, slots=True)
class NaturalOrder:
    """Tiles in bands of ``group`` along ``minor``, every other band reversed (a planar snake).

    Args:
      shape: tiles along m and along n.
      group: width of a band; tiles of one band that run together share operand blocks in L2.
      minor: the dimension that is cut into bands.
    """

    shape: tuple[int, int]
    group: int = 8
    minor: Literal["m", "n"] = "m"

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def fetch(self, position: jax.Array) -> jax.Array:
        return position

    def decode(self, fetched: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        minor_size, major_size = self._sizes()
        group = min(self.group, minor_size)
        band_tiles = _i32(group * major_size)
        band, within = lax.div(fetched, band_tiles), lax.rem(fetched, band_tiles)
        width = _i32(group)
        if minor_size % group:
            width = lax.select(band == minor_size // group, _i32(minor_size % group), width)
        minor = band * group + lax.rem(within, width)
        forward = lax.div(within, width)
        major = lax.select(lax.rem(band, _i32(2)) == 0, forward, major_size - 1 - forward)
        m, n = (minor, major) if self.minor == "m" else (major, minor)
        return m, n, _i32(0)

    def table(self, chunk: int = 0, m_offset: int = 0, n_offset: int = 0) -> np.ndarray:
        """The same order as rows of a schedule's table, int32 [size, 3], of one chunk's tiles."""
        minor_size, major_size = self._sizes()
        group = min(self.group, minor_size)
        band, within = np.divmod(np.arange(self.size), group * major_size)
        width = np.minimum(group, minor_size - band * group)
        forward, offset = np.divmod(within, width)
        minor = band * group + offset
        major = np.where(band % 2, major_size - 1 - forward, forward)
        m, n = (minor, major) if self.minor == "m" else (major, minor)
        return np.stack([m + m_offset, n + n_offset, np.full_like(m, chunk)], 1).astype(np.int32)

    def _sizes(self) -> tuple[int, int]:
        m, n = self.shape
        return (m, n) if self.minor == "m" else (n, m)


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledOrder:
    """Tiles in the order of an int32 table in GMEM of shape [size, 3]: m, n, chunk."""

    table: Any
    size: int

    def fetch(self, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        m, n, chunk = (self.table[position, column] for column in range(TABLE_COLUMNS))
        return m, n, chunk

    def decode(self, fetched: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return fetched


@dataclasses.dataclass(frozen=True, slots=True)
class TileLoop:
    """The steps of one worker, and the hooks called around them.

    Position ``step * workers + worker`` of ``order`` is this worker's tile at ``step``.

    Args:
      order: the sequence of tiles; a tile here is what one worker (one CTA, or one cluster of
        CTAs) computes in a step.
      worker: index of this worker; by default the kernel's own.
      workers: how many share ``order``.
      before_tile: called with the tile by the warpgroup that loads operands, before it loads any
        of this tile's; a wait goes here.
      before_k_step: called with the tile and the k step, by the same warpgroup, before each step's
        loads; for a contraction dimension that is itself gathered.
      after_tile: called with the tile by the warpgroup that loads, once the whole tile is in GMEM;
        a signal goes here.
      before_addend: called with the tile by the warpgroup that loads, before it loads what is
        multiplied beside, or before, the reading of the tile's addends by the epilogue.
      look_up: called by every compute warpgroup when the product of a tile begins beside which the
        one before is stored, with both; returns them with what their stores and addends need of
        memory as ``known``. A kernel that stores each tile before the next does not call it.
      look_up_signals: called by the warpgroup that loads, with the tile before and the one that it
        begins; returns them with what ``after_tile`` and ``before_addend`` need of memory.
      sends: tiles may be stored at peers.
      in_turn: a tile's waits may depend on the tile before: that is stored and signalled first.
    """

    order: TileOrder
    worker: jax.Array
    workers: int | jax.Array
    before_tile: Callable[[Tile], None] | None = None
    before_k_step: Callable[[Tile, jax.Array], None] | None = None
    after_tile: Callable[[Tile], None] | None = None
    before_addend: Callable[[Tile], None] | None = None
    look_up: Callable[[Tile, Tile], tuple[Tile, Tile]] | None = None
    look_up_signals: Callable[[Tile, Tile], tuple[Tile, Tile]] | None = None
    sends: bool = False
    in_turn: bool = False

    def run(self, body: Callable[[Tile, Any], Any], carry: Any) -> Any:
        """Folds ``body`` over this worker's tiles; run by every warpgroup that needs them."""
        size, workers = _i32(self.order.size), _i32(self.workers)
        steps = lax.div(size - self.worker + workers - 1, workers)

        def fetch(step: jax.Array) -> Any:
            return self.order.fetch(lax.min(step * workers + self.worker, size - 1))

        def step_body(step: jax.Array, state: Any) -> Any:
            fetched, inner = state
            ahead = fetch(step + 1)
            m, n, chunk = self.order.decode(fetched)
            return ahead, body(Tile(step, m, n, chunk), inner)

        return lax.fori_loop(_i32(0), steps, step_body, (fetch(_i32(0)), carry))[1]


def wait_flag(flags: Any, index: jax.Array | int, at_least: int = 1) -> None:
    """Waits until ``flags[index] >= at_least``, where ``flags`` is an int32 buffer in GMEM.

    The wait is a system-scope acquire, followed by a proxy fence, so that copies by the TMA unit
    which this warpgroup starts afterwards see what was written before the flag was raised.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(ctx: Any, flag: Any) -> None:
        del ctx
        semaphore = mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(flag))
        semaphore.wait(at_least, decrement=False)
        mgpu_utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    wait(flags.at[pl.ds(index, 1)])


def _i32(value: int | jax.Array) -> jax.Array:
    return jnp.asarray(value, jnp.int32)
