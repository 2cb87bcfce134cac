"""Instructions of the ``remote_dma`` kernel as rows of integers.

A row is: branch (what the program's text distinguishes), arrival semaphore, send semaphore, peer,
then the offsets of source and destination.
"""

from __future__ import annotations

import numpy as np

from syncopate_jax.backends.buffers import Buffers
from syncopate_jax.backends.dma_layout import LANDING, Branch
from syncopate_jax.ir.schedule import Schedule


class Coder:
    """Turns (code, row) into fields; rows past the plan's are copies of a rank's own data."""

    def __init__(self, schedule: Schedule, places: Buffers, ndim: int):
        self.schedule, self.places, self.ndim = schedule, places, ndim
        plan = schedule.plan
        columns = plan.columns
        self.columns = columns
        self.branches: list[Branch] = []
        self.code: list[list[list[int]]] = [[] for _ in range(plan.num_ranks)]
        self._starts: dict[str, list[list[int]]] = {}
        self.read = [key[0] for key in places.items if key[1] == "input"]
        self.arrival = _number(columns.dst_rank, plan.num_ranks)
        self.send = _number(columns.rank, plan.num_ranks)
        arrivals = np.bincount(columns.dst_rank, minlength=plan.num_ranks).max(initial=0)
        self.first_fill = int(arrivals)
        self.num_arrivals = max(self.first_fill + len(self.read), 1)
        self.num_sends = max(int(np.bincount(columns.rank, minlength=1).max(initial=0)), 1)

    def fills(self, rank: int) -> list[int]:
        """Pseudo rows for tensors whose own data must move from the input into place."""
        out = []
        for i, tensor in enumerate(self.read):
            lo, hi = self._fill_box(rank, tensor)
            if np.all(lo < hi):
                out.append(self.columns.n + i)
        return out

    def _fill_box(self, rank: int, tensor: str) -> tuple[np.ndarray, np.ndarray]:
        items = self.places.items
        own, held = items[tensor, "input"], items[tensor, "gathered"]
        return np.maximum(own.lo[rank], held.lo[rank]), np.minimum(own.hi[rank], held.hi[rank])

    def add(self, rank: int, name: str, points: list[list[tuple[int, int]]]) -> None:
        starts = []
        for point in points:
            starts.append(len(self.code[rank]))
            self.code[rank] += [self._encode(rank, *instruction) for instruction in point]
        self._starts.setdefault(name, []).append([*starts, len(self.code[rank])])

    def programs(self) -> dict[str, tuple[list[list[int]], bool]]:
        """Per section the starts of every rank and whether any rank has an instruction in it."""
        return {
            name: (starts, any(s[0] != s[-1] for s in starts))
            for name, starts in self._starts.items()
        }

    def _encode(self, rank: int, code: int, row: int) -> list[int]:
        if row >= self.columns.n:
            return self._encode_fill(rank, code, row)
        c, places = self.columns, self.places
        src_rank, dst_rank = int(c.src_rank[row]), int(c.dst_rank[row])
        source = places.source(row)
        src_ndim, dst_ndim = source.lo.shape[1], self._dst_ndim(row)
        src = c.src_lo[row, :src_ndim] - source.lo[src_rank]
        if c.reduce[row]:
            number = int(self.schedule.landing[row])
            dst_key = (self.schedule.plan.tensors[c.dst_tensor[row]].name, LANDING)
            dst = np.array([number, *[0] * dst_ndim])
        else:
            target = places.destination(row)
            dst_key = (target.tensor, target.kind)
            dst = c.dst_lo[row, :dst_ndim] - target.lo[dst_rank]
        shape = tuple((c.dst_hi[row, :dst_ndim] - c.dst_lo[row, :dst_ndim]).tolist())
        branch = Branch(
            code, (source.tensor, source.kind), dst_key, shape, remote=src_rank != dst_rank
        )
        head = [self._branch(branch), self.arrival[row], self.send[row], dst_rank]
        return [*head, *self._pad(src), *self._pad(dst)]

    def _encode_fill(self, rank: int, code: int, row: int) -> list[int]:
        tensor = self.read[row - self.columns.n]
        items = self.places.items
        lo, hi = self._fill_box(rank, tensor)
        branch = Branch(
            code, (tensor, "input"), (tensor, "gathered"), tuple((hi - lo).tolist()), remote=False
        )
        head = [self._branch(branch), self.first_fill + row - self.columns.n, 0, rank]
        src, dst = (lo - items[tensor, kind].lo[rank] for kind in ("input", "gathered"))
        return [*head, *self._pad(src), *self._pad(dst)]

    def _dst_ndim(self, row: int) -> int:
        return len(self.schedule.plan.tensors[self.columns.dst_tensor[row]].shape)

    def _branch(self, branch: Branch) -> int:
        if branch not in self.branches:
            self.branches.append(branch)
        return self.branches.index(branch)

    def _pad(self, offsets: np.ndarray) -> list[int]:
        return [*offsets.tolist(), *[0] * (self.ndim - len(offsets))]


def _number(rank: np.ndarray, ranks: int) -> list[int]:
    """Position of every row among the rows of the same rank."""
    seen = [0] * ranks
    out = []
    for r in rank.tolist():
        out.append(seen[r])
        seen[r] += 1
    return out
