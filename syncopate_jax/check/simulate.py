"""How long a plan or a schedule takes on a topology, without the hardware.

Operations of one rank and channel are issued in list order, one at a time: the head of the queue
starts when the operations it depends on have landed and the slots it waits for have been raised,
holds the queue while it is issued and its bytes flow, and lands a latency later (``ir.topology``).
Transfers that meet at a port share it max-min fairly (``check.sharing``). With a schedule each
rank's workers compute their tiles in order, stop at the waits before a tile, inside its reduction
loop and before its epilogue, and raise slots; without one, compute dependencies count as met at 0.

What is left out: the SMs that communication takes from tiles, cache effects, host work, and what a
reduction costs beyond its transfer. The result is a bound to plan with, not a measurement; of a
GPU operator ``ops.on_machine`` knows more, and ``docs/simulator.md`` how far off that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.deadlock import raise_deadlock
from syncopate_jax.check.engine import Engine, transfer_bytes
from syncopate_jax.check.timing import Timeline
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.arguments import instance
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.schedule import Schedule
from syncopate_jax.ir.topology import Topology

Array = np.ndarray


def simulate(
    plan: Plan,
    topology: Topology,
    schedule: Schedule | None = None,
    *,
    tile_seconds: float | Array | None = None,
    tile_flops: float | Array | None = None,
    signal_lag: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Timeline:
    """The timeline of ``plan`` (with a ``schedule``: of its fused operator) on ``topology``.

    The plan is taken to be sound: ``check.verify.verify`` it first. Times are those of bytes and
    dependencies alone, so that boxes of different sizes or beyond their tensor, data that a rank
    does not hold, races, and transfers listed on a rank that is neither end have one too.

    With a schedule, give what a tile costs as ``tile_seconds`` on one worker, or as
    ``tile_flops``, of which a worker does its share of the rank's ``topology.flops``; a number, or
    an array that broadcasts to [ranks, tiles], by linear tile. A worker that stores a tile beside
    the next one tells of it when it has computed ``signal_lag`` of that, a share; of its last tile
    at once. ``progress(done, total)`` is called from time to time.

    Raises InputError when the topology does not fit the plan or an argument is wrong,
    UnsupportedError for collectives, DeadlockError when something waits for ever.
    """
    _check(plan, topology, schedule)
    if not 0 <= signal_lag <= 1:
        raise InputError(f"simulate: signal_lag must be a share, from 0 to 1, found {signal_lag}")
    seconds = _tile_seconds(topology, schedule, tile_seconds, tile_flops)
    engine = Engine(plan, topology, schedule, seconds, progress, signal_lag)
    engine.run()
    if engine.finished_ops < plan.num_ops or engine.finished_tiles < engine.num_tiles:
        raise_deadlock(engine)
    shape = (plan.num_ranks, schedule.num_tiles if schedule else 0)
    start = engine.by_row(np.array(engine.begin))
    finish = engine.by_row(np.array(engine.finish))
    waits = np.array(engine.tile_waits, np.int64).reshape(-1, 2)
    ops = plan.num_ops
    return Timeline(
        plan=plan,
        topology=topology,
        schedule=schedule,
        op_start=start[:ops],
        op_finish=finish[:ops],
        op_bytes=transfer_bytes(plan),
        tile_start=start[ops:].reshape(shape),
        tile_finish=finish[ops:].reshape(shape),
        tile_seconds=seconds,
        tile_op=engine.rows(np.array(engine.tile_op, np.int64)).reshape(shape),
        waits=np.stack([waits[:, 0], engine.rows(waits[:, 1])], axis=1),
        cause=engine.by_row(engine.rows(np.array(engine.cause, np.int64))),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predicted seconds of one operator, fused and not.

    Attributes:
      compute: its tiles alone, on the slowest rank.
      communication: its plan alone.
      fused: the schedule's makespan; ``timeline`` is its timeline.
    """

    compute: float
    communication: float
    fused: float
    timeline: Timeline

    @property
    def unfused(self) -> float:
        """One after the other: communication then computation, or the reverse."""
        return self.compute + self.communication

    @property
    def bound(self) -> float:
        """What perfect overlap would take: the longer of the two."""
        return max(self.compute, self.communication)

    @property
    def speedup(self) -> float:
        """Unfused over fused; 1 when both are 0."""
        return self.unfused / self.fused if self.fused else 1.0

    @property
    def hidden(self) -> float:
        """Share of what overlap could hide that the fused operator hides; 1 when nothing could."""
        could = self.unfused - self.bound
        return (self.unfused - self.fused) / could if could else 1.0


