"""One int32 vector a rank with everything that differs between ranks, in sections of rows.

A kernel's text is the same on every rank; it reads what is not from its rank's vector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from syncopate_jax.errors import UnsupportedError

Array = np.ndarray
Get = Callable[[int], Any]
"""A row's entry in a column."""
MOST_AHEAD = 2  # rows of a point that are read ahead: registers hold them meanwhile


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of ``width`` integers from ``offset`` of the vector on.

    Attributes:
      multiples: per column the greatest common divisor of its entries on all ranks; 0 if all are 0.
      constants: per column the value that its entries have on all ranks, or None if they differ.
    """

    offset: int
    width: int
    multiples: tuple[int, ...]
    constants: tuple[int | None, ...]

    def get(self, table: Any, row: Any, column: int = 0) -> Any:
        """Entry ``column`` of ``row``, known to be a multiple of the column's divisor."""
        constant, multiple = self.constants[column], self.multiples[column]
        if constant is not None:
            return constant
        value = table[self.offset + row * self.width + column]
        return pl.multiple_of(value, multiple) if multiple > 1 else value


@dataclass(frozen=True, slots=True)
class Lists:
    """A list of rows at every point: those of point i are ``start[i]`` to ``start[i + 1]``.

    Attributes:
      empty: no rank has any row, so the kernel needs no code for it.
      each: how many rows every point of every rank has, or None if that differs.
      most: how many rows any point has.
      counts: how many each has, and
      short: the rows once more, ``most`` places a point: all of a point can be read at once. None
        where ``TableMaker.shortened`` has not made them.
    """

    start: Section
    rows: Section
    empty: bool
    each: int | None = None
    most: int = 0
    counts: Section | None = None
    short: Section | None = None

    def bounds(self, table: Any, point: Any) -> tuple[Any, Any]:
        """First and past-last row of a point; not read from the table where points are alike."""
        if self.each is not None:
            return point * self.each, point * self.each + self.each
        return self.start.get(table, point), self.start.get(table, point + 1)

    def ahead(self, table: Any, point: Any) -> Ahead | None:
        """Reads a point's rows some time before they are visited; None where that cannot be."""
        if self.short is None:
            return None
        rows = [
            [
                self.short.get(table, point * self.most + number, column)
                for column in range(self.short.width)
            ]
            for number in range(self.most)
        ]
        count = None if self.counts is None else self.counts.get(table, point)
        return Ahead(count, tuple(row.__getitem__ for row in rows))

    def visit(
        self,
        table: Any,
        point: Any,
        do: Callable[[Get], None],
        *,
        known: Ahead | None = None,
        unrolled: bool = True,
    ) -> None:
        """Calls ``do`` with every row of a point.

        Args:
          known: what ``ahead`` has read of the point.
          unrolled: a text for each row where their number is the same at all points.
        """
        if known is not None:
            for number, row in enumerate(known.rows):
                if known.count is None:
                    do(row)
                else:
                    pl.when(number < known.count)(functools.partial(do, row))
            return

        def one(i: Any) -> None:
            do(functools.partial(self.rows.get, table, i))

        lo, hi = self.bounds(table, point)
        if self.each is not None and (unrolled or self.each == 1):
            for number in range(self.each):
                one(lo + number)
            return

        def body(i: jax.Array, _: None) -> None:
            one(i)

        lax.fori_loop(lo, hi, body, None)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A point's rows, read ahead.

    Attributes:
      count: how many of them there are, or None: all.
    """

    count: Any
    rows: tuple[Get, ...]


def as_int32(rows: Array) -> Array:
    """The rows as a table holds them; raises UnsupportedError where an entry is past 32 bits."""
    kept = np.asarray(rows, np.int32)
    past = np.asarray(rows)[kept != rows]
    if past.size:
        raise UnsupportedError(
            f"a table's entries are of 32 bits, and an address or count of this launch is "
            f"{past.flat[0]}: use smaller shards"
        )
    return kept


class TableMaker:
    """Appends sections; ``table`` is what they make up.

    Attributes:
      ranks: rows of the table.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self._parts: list[Array] = []
        self._length = 0

    @property
    def table(self) -> Array:
        """int32 [ranks, length]."""
        parts = self._parts or [np.zeros((self.ranks, 1), np.int32)]
        return np.concatenate(parts, axis=1)

    def section(self, rows: Array, used: Sequence[int] | None = None) -> Section:
        """Appends [ranks, rows, width], of which each rank's first ``used`` are ever read."""
        flat = np.abs(rows).reshape(-1, rows.shape[-1])
        divisors = np.gcd.reduce(flat, axis=0)
        read = rows.reshape(flat.shape)
        if used is not None:
            read = np.concatenate([rows[rank, :n] for rank, n in enumerate(used)])
        first = [*read[:1].tolist(), [0] * rows.shape[-1]][0]
        alike = np.all(read == np.asarray(first), axis=0)
        constants = tuple(int(n) if same else None for n, same in zip(first, alike, strict=True))
        section = Section(self._length, rows.shape[-1], tuple(divisors.tolist()), constants)
        self._append(rows)
        return section

    def lists(self, points: Sequence[Sequence[Sequence[Sequence[int]]]], width: int) -> Lists:
        """Appends ``points[rank][point]``, each a list of rows of ``width`` integers."""
        start = [np.cumsum([0, *map(len, one)]) for one in points]
        flat = [[row for rows in one for row in rows] for one in points]
        longest = max((len(rows) for rows in flat), default=0)
        values = np.zeros((self.ranks, max(longest, 1), width), np.int64)
        for rank, rows in enumerate(flat):
            if rows:
                values[rank, : len(rows)] = rows
        starts = self.section(np.stack(start)[..., None])
        counts = {len(rows) for one in points for rows in one}
        each = next(iter(counts)) if len(counts) == 1 else None
        section = self.section(values, [len(rows) for rows in flat])
        most = max((len(rows) for one in points for rows in one), default=0)
        return Lists(starts, section, longest == 0, each, most)

    def shortened(self, lists: Lists) -> Lists:
        """The lists as they can be read ahead, if no point has more than a few rows."""
        if lists.empty or lists.most > MOST_AHEAD:
            return lists
        if lists.each is not None:
            return replace(lists, short=lists.rows)
        table, rows = self.table, lists.rows
        start = table[:, lists.start.offset : rows.offset]
        at = start[:, :-1, None] + np.arange(lists.most)
        at = np.minimum(at, start.max() - 1).reshape(self.ranks, -1)
        values = table[:, rows.offset :][:, : start.max() * rows.width]
        values = values.reshape(self.ranks, -1, rows.width)
        counts = self.section(np.diff(start)[..., None])
        short = replace(rows, offset=self._length)
        self._append(np.take_along_axis(values, at[..., None], axis=1))
        return replace(lists, counts=counts, short=short)

    def _append(self, rows: Array) -> None:
        self._parts.append(as_int32(rows).reshape(self.ranks, -1))
        self._length += self._parts[-1].shape[1]
