"""One int32 vector a rank with everything that differs between ranks, in sections of rows.

A kernel's text is the same on every rank; it reads what is not from its rank's vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental import pallas as pl

Array = np.ndarray


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
    """

    start: Section
    rows: Section
    empty: bool
    each: int | None = None
    most: int = 0

    def bounds(self, table: Any, point: Any) -> tuple[Any, Any]:
        """First and past-last row of a point; not read from the table where points are alike."""
        if self.each is not None:
            return point * self.each, point * self.each + self.each
        return self.start.get(table, point), self.start.get(table, point + 1)


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
        self._parts.append(np.asarray(rows, np.int32).reshape(self.ranks, -1))
        self._length += self._parts[-1].shape[1]
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
