"""What the ``remote_dma`` kernel's text needs: buffers, blocks, and where the tables are.

Everything that differs between ranks is in one int32 vector a rank; a Section says where.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax

Key = tuple[str, str]
LANDING = "landing"


@dataclass(frozen=True, slots=True)
class Section:
    """Part of the vector: rows of ``width`` integers from ``offset`` on."""

    offset: int
    width: int

    def get(self, table: Any, row: Any, column: int) -> Any:
        """Entry ``column`` of ``row``."""
        return table[self.offset + row * self.width + column]


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions by point: those of point i are ``[start[i], start[i + 1])`` of the code."""

    start: Section
    empty: bool

    def bounds(self, table: Any, at: Any) -> tuple[Any, Any]:
        """First and past-last instruction of point ``at``."""
        return self.start.get(table, at, 0), self.start.get(table, at + 1, 0)


@dataclass(frozen=True, slots=True)
class Branch:
    """One kind of instruction: what differs in the program's text."""

    code: int
    src: Key
    dst: Key
    shape: tuple[int, ...]
    remote: bool

    def sides(self, layout: Layout) -> tuple[tuple[Key, int, int], ...]:
        """(buffer, first field of its offsets, number of offsets) of source and destination."""
        sizes = [len(layout.by_key[key].padded) for key in (self.src, self.dst)]
        return (self.src, 4, sizes[0]), (self.dst, 4 + layout.ndim, sizes[1])


@dataclass(frozen=True, slots=True)
class Placed:
    """A buffer with the shape it is given.

    Attributes:
      padded: extents grown to whole blocks (and a leading landing number for landings).
      shape: extents without padding.
      operand: the kernel's operand or result it belongs to, or empty.
    """

    key: Key
    kind: str
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    dtype: Any
    operand: str


@dataclass(frozen=True, slots=True)
class Block:
    """On-chip memory for one block of a communicated operand, squeezed dimensions left out."""

    name: str
    block: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Where an operand's blocks are, by point: a flag or choice, then an offset a dimension."""

    name: str
    keys: tuple[Key, ...]
    sizes: tuple[int | None, ...]
    table: Section

    @property
    def key(self) -> Key:
        return self.keys[0]


@dataclass(slots=True)
class Layout:
    """All that the kernel's text needs; see the attributes' types.

    ``orders``: those in which ranks walk the steps of their tiles, each once; ``reordered``: the
    reduction axes along which one of them is another than the grid's; ``checked``: of which shapes
    and dtypes of all operands the body has been found to bear these orders;
    ``leave_together``: some rank could leave before all have entered; see ``remote_dma``.
    """

    table: np.ndarray
    buffers: list[Placed]
    inputs: dict[str, int]
    bound: frozenset[str]
    results: dict[str, Key]
    blocks: list[Block]
    loads: dict[str, BlockTable]
    stores: dict[str, BlockTable]
    landings: BlockTable | None
    addends: Program
    tile: Section
    step: Section
    step_counts: tuple[int, ...]
    reduction_axes: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    reordered: tuple[int, ...]
    code: Section
    branches: list[Branch]
    before: Program
    epilogue: Program
    after: Program
    end: Program
    num_arrivals: int
    num_sends: int
    ndim: int
    leave_together: bool
    checked: set[Any] = field(default_factory=set)
    by_key: dict[Key, Placed] = field(init=False)

    def __post_init__(self) -> None:
        self.by_key = {b.key: b for b in self.buffers}

    def visits(self, step: Any) -> list[Any]:
        """How often each reduction axis has been advanced at step position ``step``."""
        visits = []
        for count in reversed(self.step_counts):
            visits.append(lax.rem(step, count))
            step = lax.div(step, count)
        return visits[::-1]
