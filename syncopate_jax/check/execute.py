"""The NumPy oracle: executes a plan on real arrays, in one of the orders that it allows."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from syncopate_jax.check.buffers import Buffers, collective_result
from syncopate_jax.check.collectives import Instances
from syncopate_jax.check.report import Report
from syncopate_jax.check.verify import find_malformed
from syncopate_jax.errors import DeadlockError, PlanError
from syncopate_jax.ir.chunk import Chunk
from syncopate_jax.ir.comm import P2P, Collective, ComputeDep, OpDep, Operation
from syncopate_jax.ir.plan import Plan

Array = np.ndarray

TILES, FINISH, READ, ISSUE = range(4)
"""Kinds of event: tiles produce a chunk; an operation completes, reads its source, is issued."""


def execute(
    plan: Plan,
    inputs: Mapping[tuple[int, str], Array],
    *,
    seed: int | None = None,
    accumulate: type[np.floating] = np.float64,
) -> dict[tuple[int, str], Array]:
    """Every rank's buffers once all operations of ``plan`` have completed.

    Args:
      plan: may have faults; those that verification finds on atoms show as wrong results.
      inputs: for each (rank, tensor) with an initial region an array of the tensor's whole shape,
        of which only those regions are used; all else starts as NaN.
      seed: None executes operations one at a time in issue order, their tiles first. A number
        picks a random order among those the plan allows, in which issue, reading, completion and
        tiles are events of their own; different numbers favour late tiles, slow ranks and so on.
      accumulate: type of all arithmetic and of the results; integers are exact up to its mantissa.

    Returns:
      ``{(rank, tensor): array}`` for every rank and tensor.

    Raises:
      PlanError: an index, box, region or collective of the plan is malformed.
      InputError: an input is missing or of another shape.
      DeadlockError: operations wait for each other; the message names them.
    """
    report = Report(plan)
    instances = find_malformed(plan, report)
    if report.findings:
        raise PlanError(plan.name, report.findings)
    run = _Run(plan, instances, Buffers(plan, inputs, accumulate), seed)
    run.finish_all()
    return run.buffers.arrays()


@dataclass(slots=True, eq=False)
class _Part:
    """What is known of one operation while it runs."""

    op: Operation
    waits: int
    port: tuple[int, str]
    meets: _Meeting | None = None
    payload: Array = field(default_factory=lambda: np.zeros(0))
    issued: bool = False
    done: bool = False
    wakes: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Meeting:
    """A collective: its rows in group order, and how many have come and have read."""

    rows: list[int]
    came: int = 0
    read: int = 0


class _Run:
    """An event loop over operations and tiles."""

    def __init__(self, plan: Plan, instances: list[Instances], buffers: Buffers, seed: int | None):
        self.plan = plan
        self.buffers = buffers
        self.random = None if seed is None else random.Random(seed)
        self.count = itertools.count()
        self.heap: list[tuple[float, int, int, int]] = []
        self.parts: list[_Part] = []
        self.queues: dict[tuple[int, str], list[int]] = {}
        self.tiles: list[tuple[int, Chunk]] = []
        self.tiles_wake: list[list[int]] = []
        self._draw_habits()
        self._load()
        for block in instances:
            for rows in block.rows.tolist():
                meeting = _Meeting(rows)
                for row in rows:
                    self.parts[row].meets = meeting
        for port in self.queues.values():
            port.reverse()
            self._offer(port)

    def finish_all(self) -> None:
        steps = {
            TILES: self._run_tiles,
            FINISH: self._finish,
            READ: self._read,
            ISSUE: self._issue,
        }
        while self.heap:
            _, _, kind, item = heapq.heappop(self.heap)
            steps[kind](item)
        if not all(part.done for part in self.parts):
            raise DeadlockError(self._stuck())

    def _draw_habits(self) -> None:
        """How late each kind of event and each rank tends to be in this order."""
        if self.random is None:
            self.late = [0.0, 1.0, 2.0, 3.0]
            self.slow = [0.0] * self.plan.num_ranks
            return
        self.late = [self.random.choice((0, 0, 1, 4)) for _ in range(4)]
        self.slow = [self.random.choice((0, 0, 2)) for _ in range(self.plan.num_ranks)]

    def _load(self) -> None:
        plan, c = self.plan, self.plan.columns
        chunks: dict[tuple[int, Chunk], list[int]] = {}
        for row in range(c.n):
            op = plan.row(row)
            self.parts.append(_Part(op, len(op.deps), (op.rank, op.channel)))
            self.queues.setdefault((op.rank, op.channel), []).append(row)
            for dep in op.deps:
                if isinstance(dep, ComputeDep):
                    chunks.setdefault((dep.rank, dep.chunk), []).append(row)
        for row, dep in zip(c.dep_owner().tolist(), c.dep_row(plan.num_ranks), strict=True):
            self.parts[int(dep)].wakes.append(row)
        for region in plan.initial:
            if region.produced:
                chunks.setdefault((region.rank, Chunk(region.tensor, region.box)), [])
        for i, (chunk, rows) in enumerate(chunks.items()):
            self.tiles.append(chunk)
            self.tiles_wake.append(rows)
            self._push(TILES, i, chunk[0])

    def _push(self, kind: int, item: int, rank: int) -> None:
        when = self.late[kind] + self.slow[rank]
        if self.random is not None:
            when += self.random.random()
        order = item if self.random is None else next(self.count)
        heapq.heappush(self.heap, (when, order, kind, item))

    def _offer(self, queue: list[int]) -> None:
        """Lets the next operation of a port be issued if it waits for nothing."""
        if queue and not self.parts[queue[-1]].waits and not self.parts[queue[-1]].issued:
            part = self.parts[queue[-1]]
            part.issued = True
            self._push(ISSUE, queue[-1], part.op.rank)

    def _wake(self, rows: list[int]) -> None:
        for row in rows:
            self.parts[row].waits -= 1
            self._offer(self.queues[self.parts[row].port])

    def _run_tiles(self, item: int) -> None:
        rank, chunk = self.tiles[item]
        self.buffers.produce(rank, chunk)
        self._wake(self.tiles_wake[item])

    def _issue(self, row: int) -> None:
        part = self.parts[row]
        if part.meets is None:
            self._leave_port(row)
            return
        part.meets.came += 1
        if part.meets.came == len(part.meets.rows):
            for member in part.meets.rows:
                self._leave_port(member)

    def _leave_port(self, row: int) -> None:
        part = self.parts[row]
        self._push(READ, row, part.op.rank)
        queue = self.queues[part.port]
        queue.pop()
        self._offer(queue)

    def _read(self, row: int) -> None:
        part = self.parts[row]
        op = part.op
        source = op.src_rank if isinstance(op, P2P) else op.rank
        part.payload = self.buffers.read(source, op.src)
        if part.meets is None:
            self._push(FINISH, row, op.rank)
            return
        part.meets.read += 1
        if part.meets.read == len(part.meets.rows):
            for member in part.meets.rows:
                self._push(FINISH, member, self.parts[member].op.rank)

    def _finish(self, row: int) -> None:
        part = self.parts[row]
        op = part.op
        if isinstance(op, P2P):
            self.buffers.write(op.dst_rank, op.dst, part.payload, op.reduce)
        elif part.meets is not None:
            self._finish_collective(op, part.meets)
        part.done = True
        self._wake(part.wakes)

    def _finish_collective(self, op: Collective, meeting: _Meeting) -> None:
        members = [self.parts[row] for row in meeting.rows]
        received = collective_result(
            op,
            [part.payload for part in members],
            [part.op.dst.box.shape for part in members],
        )
        self.buffers.write(op.rank, op.dst, received, "none")

    def _stuck(self, limit: int = 8) -> str:
        """Who waits for what, for the operations at the head of their ports."""
        lines = []
        report = Report(self.plan)
        heads = sorted(queue[-1] for queue in self.queues.values() if queue)
        for row in heads[:limit]:
            part = self.parts[row]
            undone = [dep for dep in part.op.deps if self._is_open(dep)]
            wants = ", ".join(str(dep) for dep in undone)
            if not wants and part.meets:
                absent = [m for m in part.meets.rows if self.parts[m].waits or m not in heads]
                wants = "its members " + ", ".join(report.name(m) for m in absent)
            lines.append(f"{report.name(row)} waits for {wants}")
        rest = f"; and {len(heads) - limit} more" if len(heads) > limit else ""
        return f"{self.plan.name}: deadlock: {'; '.join(lines)}{rest}"

    def _is_open(self, dep: OpDep | ComputeDep) -> bool:
        if isinstance(dep, ComputeDep):
            return False
        lo = int(np.searchsorted(self.plan.columns.rank, dep.rank))
        return not self.parts[lo + dep.index].done
