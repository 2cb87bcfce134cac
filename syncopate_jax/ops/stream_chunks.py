"""The chunks in which a streamed operand comes in: their sizes, from how fast it and tiles are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from syncopate_jax.errors import InputError
from syncopate_jax.kernel.tiles import fewest_workers

STEP = 1.003
"""Ends are tried in steps of this factor; up to one step from the best, fewest chunks win."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a host operand comes in and is multiplied: what its chunks are sized by.

    The defaults are of one H200, 8192x4096x14336 in bfloat16, 67 MB streamed over PCIe 5.0
    (``experiments/results/host_stream_h200.json``).

    Attributes:
      link: bytes a second from host memory.
      product: floating-point operations a second of one multiprocessor, while all are busy, of
        operands of two bytes; half of it of four.
      gap: seconds between the end of a chunk's copy and the start of the next.

    Raises:
      InputError: a field has another type or range.
    """

    link: float = 54.4e9
    product: float = 6.34e12
    gap: float = 4.2e-6

    def __post_init__(self) -> None:
        for name, least in (("link", 1.0), ("product", 1.0), ("gap", 0.0)):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and least <= value < math.inf):
                raise InputError(f"Rates: {name} must be finite and >= {least}, found {value!r}")


def chunk_bounds(tiles: int, chunks: int) -> list[int]:
    """Where each chunk starts, in tiles, and the end; sizes differ by at most one."""
    chunks = min(chunks, tiles)
    return [tiles * c // chunks for c in range(chunks + 1)]


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast bands of tiles come in and are computed: what sizes of chunks follow from.

    Attributes:
      bands: bands of tiles along the streamed dimension.
      across: tiles of a band.
      workers: tiles that are computed at a time.
      band: seconds that a band's copy takes.
      tile: seconds that a tile takes.
      gap: seconds between two copies.
    """

    bands: int
    across: int
    workers: int
    band: float
    tile: float
    gap: float

    @classmethod
    def of(
        cls,
        rates: Rates,
        tiles: tuple[int, int],
        tile: tuple[int, int],
        *,
        side: int,
        depth: int,
        itemsize: int,
        sms: int,
        cluster: int = 1,
    ) -> Self:
        """The pace of a product whose operand ``side`` is streamed.

        Args:
          rates: of the link and the product.
          tiles: tiles along m and n.
          tile: elements of a tile along m and n.
          side: 0 for x, 1 for w.
          depth: elements that the product reduces.
          itemsize: bytes of an element of an operand.
          sms: multiprocessors in use; ``cluster`` of them compute a tile together.
        """
        rate = rates.product * cluster * 2 / itemsize
        return cls(
            bands=tiles[side],
            across=tiles[1 - side],
            workers=fewest_workers(math.prod(tiles), max(sms // cluster, 1)),
            band=tile[side] * depth * itemsize / rates.link,
            tile=2 * math.prod(tile) * depth / rate,
            gap=rates.gap,
        )

    def bounds(self) -> list[int]:
        """Where each chunk starts, and the end, so that the last tile is done as soon as may be.

        A chunk that arrives at time a leaves, from its own on, tiles that keep all workers busy for
        a while; whatever came before, the product ends no sooner than their sum. For a given end,
        the chunks are as large as it allows, front to back: they fall towards the end where the
        copy takes longer than the product, grow from a small one where the product does. No chunk
        is smaller than one turn of tiles: it would not be done sooner, and each chunk reads the
        other operand once more.
        """
        copied, computed = self.bands * self.band, self._seconds(self.bands)
        least, most = max(copied, computed), copied + computed + self.gap
        steps = math.ceil(math.log(most / least, STEP))
        found = [self._for(least * STEP**step) for step in range(steps + 1)]
        soon = min(map(self.end, found)) * STEP
        return min((b for b in found if self.end(b) <= soon), key=lambda b: (len(b), self.end(b)))

    @property
    def turn(self) -> Fraction:
        """Bands whose tiles keep all workers busy once."""
        return Fraction(self.workers, self.across)

    def taken(self, chunks: Sequence[int], most: int) -> list[int]:
        """Where each run of bands that is multiplied together starts, and the end.

        A run is what has come in by the time the workers get to it, in whole chunks: one chunk
        where the copy takes longer than the product, ever more where the product does.

        Args:
          chunks: where each chunk that comes in starts, in bands, and the end.
          most: bands of a run of several chunks, at most; as many as fit in the cache.
        """
        came = [end * self.band + chunk * self.gap for chunk, end in enumerate(chunks)]
        bounds, free = [0], 0.0
        for at, lo in enumerate(chunks[:-1]):
            if lo < bounds[-1]:
                continue
            last = at + 1
            while (
                last + 1 < len(chunks) and came[last + 1] <= free and chunks[last + 1] <= lo + most
            ):
                last += 1
            hi = chunks[last]
            spent = (hi - lo) * self.across / self.workers * self.tile
            free = max(free + spent, came[last])
            bounds.append(hi)
        return bounds

    def end(self, bounds: Sequence[int]) -> float:
        """Seconds from the start of the first copy until the last tile is done."""
        return max(
            hi * self.band + chunk * self.gap + self._seconds(self.bands - lo)
            for chunk, (lo, hi) in enumerate(itertools.pairwise(bounds), 1)
        )

    def _for(self, end: float) -> list[int]:
        """The largest chunks with which the last tile is done at ``end``, where that can be."""
        least = max(self.workers // self.across, 1)
        bounds = [0]
        while (left := self.bands - bounds[-1]) > 0:
            arrived = end - self._seconds(left) - len(bounds) * self.gap
            size = max(int(arrived / self.band) - bounds[-1], least)
            if left - size < least:  # what is left is no chunk of its own
                size = left if left < 2 * least or size >= left else left - least
            bounds.append(bounds[-1] + size)
        return bounds

    def _seconds(self, bands: int) -> float:
        """What the tiles of some bands take all workers."""
        return -(-bands * self.across // self.workers) * self.tile
