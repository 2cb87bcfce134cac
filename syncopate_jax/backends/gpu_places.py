"""What a fused GPU kernel's loop is told: which tile is next, and where its blocks lie."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from syncopate_jax.backends import gpu_peers
from syncopate_jax.backends.gpu_buffers import Key
from syncopate_jax.backends.gpu_layout import Layout
from syncopate_jax.backends.gpu_peers import Peers
from syncopate_jax.backends.interface import Work
from syncopate_jax.backends.rank_table import Ahead, Get
from syncopate_jax.kernel.loop import Use

LOCAL = "local"
"""The kind of a buffer that the plan does not move."""


@dataclass(frozen=True, slots=True)
class Row:
    """The rank's row of the table."""

    ref: Any
    row: Any

    def __getitem__(self, at: Any) -> Any:
        return self.ref[self.row, at]


@dataclass(frozen=True, slots=True)
class Known:
    """What has been read of the table ahead: of a tile that is stored, or of one that is begun."""

    stores: Ahead | None = None
    signals: Ahead | None = None
    waits: Ahead | None = None
    addends: Ahead | None = None


@dataclass(frozen=True, slots=True)
class TableOrder:
    """The schedule's order; a tile's chunk is its position."""

    layout: Layout
    table: Any
    size: int

    def fetch(self, position: Any) -> Any:
        return position, *(self.layout.order.get(self.table, position, i) for i in (0, 1))

    def decode(self, fetched: Any) -> tuple[Any, Any, Any]:
        position, m, n = fetched
        return m, n, position


@dataclass(frozen=True, slots=True)
class Places:
    """Where blocks are; see ``kernel.loop.Places``.

    Attributes:
      direct: tiles are stored by loads and stores of the threads.
      own_only: tiles are stored in the rank's own memory; others bring them to peers.
    """

    work: Work
    layout: Layout
    table: Row
    peers: Peers
    direct: bool
    own_only: bool

    @property
    def has_addends(self) -> bool:
        return self.layout.addend_key is not None

    @property
    def single_addends(self) -> bool:
        return self.layout.addends.most <= 1

    def shape(self, operand: str) -> tuple[int, ...]:
        access = self.work.accesses.get(operand)
        if access is not None:
            return access.shape
        return self.peers.placed[operand, LOCAL].shape

    def dtype(self, operand: str) -> Any:
        key = self.layout.addend_key
        if key is not None and operand in self.work.kernel.results:
            return self.peers.placed[key].dtype
        if operand in self.layout.reads:
            return self.peers.placed[self.layout.reads[operand].own].dtype
        return self.peers.placed[operand, LOCAL].dtype

    def step(self, position: Any) -> list[Any]:
        kernel, section = self.work.kernel, self.layout.steps
        axes = kernel.reduction_axes
        if section is not None:
            return [section.get(self.table, position, i) for i in range(len(axes))]
        found = []
        for axis in reversed(axes):
            count = kernel.grid[axis]
            outermost = axis == axes[0]
            found.append(position if outermost else lax.rem(position, jnp.int32(count)))
            position = position if outermost else lax.div(position, jnp.int32(count))
        return found[::-1]

    def read(self, operand: str, starts: Sequence[Any], tile: Any, step: Any, use: Use) -> None:
        read = self.layout.reads.get(operand)
        if read is None:
            self.peers.own((operand, LOCAL), starts, use)
            return
        get = functools.partial(read.region.get, self.table)

        def shifted(row: int) -> list[Any]:
            return [start + get(row, d) for d, start in enumerate(starts)]

        if not read.dims:
            self.peers.own(read.own, shifted(2), use)
            return
        inside = jnp.bool_(True)
        for d in read.dims:
            inside &= (starts[d] >= get(0, d)) & (starts[d] < get(1, d))
        pl.when(inside)(lambda: self.peers.own(read.own, shifted(2), use))

        @pl.when(jnp.logical_not(inside))
        def _() -> None:
            if read.peer is None:
                self.peers.own(read.other, shifted(3), use)
                return
            at = step if read.peer_by_step else tile.chunk
            where = functools.partial(read.peer.get, self.table, at)
            away = [start + where(1 + d) for d, start in enumerate(starts)]
            self.peers.far(read.other, where(0), away, use)

    def write(self, result: str, starts: Sequence[Any], tile: Any, use: Use) -> None:
        layout, table = self.layout, self.table
        if not layout.store_keys:
            self.peers.own((result, LOCAL), starts, use)
            return

        def one(get: Get) -> None:
            def store(number: int) -> None:
                key = layout.store_keys[number]
                at = [get(2 + d) for d in range(len(layout.by_key[key].shape))]
                self._store(key, get(1), at, use)

            gpu_peers.choose(len(layout.store_keys), get(0), store)

        known = tile.known and tile.known.stores
        layout.stores.visit(table, tile.chunk, one, known=known, unrolled=False)

    def _store(self, key: Key, rank: Any, starts: Sequence[Any], use: Use) -> None:
        if self.own_only:
            self.peers.own(key, starts, use)
        else:
            self.peers.far(key, rank, starts, use, copied=not self.direct)

    def addends(self, tile: Any) -> tuple[Any, Any]:
        layout, table = self.layout, self.table
        key = layout.addend_key or ("", "")

        def use_row(get: Get, use: Use) -> None:
            starts = [get(d) for d in range(len(layout.by_key[key].shape))]
            self.peers.own(key, starts, use)

        known = tile.known and tile.known.addends
        if known is not None and self.single_addends:
            (row,) = known.rows
            return 1 if known.count is None else known.count, lambda _, use: use_row(row, use)
        lo, hi = layout.addends.bounds(table, tile.chunk)

        def at(i: Any, use: Use) -> None:
            use_row(functools.partial(layout.addends.rows.get, table, lo + i), use)

        return hi - lo, at
