"""Naming who waits for what when a simulation can make no progress."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from syncopate_jax.check.engine import Engine
from syncopate_jax.errors import DeadlockError

_SHOWN = 12


def raise_deadlock(engine: Engine) -> NoReturn:
    """Raises DeadlockError with a line for each queue and worker that is stuck."""
    lines = [*_stuck_operations(engine), *_stuck_workers(engine)]
    shown = "\n".join(f"  {line}" for line in lines[:_SHOWN])
    more = f"\n  … and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    raise DeadlockError(
        f"simulate {engine.plan.name}: no progress after {engine.finished_ops} of "
        f"{engine.num_ops} operations and {engine.finished_tiles} of {engine.num_tiles} tiles; "
        f"waiting:\n{shown}{more}"
    )


def _stuck_operations(engine: Engine) -> list[str]:
    """A line for the head of each queue that has not been issued."""
    lines = []
    for queue, (head, end) in enumerate(zip(engine.queue_next, engine.queue_end, strict=True)):
        if head == end:
            continue
        op = engine.queue_ops[head]
        channel = engine.plan.channels[queue % engine.num_channels]
        behind = end - head - 1
        queued = f", {behind} behind it" if behind else ""
        reasons = [*_unmet_dependencies(engine, op), *_unmet_slots(engine, op, False)]
        lines.append(f"{_name(engine, op)} ({channel}{queued}) waits for {' and '.join(reasons)}")
    return lines


def _unmet_dependencies(engine: Engine, op: int) -> list[str]:
    c = engine.plan.columns
    row = engine.row[op]
    rows = c.dep_row(engine.plan.num_ranks)[c.dep_start[row] : c.dep_start[row + 1]]
    return [_name(engine, dep) for dep in engine.op[rows].tolist() if engine.finish[dep] < 0]


def _stuck_workers(engine: Engine) -> list[str]:
    """A line for the tile that each stuck worker stands at."""
    lines = []
    for worker, (row, end) in enumerate(zip(engine.worker_row, engine.worker_end, strict=True)):
        if row < end:
            reasons = _unmet_slots(engine, worker, True)
            lines.append(f"{_tile_name(engine, row)} waits for {' and '.join(reasons)}")
    return lines


def _unmet_slots(engine: Engine, target: int, is_worker: bool) -> list[str]:
    """The slots that an operation or worker waits for, and who has yet to raise each."""
    found = []
    for slot, waiters in enumerate(engine.slot_waiters):
        for count, waiter, worker in waiters:
            if waiter == target and bool(worker) is is_worker:
                rank = int(np.searchsorted(engine.slot_base, slot, side="right")) - 1
                text = (
                    f"slot {slot - engine.slot_base[rank]} of rank {rank} to reach {count}, "
                    f"now {engine.slot_value[slot]}"
                )
                found.append(f"{text} ({_raisers(engine, slot)})")
    return found


def _raisers(engine: Engine, slot: int) -> str:
    names = []
    owners = np.flatnonzero(np.array(engine.op_signals, np.int64) == slot)
    starts = np.array(engine.op_signal_start)
    for op in (np.searchsorted(starts, owners, side="right") - 1).tolist():
        if engine.finish[op] < 0:
            names.append(_name(engine, op))
    owners = np.flatnonzero(np.array(engine.tile_signals, np.int64) == slot)
    starts = np.array(engine.tile_signal_start)
    for row in (np.searchsorted(starts, owners, side="right") - 1).tolist():
        if engine.finish[engine.num_ops + row] < 0:
            names.append(_tile_name(engine, row))
    if not names:
        return "nothing is left to raise it"
    return f"to be raised by {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


def _name(engine: Engine, op: int) -> str:
    row = int(engine.row[op])
    rank = int(engine.plan.columns.rank[row])
    return f"rank {rank} op {row - int(np.searchsorted(engine.plan.columns.rank, rank))}"


def _tile_name(engine: Engine, row: int) -> str:
    assert engine.schedule is not None, "without a schedule there are no tiles"
    rank, position = divmod(row, engine.schedule.num_tiles)
    return f"rank {rank} tile {engine.schedule.order[rank, position]} (position {position})"
