"""Tile spaces: the axes a local kernel walks and the tiles it cuts them into."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from syncopate_jax.errors import InputError


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a tile space.

    Attributes:
      name: identifier, unique in its tile space.
      extent: length in elements; need not be a multiple of ``tile``.
      tile: elements of one tile along this axis.
      reduction: walked inside a tile instead of giving tiles of its own.
    """

    name: str
    extent: int
    tile: int
    reduction: bool = False

    def __post_init__(self) -> None:
        if self.extent < 0 or self.tile < 1:
            raise InputError(
                f"axis {self.name}: needs extent >= 0 and tile >= 1, "
                f"found extent {self.extent} and tile {self.tile}"
            )

    @property
    def count(self) -> int:
        """Tiles along this axis, the last one cut by the edge."""
        return -(-self.extent // self.tile)


@dataclass(frozen=True, slots=True)
class TileSpace:
    """Parallel axes, whose product is the tiles, and reduction axes, walked inside each tile.

    Linear tile and step numbers are row-major in the order of ``axes``.
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise InputError(f"tile space: axis names repeat: {names}")

    @property
    def parallel(self) -> tuple[Axis, ...]:
        """The axes that number tiles."""
        return tuple(axis for axis in self.axes if not axis.reduction)

    @property
    def reduction(self) -> tuple[Axis, ...]:
        """The axes that a tile walks."""
        return tuple(axis for axis in self.axes if axis.reduction)

    @property
    def num_tiles(self) -> int:
        """Tiles in all."""
        return int(np.prod([axis.count for axis in self.parallel], dtype=np.int64))

    @property
    def num_steps(self) -> int:
        """Reduction steps inside a tile; 1 when nothing is reduced."""
        return int(np.prod([axis.count for axis in self.reduction], dtype=np.int64))

    def axis(self, name: str) -> Axis:
        """The axis called ``name``; raises InputError when there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        known = ", ".join(axis.name for axis in self.axes)
        raise InputError(f"tile space: no axis {name!r}; its axes are {known}")

    def grid_indices(self) -> dict[str, np.ndarray]:
        """For each axis, its index at every (tile, step): [num_tiles, num_steps] int64."""
        tiles = _unravel([axis.count for axis in self.parallel], self.num_tiles)
        steps = _unravel([axis.count for axis in self.reduction], self.num_steps)
        shape = (self.num_tiles, self.num_steps)
        found = {
            axis.name: np.broadcast_to(index[:, None], shape)
            for axis, index in zip(self.parallel, tiles, strict=True)
        }
        return found | {
            axis.name: np.broadcast_to(index[None, :], shape)
            for axis, index in zip(self.reduction, steps, strict=True)
        }

    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Index along each parallel axis of every tile, in linear order."""
        return tuple(itertools.product(*(range(axis.count) for axis in self.parallel)))


def fewest_workers(tiles: int, most: int) -> int:
    """As few executors of tiles as take no more turns than ``most``: all then end together.

    A multiprocessor that would only idle in the last turn is left out: tiles that are computed at
    the same time stay neighbours, and under a GPU's power limit the others have a higher clock.
    """
    turns = max(-(-tiles // most), 1)
    return max(-(-tiles // turns), 1)


def _unravel(counts: list[int], total: int) -> list[np.ndarray]:
    if not counts:
        return []
    return [np.asarray(index, np.int64) for index in np.unravel_index(np.arange(total), counts)]
