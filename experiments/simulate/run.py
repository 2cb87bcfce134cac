"""Times the simulator itself: how its cost grows with the plan, and against its closed forms.

Each case runs in a process of its own, so that its peak memory is its own. ``--out`` writes the
figures as JSON; ``--quick`` leaves out the large cases.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from syncopate_jax.check.simulate import simulate
from syncopate_jax.ir import presets
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.schedule import Rows, Schedule
from syncopate_jax.ir.topology import Topology, link_channel
from syncopate_jax.plans.all_gather_ring import all_gather_ring
from syncopate_jax.plans.all_gather_swizzle import all_gather_swizzle

ROWS, COLUMNS = 4, 2048
CASES = (
    *(("swizzle", ranks) for ranks in (64, 128, 256, 512, 1024)),
    *(("ring", ranks) for ranks in (64, 128, 256, 512, 1024)),
    *(("uneven", ranks) for ranks in (32, 64, 128, 256, 512)),
    *(("fused", ranks) for ranks in (2, 4, 8, 16)),
)
QUICK_RANKS = 128
TILES, WORKERS = 4096, 132


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help=f"at most {QUICK_RANKS} ranks")
    parser.add_argument("--case", nargs=2, metavar=("NAME", "RANKS"), help="one case, as JSON")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case[0], int(args.case[1]))))
        return
    found = []
    for name, ranks in CASES:
        if args.quick and ranks > QUICK_RANKS:
            continue
        command = [sys.executable, __file__, "--case", name, str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
        print(line(found[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), "cases": found}, indent=1) + "\n")


def measure(name: str, ranks: int) -> dict[str, Any]:
    """Simulates a case and compares its makespan with the closed form, if it has one."""
    plan, topology, schedule, expected = build(name, ranks)
    begun = time.process_time()
    found = simulate(plan, topology, schedule, tile_seconds=None if schedule is None else 2e-6)
    seconds = time.process_time() - begun
    tiles = 0 if schedule is None else schedule.num_tiles * ranks
    if expected is not None and not np.isclose(found.makespan, expected, rtol=1e-9):
        raise SystemExit(f"{name} {ranks}: makespan {found.makespan}, closed form {expected}")
    return {
        "case": name,
        "ranks": ranks,
        "operations": plan.num_ops,
        "tiles": tiles,
        "seconds": seconds,
        "microseconds_each": seconds * 1e6 / (plan.num_ops + tiles),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "makespan": found.makespan,
        "closed_form": expected,
    }


def build(name: str, ranks: int) -> tuple[Plan, Topology, Schedule | None, float | None]:
    """A case's plan, topology, schedule (or None) and closed form in seconds (or None)."""
    shape = (ranks * ROWS, COLUMNS)
    topology = presets.h200_nvlink(ranks)
    hop = presets.COPY_OVERHEAD + ROWS * COLUMNS * 2 / presets.H200_NVLINK_BANDWIDTH
    if name == "swizzle":
        plan = all_gather_swizzle(ranks, shape)
        return plan, topology, None, (ranks - 1) * hop + presets.NVLINK_LATENCY
    if name == "ring":
        plan = all_gather_ring(ranks, shape)
        return plan, topology, None, (ranks - 1) * (hop + presets.NVLINK_LATENCY)
    if name == "uneven":
        # Chunks that flow for longer than they take to issue, so that ports are contended.
        return all_gather_swizzle(ranks, (ranks * 1024, COLUMNS)), uneven(ranks), None, None
    plan = all_gather_swizzle(ranks, (ranks * 1024, COLUMNS))
    return plan, topology, gather_schedule(plan), None


def uneven(ranks: int) -> Topology:
    """Every link of another speed, so that no two transfers end together and ports are shared."""
    speeds = np.random.default_rng(0).uniform(0.25, 1.0, (ranks, ranks)) * 392e9
    channel = link_channel("nvlink", speeds, latency=1e-6, port_bandwidth=392e9, overhead=2e-6)
    return Topology("uneven", ranks, (channel,))


def gather_schedule(plan: Plan) -> Schedule:
    """A fused matmul over the gathered tensor: tiles wait for the chunk they read, by source."""
    ranks = plan.num_ranks
    per_chunk = TILES // ranks
    position = np.arange(TILES)
    step = position // per_chunk
    rank = np.arange(ranks)[:, None]
    chunk = (rank - step) % ranks
    order = chunk * per_chunk + position % per_chunk
    waiting = (step > 0) & (position % per_chunk < WORKERS)
    rows = (rank * TILES + position)[:, waiting].ravel()
    needs = np.stack([chunk[:, waiting].ravel(), np.ones(rows.size, np.int64)], axis=1)
    signals = np.stack([plan.columns.dst_rank, plan.columns.src_rank], axis=1)
    empty = np.zeros((0, 2), np.int32)
    none = np.zeros(0, np.int64)
    tiles = ranks * TILES
    return Schedule(
        plan=plan,
        num_tiles=TILES,
        num_steps=1,
        workers=WORKERS,
        order=order.astype(np.int32),
        k_order=np.zeros((ranks, 1), np.int32),
        waits=Rows.grouped(rows, needs, tiles),
        k_waits=Rows.grouped(none, np.zeros((0, 3), np.int32), tiles),
        e_waits=Rows.grouped(none, empty, tiles),
        signals=Rows.grouped(none, empty, tiles),
        addends=Rows.grouped(none, np.zeros((0, 1), np.int32), tiles),
        op_waits=Rows.grouped(none, empty, plan.num_ops),
        op_signals=Rows.grouped(np.arange(plan.num_ops), signals, plan.num_ops),
        landing=np.full(plan.num_ops, -1, np.int32),
        num_slots=np.full(ranks, ranks, np.int32),
        num_landings=np.zeros(ranks, np.int32),
    )


def line(case: dict[str, Any]) -> str:
    return (
        f"{case['case']:<8} {case['ranks']:>5} ranks {case['operations']:>8} operations "
        f"{case['tiles']:>6} tiles: {case['seconds']:7.3f} s, {case['microseconds_each']:6.2f} us "
        f"each, {case['peak_megabytes']:6.0f} MB"
    )


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


if __name__ == "__main__":
    main()
