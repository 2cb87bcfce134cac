"""What a simulation found: when operations and tiles began and ended, and what follows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.schedule import Schedule
from syncopate_jax.ir.topology import Topology

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What one link carried.

    Attributes:
      bytes: sum over its transfers.
      busy: seconds those bytes would take at the link's full bandwidth.
      utilisation: ``busy`` as a share of the makespan.
    """

    channel: str
    src_rank: int
    dst_rank: int
    bytes: int
    busy: float
    utilisation: float


_SHOWN_SECONDS = 5e-9  # less reads as 0.00 us


@dataclass(frozen=True, slots=True)
class PathStep:
    """One stretch of the critical path: an operation (``tile`` -1) or a tile (``op`` -1).

    Attributes:
      rank: the rank that lists the operation or computes the tile.
      op: index in that rank's list. tile: linear tile.
      start, finish: seconds.
      early: seconds before the finish of the step that let it on at which this one started; 0 if
        it started later. An operation may be issued once the one before it in its queue has been
        sent, though not yet landed; a tile may begin, and wait inside, for data still under way.
    """

    rank: int
    op: int
    tile: int
    start: float
    finish: float
    early: float = 0.0

    def __str__(self) -> str:
        what = f"tile {self.tile}" if self.op < 0 else f"op {self.op}"
        times = f"rank {self.rank} {what}: {self.start * 1e6:.2f} to {self.finish * 1e6:.2f} us"
        if self.early < _SHOWN_SECONDS:
            return times
        early = f"{self.early * 1e6:.2f} us"
        if self.op < 0:
            return (
                f"{times} (begun {early} before the step above ended, which it waited for inside)"
            )
        return f"{times} (issued when the step above had been sent, {early} before that landed)"


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Times of one simulated launch, in seconds from its start.

    Rows of ``op_*`` are rows of the plan's columns; ``tile_*`` are [ranks, positions], in the
    order each rank computes its tiles, with no columns when there is no schedule.

    Attributes:
      op_start: when the operation was issued; op_finish: when its data had landed.
      op_bytes: bytes it moved.
      tile_start: when the tile began to compute; tile_finish: when it ended, waits included.
      tile_seconds: what it computes, waits excluded.
      tile_op: row of the operation whose data the tile's worker last waited for, or -1.
      waits: [k, 2] (row of a tile, row of an operation) for each wait that a landing satisfied.
      cause: [ops + tiles] the entity (operation row, or ops + tile row) whose progress let this
        one begin, or -1.
    """

    plan: Plan
    topology: Topology
    schedule: Schedule | None
    op_start: Array
    op_finish: Array
    op_bytes: Array
    tile_start: Array
    tile_finish: Array
    tile_seconds: Array
    tile_op: Array
    waits: Array
    cause: Array

    @property
    def makespan(self) -> float:
        """Seconds until the last tile has ended and the last data has landed."""
        return float(max(self.op_finish.max(initial=0.0), self.tile_finish.max(initial=0.0)))

    @property
    def num_workers(self) -> int:
        """Workers of a rank that compute tiles, at least 1."""
        if self.schedule is None:
            return 1
        return max(1, min(self.schedule.workers, self.schedule.num_tiles))

    def compute_alone(self) -> Array:
        """[ranks] seconds the tiles would take if nothing ever had to be waited for."""
        return compute_alone(self.tile_seconds, self.num_workers)

    def compute_busy(self) -> Array:
        """[ranks] seconds spent computing, averaged over the rank's workers."""
        return self.tile_seconds.sum(axis=1) / self.num_workers

    def compute_idle(self) -> Array:
        """[ranks] seconds of the makespan not spent computing, averaged over the workers."""
        return self.makespan - self.compute_busy()

    def rank_finish(self) -> Array:
        """[ranks] when a rank's tiles have ended and all data it sends or receives has landed."""
        c = self.plan.columns
        finish = self.tile_finish.max(axis=1, initial=0.0)
        for end in (c.rank, c.src_rank, c.dst_rank):
            np.maximum.at(finish, end, self.op_finish)
        return finish

    def exposed(self) -> Array:
        """[ranks] seconds of communication that computing did not hide: finish less compute."""
        return self.rank_finish() - self.compute_alone()

    def links(self) -> tuple[LinkUse, ...]:
        """The links that carried anything, the busiest first."""
        c = self.plan.columns
        if not self.plan.num_ops:
            return ()
        ranks, span = self.plan.num_ranks, self.makespan
        key = (c.channel.astype(np.int64) * ranks + c.src_rank) * ranks + c.dst_rank
        found, inverse = np.unique(key, return_inverse=True)
        carried = np.bincount(inverse, self.op_bytes, len(found)).astype(np.int64)
        channel, pair = np.divmod(found, ranks * ranks)
        src, dst = np.divmod(pair, ranks)
        uses = []
        for i in range(len(found)):
            name, s, d = self.plan.channels[channel[i]], int(src[i]), int(dst[i])
            busy = float(carried[i] / self.topology.channel(name).bandwidth[s, d])
            uses.append(LinkUse(name, s, d, int(carried[i]), busy, busy / span if span else 0.0))
        return tuple(
            sorted(uses, key=lambda u: (-u.utilisation, u.channel, u.src_rank, u.dst_rank))
        )

    def critical_path(self) -> tuple[PathStep, ...]:
        """What the makespan was spent on: each step was let on by the one before it."""
        finish = np.concatenate([self.op_finish, self.tile_finish.reshape(-1)])
        if not len(finish):
            return ()
        steps = []
        entity = int(finish.argmax())
        while entity >= 0:
            steps.append(self._step(entity))
            entity = int(self.cause[entity])
        steps.reverse()
        early = (max(one.finish - other.start, 0.0) for one, other in itertools.pairwise(steps))
        return (
            steps[0],
            *(replace(step, early=by) for step, by in zip(steps[1:], early, strict=True)),
        )

    def _step(self, entity: int) -> PathStep:
        ops = self.plan.num_ops
        if entity < ops:
            rank = int(self.plan.columns.rank[entity])
            index = entity - int(np.searchsorted(self.plan.columns.rank, rank))
            start, finish = self.op_start[entity], self.op_finish[entity]
            return PathStep(rank, index, -1, float(start), float(finish))
        rank, position = divmod(entity - ops, self.tile_start.shape[1])
        tile = int(self.schedule.order[rank, position]) if self.schedule is not None else position
        start, finish = self.tile_start[rank, position], self.tile_finish[rank, position]
        return PathStep(rank, -1, tile, float(start), float(finish))

    def summary(self) -> dict[str, object]:
        """The figures as plain numbers (seconds and bytes), for JSON."""
        links = self.links()
        return {
            "plan": self.plan.name,
            "topology": self.topology.name,
            "ranks": self.plan.num_ranks,
            "operations": self.plan.num_ops,
            "bytes": int(self.op_bytes.sum()),
            "makespan": self.makespan,
            "compute_busy": self.compute_busy().tolist(),
            "compute_idle": self.compute_idle().tolist(),
            "exposed": self.exposed().tolist(),
            "links_used": len(links),
            "busiest_link": None
            if not links
            else {
                "channel": links[0].channel,
                "src_rank": links[0].src_rank,
                "dst_rank": links[0].dst_rank,
                "bytes": links[0].bytes,
                "utilisation": links[0].utilisation,
            },
        }


def compute_alone(tile_seconds: Array, workers: int) -> Array:
    """[ranks] seconds that tiles [ranks, positions] take on ``workers`` workers without waits."""
    ranks, tiles = tile_seconds.shape
    if not tiles:
        return np.zeros(ranks)
    rounds = -(-tiles // workers)
    padded = np.zeros((ranks, rounds * workers))
    padded[:, :tiles] = tile_seconds
    return padded.reshape(ranks, rounds, workers).sum(axis=1).max(axis=1)
