"""Hand-made plans and schedules with round numbers, for tests of timing and drawing."""

from __future__ import annotations

import numpy as np

from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, Dependency, Operation
from syncopate_jax.ir.plan import Plan, Tensor
from syncopate_jax.ir.schedule import Rows, Schedule
from syncopate_jax.ir.topology import Channel, Topology, uniform_channel

BANDWIDTH, LATENCY, OVERHEAD = 1000.0, 0.25, 0.125
"""Bytes/s, s, s: a kilobyte flows for a second."""


def channel(num_ranks: int, name: str = "nvlink", **changes: float | bool) -> Channel:
    figures = {"bandwidth": BANDWIDTH, "latency": LATENCY, "overhead": OVERHEAD}
    return uniform_channel(name, num_ranks, **(figures | changes))


def topology(num_ranks: int, **changes: float | bool) -> Topology:
    return Topology("round", num_ranks, (channel(num_ranks, **changes),), 800.0)


def send(
    src: int,
    dst: int,
    size: int,
    *deps: Dependency,
    on: int | None = None,
    channel: str = "nvlink",
    at: int = 0,
) -> P2P:
    """A transfer of ``size`` bytes from ``at``, listed on its source unless ``on`` is given."""
    chunk = Chunk("x", Box((at,), (at + size,)))
    rank = src if on is None else on
    return P2P(rank, src, dst, chunk, chunk, deps, channel=channel)


def plan_of(*ops: list[Operation]) -> Plan:
    """A plan of bytes; ``ops[rank]`` is that rank's list."""
    return build_plan("small", len(ops), [Tensor("x", (10**9,), "int8")], [], [], ops)


def schedule_of(
    plan: Plan,
    tiles: int,
    *,
    steps: int = 1,
    workers: int = 1,
    slots: int = 0,
    order: list[list[int]] | None = None,
    **rows: dict[int, list[tuple[int, ...]]],
) -> Schedule:
    """A schedule from the rows that are not empty, by number, such as ``waits={3: [(0, 1)]}``."""
    ranks = plan.num_ranks
    widths = {"waits": 2, "k_waits": 3, "e_waits": 2, "signals": 2, "addends": 1}
    widths |= {"op_waits": 2, "op_signals": 2}
    tables = {
        name: Rows.of(
            [
                rows.get(name, {}).get(i, [])
                for i in range(plan.num_ops if name.startswith("op_") else ranks * tiles)
            ],
            width,
        )
        for name, width in widths.items()
    }
    return Schedule(
        plan=plan,
        num_tiles=tiles,
        num_steps=steps,
        workers=workers,
        order=np.array(order or [list(range(tiles))] * ranks, np.int32).reshape(ranks, tiles),
        k_order=np.tile(np.arange(steps, dtype=np.int32), (ranks, 1)),
        landing=np.full(plan.num_ops, -1, np.int32),
        num_slots=np.full(ranks, slots, np.int32),
        num_landings=np.zeros(ranks, np.int32),
        **tables,
    )


def gather_schedule(num_ranks: int, tiles_per_chunk: int, size: int, workers: int) -> Schedule:
    """Fused all-gather and matmul: rank r sends its chunk to r+1, r+2, … and computes the tiles of
    its own chunk first, then those of each chunk in the order in which they arrive."""
    ops: list[list[Operation]] = [
        [send(r, (r + k) % num_ranks, size, at=r * size) for k in range(1, num_ranks)]
        for r in range(num_ranks)
    ]
    plan = plan_of(*ops)
    per = num_ranks - 1
    tiles = num_ranks * tiles_per_chunk
    order, waits, op_signals = [], {}, {}
    for r in range(num_ranks):
        chunks = [(r - k) % num_ranks for k in range(num_ranks)]
        order.append([c * tiles_per_chunk + t for c in chunks for t in range(tiles_per_chunk)])
        for position in range(tiles):
            step = position // tiles_per_chunk
            if step and position % tiles_per_chunk < workers:
                waits[r * tiles + position] = [(chunks[step], 1)]
        for k in range(per):
            op_signals[r * per + k] = [((r + 1 + k) % num_ranks, r)]
    return schedule_of(
        plan,
        tiles,
        workers=workers,
        slots=num_ranks,
        order=order,
        waits=waits,
        op_signals=op_signals,
    )
