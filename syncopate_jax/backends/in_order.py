"""One instruction sequence a rank: tiles and transfers merged, for a core that does both in order.

A TPU core computes tiles and starts transfers itself, so each operation needs a place between
tiles: as soon as everything it waits for has been waited for, or computed, in the same sequence.
Operations of one channel keep their order; what is left after the last tile is started there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from syncopate_jax.errors import DeadlockError, UnsupportedError
from syncopate_jax.ir.schedule import Schedule
from syncopate_jax.ir.text import row_text

WAIT, START, SENT = 0, 1, 2
"""Instructions: wait for an operation's data to arrive here, start it, wait until it is sent."""


@dataclass(slots=True)
class Sequence:
    """Instructions of one rank by the point at which they run.

    Attributes:
      before: per (tile position, step position), row-major: ahead of that step's tile body.
      epilogue: per tile position: ahead of the addition of landings.
      after: per tile position: once the tile is stored.
      end: after all tiles.
      heard_all: when it ends, the rank knows that every rank has begun: it has waited for data
        from each, or from a rank that had.
    Each instruction is (WAIT | START | SENT, row of the operation in the plan's columns).
    """

    before: list[list[tuple[int, int]]]
    epilogue: list[list[tuple[int, int]]]
    after: list[list[tuple[int, int]]]
    end: list[tuple[int, int]] = field(default_factory=list)
    heard_all: bool = False

    def flat(self, steps: int) -> list[tuple[int, int]]:
        """All instructions in the order they run."""
        out: list[tuple[int, int]] = []
        for tile in range(len(self.after)):
            for step in range(steps):
                out += self.before[tile * steps + step]
            out += self.epilogue[tile] + self.after[tile]
        return out + self.end


def sequence(schedule: Schedule) -> list[Sequence]:
    """The sequence of every rank; raises DeadlockError if together they cannot finish."""
    arrivals, tiles_of = _slots(schedule)
    found = [
        _Merger(schedule, rank, arrivals[rank], tiles_of[rank]).run()
        for rank in range(schedule.plan.num_ranks)
    ]
    heard = _run_together(schedule, [one.flat(schedule.num_steps) for one in found])
    for one, ranks in zip(found, heard, strict=True):
        one.heard_all = ranks == (1 << len(found)) - 1
    return found


def _slots(schedule: Schedule) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
    """Per rank: slot -> operation that raises it; slot -> last position of the tiles that do."""
    plan = schedule.plan
    arrivals: list[dict[int, int]] = [{} for _ in range(plan.num_ranks)]
    tiles_of: list[dict[int, int]] = [{} for _ in range(plan.num_ranks)]
    signals = zip(schedule.op_signals.owner, schedule.op_signals.values.tolist(), strict=True)
    for row, (target, slot) in signals:
        if plan.columns.dst_rank[row] != target:
            raise UnsupportedError(
                f"plan {plan.name}: rank {target} waits for an operation whose data lands on rank "
                f"{plan.columns.dst_rank[row]}: {row_text(plan, int(row))}; a core that computes "
                f"and communicates in order can only wait for what lands on it: use backend 'xla'"
            )
        arrivals[target][slot] = int(row)
    raised = zip(schedule.signals.owner, schedule.signals.values.tolist(), strict=True)
    for at, (target, slot) in raised:
        rank, position = divmod(int(at), schedule.num_tiles)
        if rank != target:
            raise UnsupportedError(
                f"plan {plan.name}: rank {target} waits for tiles of rank {rank}; a core that "
                f"computes and communicates in order pushes its own tiles: use mode='push'"
            )
        tiles_of[rank][slot] = max(position, tiles_of[rank].get(slot, -1))
    return arrivals, tiles_of


