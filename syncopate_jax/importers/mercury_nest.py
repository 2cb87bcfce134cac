"""A loop nest with communication points: what both forms of Mercury's programs are read into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoopAxis:
    """Extent of a loop on one rank, in elements, and of the block of one iteration."""

    size: int
    block: int

    @property
    def blocks(self) -> int:
        """Iterations."""
        return -(-self.size // self.block)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor as one rank holds it.

    Attributes:
      shape: extents on one rank.
      axes: the loop axes that index each dimension.
      specs: the mesh dimensions that shard each dimension, the slowest first.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    specs: tuple[tuple[int, ...], ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Point:
    """One communication.

    Attributes:
      kind: ``ring``, ``double_ring``, or a collective.
      axis, to_axis: loop axis of the dimension that is gathered or scattered, and of the one that
        an all-to-all cuts.
      mesh_dims: over which, the innermost ring's first.
      enclosing: axes of the loops around it, the outermost first.
      op: what a reduction combines with, or empty.
      ring: whether a reduce-scatter goes around a ring.
      where: line or field, for messages.
    """

    kind: str
    buffer: str
    axis: str
    to_axis: str
    mesh_dims: tuple[int, ...]
    enclosing: tuple[str, ...]
    op: str
    ring: bool
    where: str


@dataclass(frozen=True, slots=True)
class Nest:
    """A program: its mesh (extents, and devices row-major), axes, buffers, and communication."""

    name: str
    mesh: tuple[int, ...]
    devices: tuple[int, ...]
    axes: Mapping[str, LoopAxis]
    buffers: Mapping[str, Buffer]
    points: tuple[Point, ...]
    loops: str
