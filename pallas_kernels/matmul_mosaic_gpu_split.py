"""The last tiles of a Hopper matrix product, divided along K among all multiprocessors.

Tiles that are no multiple of the workers leave some of these idle in the last wave. Here the tiles
that are over are computed first, in pieces: their k steps, one tile after the other, are dealt to
the workers in equal runs. Who has a tile's first k steps completes it: the others hand it their
float32 sums in GMEM.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from syncopate_jax.pallas_kernels import tile_loop_mosaic_gpu as tile_loop

LEAST = 3  # a run is at least a third of a tile: else a tile has too many sums to add


def divided_tiles(tiles: int, workers: int) -> int:
    """How many of ``tiles`` are divided among ``workers``: those that are over, and a wave more
    where these are few; 0 where none are over, or all are too few."""
    over = tiles % workers
    few = over * LEAST < workers
    divided = over + workers if over and few else over
    return divided if divided <= tiles else 0


@dataclasses.dataclass(frozen=True, slots=True)
class First:
    """The first ``size`` tiles of an order."""

    order: tile_loop.TileOrder
    size: int

    def fetch(self, position: jax.Array) -> Any:
        return self.order.fetch(position)

    def decode(self, fetched: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.order.decode(fetched)


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """What one worker has of the divided tiles.

    Args:
      order: of all tiles; the last ``tiles`` of them are divided.
      tiles: as ``divided_tiles`` says.
      k_steps: of a tile.
      worker: the index of this one.
      workers: how many there are.
      sums: GMEM ref, float32 [workers * tile_m, tile_n]; what a worker hands over.
      ready: semaphores, one for each worker and warpgroup: raised once that sum is there.
    """

    order: tile_loop.TileOrder
    tiles: int
    k_steps: int
    worker: jax.Array
    workers: int
    sums: Any
    ready: Any

    @property
    def pieces(self) -> int:
        """Tiles that a run covers, at most."""
        return self.tiles // self.workers + 2

    def begin(self, worker: jax.Array) -> jax.Array:
        """The first k step of a worker's run, counted over all divided tiles."""
        return lax.div(worker * (self.tiles * self.k_steps), jnp.int32(self.workers))

    def piece(self, index: jax.Array) -> tuple[tile_loop.Tile, jax.Array, jax.Array]:
        """The run's part in a tile, from its first on: that tile, from k step, to k step."""
        begin, end = self.begin(self.worker), self.begin(self.worker + 1)
        at = self._tile(index)
        zero = jnp.int32(0)
        first = lax.max(begin - at * self.k_steps, zero)
        last = lax.max(lax.min(end - at * self.k_steps, jnp.int32(self.k_steps)), zero)
        known = lax.min(at, jnp.int32(self.tiles - 1))
        position = jnp.int32(self.order.size - self.tiles) + known
        m, n, chunk = self.order.decode(self.order.fetch(position))
        return tile_loop.Tile(zero, m, n, chunk), first, last

    def sharers(self, index: jax.Array) -> jax.Array:
        """How many workers after this one have the rest of a tile that it completes."""
        end = (self._tile(index) + 1) * self.k_steps
        most = -(-self.workers // self.tiles) + 1
        inside = (self.begin(self.worker + n) < end for n in range(1, most + 1))
        return sum((one.astype(jnp.int32) for one in inside), jnp.int32(0))

    def _tile(self, index: jax.Array) -> jax.Array:
        return lax.div(self.begin(self.worker), jnp.int32(self.k_steps)) + index