class _Merger:
    """Merges one rank's operations into its tile order."""

    def __init__(
        self, schedule: Schedule, rank: int, arrivals: dict[int, int], tiles_of: dict[int, int]
    ):
        self.schedule, self.rank = schedule, rank
        self.arrivals, self.tiles_of = arrivals, tiles_of
        self.waited: set[int] = set()
        self.started: list[int] = []
        columns = schedule.plan.columns
        lo, hi = np.searchsorted(columns.rank, (rank, rank + 1))
        self.queues: dict[int, deque[int]] = {}
        for row in range(lo, hi):
            self.queues.setdefault(int(columns.channel[row]), deque()).append(row)

    def run(self) -> Sequence:
        schedule, steps = self.schedule, self.schedule.num_steps
        out = Sequence(
            [[] for _ in range(schedule.num_tiles * steps)],
            [[] for _ in range(schedule.num_tiles)],
            [[] for _ in range(schedule.num_tiles)],
        )
        for tile in range(schedule.num_tiles):
            at = schedule.at(self.rank, tile)
            needs = {0: [slot for slot, _ in schedule.waits.row(at)]}
            for step, slot, _ in schedule.k_waits.row(at):
                needs.setdefault(step, []).append(slot)
            for step in sorted({0, *needs}):
                here = out.before[tile * steps + step]
                if tile == step == 0:
                    here += self._startable(done=-1)
                here += self._wait(needs.get(step, []))
                here += self._startable(done=tile - 1)
            out.epilogue[tile] += self._wait([slot for slot, _ in schedule.e_waits.row(at)])
            out.after[tile] += self._startable(done=tile)
        out.end = self._rest()
        return out

    def _wait(self, slots: list[int]) -> list[tuple[int, int]]:
        rows = [self.arrivals[slot] for slot in slots if slot in self.arrivals]
        fresh = [row for row in dict.fromkeys(rows) if row not in self.waited]
        self.waited |= set(fresh)
        return [(WAIT, row) for row in fresh]

    def _startable(self, done: int) -> list[tuple[int, int]]:
        """Operations at the heads of the channels that can start once tile ``done`` is stored."""
        out = []
        for queue in self.queues.values():
            while queue and self._met(queue[0], done):
                out.append((START, queue[0]))
                self.started.append(queue.popleft())
        return out

    def _met(self, row: int, done: int) -> bool:
        return all(
            self.arrivals[slot] in self.waited
            if slot in self.arrivals
            else self.tiles_of[slot] <= done
            for slot, _ in self.schedule.op_waits.row(row)
        )

    def _rest(self) -> list[tuple[int, int]]:
        """What is left: operations with their waits, then every arrival, then every send."""
        out = []
        for row in sorted(row for queue in self.queues.values() for row in queue):
            out += self._wait([slot for slot, _ in self.schedule.op_waits.row(row)])
            out.append((START, row))
            self.started.append(row)
        columns = self.schedule.plan.columns
        here = np.flatnonzero(columns.dst_rank == self.rank).tolist()
        out += [(WAIT, row) for row in here if row not in self.waited]
        remote = (row for row in self.started if columns.dst_rank[row] != self.rank)
        return out + [(SENT, row) for row in remote]


def _run_together(schedule: Schedule, flat: list[list[tuple[int, int]]]) -> list[int]:
    """Runs the sequences against each other; raises DeadlockError where all of them are stuck.

    Returns, for each rank, the ranks it has heard from at its end, as bits: an operation tells its
    destination of its source and of all that the source had heard from when it started it.
    """
    place = [0] * len(flat)
    heard = [1 << rank for rank in range(len(flat))]
    told: dict[int, int] = {}
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(flat):
            while place[rank] < len(program):
                code, row = program[place[rank]]
                if code == WAIT and row not in told:
                    break
                if code == START:
                    told[row] = heard[rank]
                elif code == WAIT:
                    heard[rank] |= told[row]
                place[rank] += 1
                moved = True
    stuck = [r for r, program in enumerate(flat) if place[r] < len(program)]
    if stuck:
        waits = "; ".join(
            f"rank {r} waits for {row_text(schedule.plan, flat[r][place[r]][1])}" for r in stuck[:4]
        )
        raise DeadlockError(
            f"plan {schedule.plan.name}: in this tile order no rank can go on: {waits}; "
            f"use a plan of one hop, such as all_gather_swizzle, in which no rank hands on what "
            f"its tiles wait for, or backend 'xla'"
        )
    return heard
