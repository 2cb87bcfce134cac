"""Boxes and chunks: which part of which logical tensor."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from syncopate_jax.errors import InputError

_BOX = re.compile(r"\[\s*(?:\d+:\d+\s*(?:,\s*\d+:\d+\s*)*)?\]")


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Half-open N-D interval ``lo <= p < hi`` in a logical tensor's coordinates, in elements."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi):
            raise InputError(f"box: lo has {len(self.lo)} dimensions, hi has {len(self.hi)}")
        if any(a < 0 or b < a for a, b in zip(self.lo, self.hi, strict=True)):
            raise InputError(f"box: needs 0 <= lo <= hi, found lo={self.lo} hi={self.hi}")

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Box:
        """The box that covers a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def parse(cls, text: str) -> Box:
        """The box written as ``[0:4,8:16]``; raises InputError when it is not one."""
        if not _BOX.fullmatch(text.strip()):
            raise InputError(f"box: {text!r} is not of the form [lo:hi,…]")
        pairs = [tuple(map(int, part.split(":"))) for part in text.strip()[1:-1].split(",") if part]
        return cls(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.lo)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, in elements."""
        return tuple(b - a for a, b in zip(self.lo, self.hi, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index for a NumPy array that holds the whole tensor."""
        return tuple(slice(a, b) for a, b in zip(self.lo, self.hi, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when it is empty."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, hi) if all(a < b for a, b in zip(lo, hi, strict=True)) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` lies in this box (an empty box lies in any)."""
        return other.size == 0 or self.intersect(other) == other

    def shift(self, offset: tuple[int, ...]) -> Box:
        """This box moved by ``offset`` elements in each dimension."""
        return Box(
            tuple(a + o for a, o in zip(self.lo, offset, strict=True)),
            tuple(b + o for b, o in zip(self.hi, offset, strict=True)),
        )

    def with_axis(self, axis: int, lo: int, hi: int) -> Box:
        """This box with its interval along ``axis`` replaced by ``lo:hi``."""
        return Box(
            (*self.lo[:axis], lo, *self.lo[axis + 1 :]),
            (*self.hi[:axis], hi, *self.hi[axis + 1 :]),
        )

    def split(self, axis: int, parts: int) -> tuple[Box, ...]:
        """``parts`` boxes along ``axis``, as equal as can be, the larger ones first."""
        bounds = split_points(self.hi[axis] - self.lo[axis], parts)
        base = self.lo[axis]
        return tuple(
            self.with_axis(axis, base + a, base + b) for a, b in itertools.pairwise(bounds)
        )

    def __str__(self) -> str:
        return "[" + ",".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True)) + "]"


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """A box of one tensor, moved as one unit (paper section 5.1)."""

    tensor: str
    box: Box

    def meets(self, other: Chunk) -> bool:
        """Whether the two have an element in common."""
        return self.tensor == other.tensor and self.box.intersect(other.box) is not None

    def __str__(self) -> str:
        return f"{self.tensor}{self.box}"


def split_points(extent: int, parts: int) -> tuple[int, ...]:
    """``parts + 1`` bounds that cut ``extent`` as equally as can be, larger pieces first.

    Pieces may be empty when ``parts > extent``. Raises InputError when ``parts < 1``.
    """
    if parts < 1:
        raise InputError(f"cannot cut an extent of {extent} into {parts} parts; needs at least 1")
    size, rest = divmod(extent, parts)
    return tuple(i * size + min(i, rest) for i in range(parts + 1))
