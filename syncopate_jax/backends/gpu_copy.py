"""CTAs that only communicate: each of their warpgroups copies its part of every operation.

A chunk is cut into pieces of one shape; the last one along a dimension is moved back to end where
the chunk ends, and writes some elements a second time with the same values. Warpgroup i of n takes
pieces i, i + n, …, waits until all of them have landed, and raises the operation's signals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from syncopate_jax.backends import gpu_peers
from syncopate_jax.backends.gpu_buffers import Key
from syncopate_jax.backends.gpu_layout import Layout, Move
from syncopate_jax.backends.gpu_peers import Peers
from syncopate_jax.backends.gpu_signals import Signals
from syncopate_jax.kernel.loop import Use

Piece = tuple[int, ...]
"""Rows and columns of a piece, and what else its mover has chosen."""
Side = Callable[[Any, Use], None]
"""``side(piece, use)``: calls ``use`` with the place of a piece of the chunk, by its number."""


class Mover(Protocol):
    """How warpgroups copy pieces.

    Attributes:
      copied: the copy unit moves them, so a peer's buffer needs a branch of its own.
    """

    @property
    def copied(self) -> bool: ...

    def pieces(self, layout: Layout) -> dict[Any, Piece]:
        """The piece of every dtype; raises UnsupportedError where it has none."""
        ...

    def scratch(self, layout: Layout, warpgroups: int) -> dict[str, Any]:
        """Shared memory and barriers of a CTA, by name."""
        ...

    def run(
        self, scratch: dict[str, Any], warpgroup: Any, part: Part, piece: Piece, dtype: Any
    ) -> None:
        """Copies a part of a chunk; it has landed when this returns."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Pieces first, first + stride, … below count, of a chunk."""

    first: Any
    stride: Any
    count: int
    src: Side
    dst: Side

    @property
    def steps(self) -> Any:
        """How many pieces this is."""
        return lax.div(lax.max(self.count - self.first + self.stride - 1, 0), self.stride)


@dataclass(frozen=True, slots=True)
class Copier:
    """One warpgroup's part of its rank's operations.

    Attributes:
      scratch: the mover's, by name.
      warpgroup: number in the CTA.
      number: of this warpgroup among the rank's that copy.
      copiers: how many those are.
    """

    layout: Layout
    table: Any
    peers: Peers
    signals: Signals
    mover: Mover
    scratch: dict[str, Any]
    warpgroup: Any
    number: Any
    copiers: int

    def run(self) -> None:
        """All operations of this warpgroup's channel, in order."""
        layout, table = self.layout, self.table
        channels = jnp.int32(layout.channels)
        channel, first = lax.rem(self.number, channels), lax.div(self.number, channels)
        stride = lax.div(jnp.int32(self.copiers) - channel + channels - 1, channels)
        pieces = self.mover.pieces(layout)

        def one(op: jax.Array, _: None) -> None:
            self.signals.wait_all(table, layout.op_waits, op)
            kind = layout.ops.get(table, op, 0)
            gpu_peers.choose(
                len(layout.moves),
                kind,
                lambda i: self._copy(layout.moves[i], op, first, stride, pieces),
            )
            self.signals.signal_all(table, layout.op_signals, op)

        lo = layout.programs.get(table, channel)
        hi = layout.programs.get(table, channel + 1)
        lax.fori_loop(lo, hi, one, None)

    def _copy(self, move: Move, op: Any, first: Any, stride: Any, pieces: dict[Any, Piece]) -> None:
        if 0 in move.shape:
            return
        layout, table = self.layout, self.table
        dtype = layout.by_key[move.src].dtype
        piece = pieces[dtype]
        peer = layout.ops.get(table, op, 1)
        width = (layout.ops.width - 2) // 2
        corners = [
            [layout.ops.get(table, op, column + d) for d in range(len(layout.by_key[key].shape))]
            for key, column in ((move.src, 2), (move.dst, 2 + width))
        ]
        grid = Grid.of(move.shape, layout.by_key[move.src].cut, piece)

        def side(key: Key, corner: Sequence[Any], far: bool) -> Side:
            def at(number: Any, use: Use) -> None:
                offsets = grid.offsets(number)
                extra = len(corner) - len(offsets)
                starts = [*corner[:extra]]
                starts += [a + b for a, b in zip(corner[extra:], offsets, strict=True)]
                if far:
                    self.peers.far(key, peer, starts, use, copied=self.mover.copied)
                else:
                    self.peers.own(key, starts, use)

            return at

        src = side(move.src, corners[0], move.pull)
        dst = side(move.dst, corners[1], not move.pull)
        part = Part(first, stride, grid.count, src, dst)
        self.mover.run(self.scratch, self.warpgroup, part, piece, dtype)


@dataclass(frozen=True, slots=True)
class Grid:
    """The pieces of a chunk: how many along each dimension, and how large they are there."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], cut: tuple[int, int], piece: Piece) -> Grid:
        sizes = [1] * len(shape)
        sizes[cut[0]], sizes[cut[1]] = piece[:2]
        return cls(shape, tuple(sizes))

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-n // size) for n, size in zip(self.shape, self.sizes, strict=True))

    @property
    def count(self) -> int:
        """Pieces of the chunk."""
        return math.prod(self.counts)

    def offsets(self, number: Any) -> list[Any]:
        """Where a piece starts in the chunk."""
        found = []
        for n, size, count in zip(
            reversed(self.shape), reversed(self.sizes), reversed(self.counts), strict=True
        ):
            if count == 1:
                found.append(jnp.int32(0))
                continue
            at = lax.rem(number, jnp.int32(count))
            number = lax.div(number, jnp.int32(count))
            found.append(lax.min(at * size, jnp.int32(n - size)))
        return found[::-1]


def common_pieces(
    layout: Layout, most: Callable[[Any], Piece], unit: Callable[[Any], int]
) -> dict[Any, Piece]:
    """One piece shape a dtype, no larger than any chunk; columns are a multiple of ``unit``."""
    found: dict[Any, Piece] = {}
    for move in layout.moves:
        buffer = layout.by_key[move.src]
        rows, columns = (move.shape[d] for d in buffer.cut)
        if 0 in move.shape:
            continue
        before = found.get(buffer.dtype, most(buffer.dtype))
        columns = max(columns // unit(buffer.dtype), 1) * unit(buffer.dtype)
        found[buffer.dtype] = min(before[0], rows), min(before[1], columns)
    return found
