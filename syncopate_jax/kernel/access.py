"""Which box of an operand each tile reads or writes at each reduction step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.kernel.tiles import TileSpace


@dataclass(frozen=True, slots=True)
class Access:
    """How tiles touch one operand whose dimensions follow tile-space axes.

    Attributes:
      operand: name of the operand.
      shape: its extents, in elements.
      dims: per dimension the axis whose tiles cut it, or None where every tile takes it whole.
      write: the tile writes it (else reads it).
    """

    operand: str
    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    write: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.dims):
            raise InputError(
                f"access to {self.operand}: shape {self.shape} and dims {self.dims} "
                f"differ in length"
            )

    def boxes(self, space: TileSpace) -> tuple[np.ndarray, np.ndarray]:
        """``lo`` and ``hi`` of the box at every (tile, step): int64 [tiles, steps, dims]."""
        index = space.grid_indices()
        shape = (space.num_tiles, space.num_steps, len(self.shape))
        lo, hi = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for d, (extent, name) in enumerate(zip(self.shape, self.dims, strict=True)):
            if name is None:
                hi[..., d] = extent
                continue
            tile = space.axis(name).tile
            lo[..., d] = np.minimum(index[name] * tile, extent)
            hi[..., d] = np.minimum(lo[..., d] + tile, extent)
        return lo, hi


@dataclass(frozen=True, slots=True, eq=False)
class BoxAccess:
    """How tiles touch one operand, box by box: for index maps that follow no single axis.

    Attributes:
      lo, hi: int64 [tiles, steps, dims], in elements of the operand.
    """

    operand: str
    shape: tuple[int, ...]
    lo: np.ndarray
    hi: np.ndarray
    write: bool = False

    def boxes(self, space: TileSpace) -> tuple[np.ndarray, np.ndarray]:
        """``lo`` and ``hi`` at every (tile, step) of ``space``, else raises InputError."""
        wanted = (space.num_tiles, space.num_steps, len(self.shape))
        if self.lo.shape != wanted or self.hi.shape != wanted:
            raise InputError(
                f"access to {self.operand}: boxes have shapes {self.lo.shape} and "
                f"{self.hi.shape}, the tile space needs {wanted}"
            )
        return self.lo, self.hi


AnyAccess = Access | BoxAccess
