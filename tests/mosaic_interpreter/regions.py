"""The part of a buffer that a reference with its transforms names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.state import indexing
from jax._src.state import types as state_types

from tests.mosaic_interpreter.views import Box

# How a buffer is laid out, not what is in it; buffers are kept as the program sees them.
LAYOUT = (gpu_core.UnswizzleRef, gpu_core.UntilingTransform, gpu_core.ExtractAliasedRef)


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a buffer, seen through a permutation of some of its axes.

    Attributes:
      shape: of the buffer.
      starts, sizes: per axis of the buffer.
      kept: axes of the buffer in the order seen; the others have size 1.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    kept: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], transforms: Sequence[Any]) -> Region:
        """The region that ``transforms``, outermost last, name of a buffer."""
        starts, sizes, kept = [0] * len(shape), list(shape), list(range(len(shape)))
        for transform in transforms:
            if isinstance(transform, LAYOUT):
                continue
            if isinstance(transform, state_types.TransposeTransform):
                kept = [kept[axis] for axis in transform.permutation]
                continue
            if not isinstance(transform, indexing.NDIndexer):
                raise NotImplementedError(f"a reference is seen through {transform}")
            dropped = set()
            for axis, index in zip(kept, transform.indices, strict=True):
                if not isinstance(index, indexing.Slice):
                    starts[axis] += int(index)
                    sizes[axis] = 1
                    dropped.add(axis)
                    continue
                if int(index.stride) != 1:
                    raise NotImplementedError(f"a reference is sliced with stride {index.stride}")
                starts[axis] += int(index.start)
                sizes[axis] = int(index.size)
            kept = [axis for axis in kept if axis not in dropped]
        return cls(tuple(shape), tuple(starts), tuple(sizes), tuple(kept))

    @property
    def box(self) -> Box:
        """The part inside the buffer."""
        found = zip(self.starts, self.sizes, self.shape, strict=True)
        return tuple((max(lo, 0), min(lo + size, n)) for lo, size, n in found)

    @property
    def inside(self) -> bool:
        """Whether all of it is inside the buffer."""
        found = zip(self.starts, self.sizes, self.shape, strict=True)
        return all(lo >= 0 and lo + size <= n for lo, size, n in found)

    @property
    def empty(self) -> bool:
        return any(lo >= hi for lo, hi in self.box)

    def read(self, array: np.ndarray) -> np.ndarray:
        """The values; zeros for what is outside, as the copy unit has it."""
        full = np.zeros(self.sizes, _bits(array.dtype))
        if not self.empty:
            full[self._within()] = array.view(full.dtype)[self._slices()]
        seen = np.transpose(full, self._order()).reshape([self.sizes[axis] for axis in self.kept])
        return seen.copy(order="C").view(array.dtype)

    def write(self, array: np.ndarray, value: np.ndarray) -> None:
        """Stores what is inside."""
        order = self._order()
        bits = np.ascontiguousarray(value, array.dtype).view(_bits(array.dtype))
        spread = bits.reshape([self.sizes[axis] for axis in order])
        if not self.empty:
            full = np.transpose(spread, np.argsort(order))
            array.view(bits.dtype)[self._slices()] = full[self._within()]

    def _order(self) -> list[int]:
        return [*self.kept, *(axis for axis in range(len(self.shape)) if axis not in self.kept)]

    def _slices(self) -> tuple[slice, ...]:
        return tuple(slice(lo, hi) for lo, hi in self.box)

    def _within(self) -> tuple[slice, ...]:
        found = zip(self.box, self.starts, strict=True)
        return tuple(slice(lo - start, hi - start) for (lo, hi), start in found)


def _bits(dtype: np.dtype) -> np.dtype:
    """Integers as wide as the elements: NumPy moves those fast, bfloat16 one by one."""
    return np.dtype(f"u{dtype.itemsize}")