def compare(
    schedule: Schedule,
    topology: Topology,
    *,
    tile_seconds: float | Array | None = None,
    tile_flops: float | Array | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Predicted times of ``schedule`` fused, and of its plan and its tiles one after the other."""
    instance("compare", "schedule", schedule, Schedule)
    plan = schedule.plan
    fused = simulate(
        plan,
        topology,
        schedule,
        tile_seconds=tile_seconds,
        tile_flops=tile_flops,
        progress=progress,
    )
    alone = simulate(plan, topology, progress=progress)
    compute = float(fused.compute_alone().max(initial=0.0))
    return Comparison(compute, alone.makespan, fused.makespan, fused)


def _check(plan: Plan, topology: Topology, schedule: Schedule | None) -> None:
    instance("simulate", "plan", plan, Plan)
    instance("simulate", "topology", topology, Topology)
    if schedule is not None:
        instance("simulate", "schedule", schedule, Schedule)
    if topology.num_ranks != plan.num_ranks:
        raise InputError(
            f"simulate {plan.name}: topology {topology.name} has {topology.num_ranks} ranks, "
            f"the plan has {plan.num_ranks}"
        )
    if plan.has_collectives():
        raise UnsupportedError(
            f"simulate {plan.name}: takes transfers only; expand the plan's collectives first "
            f"(pass expand_collectives)"
        )
    c = plan.columns
    ends = np.stack([c.rank, c.src_rank, c.dst_rank])
    bad = np.flatnonzero(np.any((ends < 0) | (ends >= plan.num_ranks), axis=0))
    if len(bad):
        row = int(bad[0])
        raise InputError(
            f"simulate {plan.name}: row {row} is listed on rank {c.rank[row]} and travels "
            f"r{c.src_rank[row]} to r{c.dst_rank[row]}, of {plan.num_ranks} ranks; verify the plan"
        )
    if schedule is not None and schedule.plan is not plan:
        raise InputError(
            f"simulate {plan.name}: the schedule serves another plan ({schedule.plan.name}); "
            f"pass schedule.plan"
        )


def _tile_seconds(
    topology: Topology,
    schedule: Schedule | None,
    tile_seconds: float | Array | None,
    tile_flops: float | Array | None,
) -> Array:
    """[ranks, positions] seconds that each tile computes on its worker."""
    if schedule is None:
        if tile_seconds is not None or tile_flops is not None:
            raise InputError("simulate: tile_seconds and tile_flops need a schedule")
        return np.zeros((topology.num_ranks, 0))
    if (tile_seconds is None) == (tile_flops is None):
        raise InputError("simulate: a schedule needs one of tile_seconds and tile_flops")
    given = "tile_flops" if tile_seconds is None else "tile_seconds"
    cost = np.asarray(tile_flops if tile_seconds is None else tile_seconds, np.float64)
    shape = (topology.num_ranks, schedule.num_tiles)
    if not np.all(np.isfinite(cost) & (cost >= 0)):
        raise InputError(f"simulate: {given} must be finite and not negative")
    try:
        by_tile = np.broadcast_to(cost, shape)
    except ValueError as error:
        raise InputError(
            f"simulate: {given} has shape {cost.shape}, which does not broadcast to {shape}"
        ) from error
    if tile_seconds is None:
        if np.any(topology.flops == 0):
            raise InputError(
                f"simulate: topology {topology.name} gives rank "
                f"{int(np.flatnonzero(topology.flops == 0)[0])} no flops; pass tile_seconds"
            )
        workers = max(1, min(schedule.workers, schedule.num_tiles))
        by_tile = by_tile / (topology.flops / workers)[:, None]
    return np.take_along_axis(by_tile, schedule.order.astype(np.int64), axis=1)
