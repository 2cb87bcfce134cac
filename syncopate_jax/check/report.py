"""Collecting findings, and naming rows, boxes and places of a plan in their messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from syncopate_jax.errors import Finding
from syncopate_jax.ir.plan import Plan

SHOWN = 100
"""Findings listed for one kind of fault; the rest are counted, so that a report stays readable."""


class Report:
    """The findings about one plan, in the order in which they are made."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.findings: list[Finding] = []

    def add(self, code: str, rank: int, index: int, message: str) -> None:
        """A finding at operation ``index`` of ``rank`` (-1 where there is none)."""
        self.findings.append(Finding(code, rank, index, message))

    def rows(self, code: str, rows: np.ndarray, text: Callable[[int], str]) -> None:
        """A finding for each row of the columns, its message given by ``text(row)``."""
        for row in rows[:SHOWN].tolist():
            self.add(code, *self.place(row), text(row))
        self.more(code, len(rows), "operations")

    def more(self, code: str, count: int, what: str) -> None:
        """Counts the findings beyond those that are listed."""
        if count > SHOWN:
            self.add(code, -1, -1, f"and {count - SHOWN} more {what} like the ones above")

    def place(self, row: int) -> tuple[int, int]:
        """Rank and index of a row."""
        rank = self.plan.columns.rank
        return int(rank[row]), int(row - np.searchsorted(rank, rank[row]))

    def name(self, row: int) -> str:
        """A row as ``r<rank>.<index>``, the way dependencies are written."""
        rank, index = self.place(row)
        return f"r{rank}.{index}"

    def box(self, tensor: int, lo: np.ndarray, hi: np.ndarray) -> str:
        """A box of a tensor, whatever its numbers; padding that is as it should be is left out."""
        found = self.plan.tensors[tensor]
        used = len(found.shape)
        if np.any(lo[used:] != 0) or np.any(hi[used:] != 1):
            used = len(lo)
        pairs = zip(lo[:used].tolist(), hi[:used].tolist(), strict=True)
        return f"{found.name}[{','.join(f'{a}:{b}' for a, b in pairs)}]"

    def side(self, row: int, side: str) -> str:
        """The ``src`` or ``dst`` chunk of a row."""
        c = self.plan.columns
        lo, hi = getattr(c, f"{side}_lo")[row], getattr(c, f"{side}_hi")[row]
        return self.box(int(getattr(c, f"{side}_tensor")[row]), lo, hi)
