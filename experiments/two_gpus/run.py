"""The fused operators on two GPUs, or on ranks folded onto one, beside every rival: one command.

Run from the repository's root, on a machine with two Hopper GPUs joined by NVLink::

  python -m experiments.two_gpus.run --out experiments/results/two_gpus_h200.json
  python -m experiments.two_gpus.run --missing OLD.json --out NEW.json   # what OLD lacks

First every operator and backend is checked, a process a backend, each under a time limit. Then
every problem is timed, most important first. Rows are written as they come, so that a run that is
cut short still counts. ``--folded`` needs one GPU, ``--tiny`` and ``--lower`` none.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

from experiments.common import processes, results
from experiments.common.processes import SHARING, Stage, Task
from experiments.two_gpus import flagged, problems
from experiments.two_gpus.problems import Problem

STAGES = ("correctness", "speed", "flagged", "torch", "link", "triton", "triton_speed")
HERE = "experiments.two_gpus"
TORCH = (problems.GATHER, problems.SCATTER, problems.REDUCE)
AT_ONCE = 16
"""Processes that check, of 32 cores."""
TRITON_PROBLEMS = (0, 1)
"""One all-gather and one reduce-scatter, of which Triton kernels are timed too."""
MOST_RIVALS = 21
"""Problems, the most important, that rivals in processes of their own are asked to do too."""


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over the problems of each operator, the small ones apart."""
    found: dict[str, Any] = {}
    checks = [r for r in rows if r["stage"] in ("correctness", "triton") and "wrong" in r]
    found["correct"] = sum(not row["wrong"] for row in checks)
    found["checked"] = len(checks)
    programs = [row for row in rows if "lowers" in row]
    if programs:
        found |= {"programs": len(programs), "lower": sum(row["lowers"] for row in programs)}
    speed = [row for row in rows if row["stage"] == "speed" and row.get("best")]
    for operator in dict.fromkeys(row["operator"] for row in speed):
        for kind in ("large", "small"):
            chosen = [
                row
                for row in speed
                if row["operator"] == operator and ("best_inside" in row) == (kind == "small")
            ]
            if not chosen:
                continue
            entry = {
                name: round(statistics.geometric_mean(row[name] for row in chosen), 4)
                for name in ("to_gemm", "to_bound", "speedup")
            }
            closed = [row["gap_closed"] for row in chosen if row["gap_closed"] is not None]
            entry["gap_closed_mean"] = round(statistics.mean(closed), 4) if closed else None
            entry["slowest_to_xla"] = min(row["speedup"] for row in chosen)
            for name in ("speedup_inside", "to_gemm_inside") if kind == "small" else ():
                entry[name] = round(statistics.geometric_mean(row[name] for row in chosen), 4)
            found[f"{operator}, {kind}"] = entry
    return found


def correctness(args: argparse.Namespace) -> Stage:
    """Every backend at once; then what takes many calls."""
    backends = problems.BACKENDS if not args.tiny else ("xla",)
    backends = tuple(b for b in backends if not (args.folded and b == "copy_engine"))
    common = ("--ranks", str(args.ranks))
    common += tuple(f"--{name}" for name in ("folded", "tiny") if getattr(args, name))
    module = f"{HERE}.correct"

    def task(name: str, backend: str, *more: str) -> Task:
        arguments = ("--backend", backend, *common, *more)
        return Task(f"{backend}{name}", module, arguments, 80, SHARING)

    tasks = [task("", b, "--calls", "1" if args.tiny else "6") for b in backends]
    if not args.tiny:
        tasks += [task(" gradients", b, "--calls", "2", "--gradients") for b in backends[:3]]
        tasks += [task(" soak", b, "--calls", "0", "--soak", "1000") for b in backends]
        tasks += [
            task(" late", b, "--calls", "0", "--soak", "200", "--late-us", "200")
            for b in backends
            if b != "copy_engine"
        ]
        even = ("--calls", "4", "--even")
        tasks += [task(" even", b, *even) for b in ("tma_dedicated", "tma_colocated")]
    return Stage("correctness", tuple(tasks), AT_ONCE)


def triton(args: argparse.Namespace) -> list[Stage]:
    """Triton kernels: each backend at once, and then the times of two problems; on GPUs only."""
    if args.tiny or args.lower:
        return []
    backends = ("ldst_dedicated", "ldst_colocated", *(() if args.folded else ("copy_engine",)))
    common = ("--target", problems.TRITON, "--ranks", str(args.ranks))
    common += ("--folded",) if args.folded else ()
    tasks = [
        Task(f"{b}{name}", f"{HERE}.correct", ("--backend", b, *common, *more), 100, SHARING)
        for name, more in (
            ("", ("--calls", "4")),
            (" gradients", ("--calls", "2", "--gradients")),
            (" soak", ("--calls", "0", "--soak", "300")),
        )
        for b in backends
    ]
    timed = speed(args, TRITON_PROBLEMS, problems.TRITON)
    return [Stage("triton", tuple(tasks), AT_ONCE), Stage("triton_speed", timed.tasks)]


def speed(args: argparse.Namespace, numbers: Sequence[int], target: str = "mosaic_gpu") -> Stage:
    """A process a problem, which traces and then takes its turn."""
    common = ["--ranks", str(args.ranks), "--rounds", str(args.rounds)]
    common += ["--block-ms", str(args.block_ms), "--min-calls", str(args.min_calls)]
    flags = ("folded", "tiny", "profile", "rivals", "barriers")
    common += [f"--{name}" for name in flags if getattr(args, name)]
    common += ["--target", target]
    tasks = [
        Task(name_of(args, n), f"{HERE}.measure", ("--problem", str(n), *common), 40, SHARING)
        for n in numbers
    ]
    return Stage("speed", tuple(tasks))


def rivals(args: argparse.Namespace, numbers: Sequence[int]) -> list[Stage]:
    """Rivals in processes of their own: XLA with its flags, PyTorch; and the link itself."""
    ranks = ("--ranks", str(args.ranks))
    tiny = ("--tiny", "--rounds", "1") if args.tiny else ()
    words = (os.environ.get("XLA_FLAGS", ""), *(() if args.tiny else flagged.FLAGS))
    flags = {"XLA_FLAGS": " ".join(words).strip(), **SHARING}
    found = [
        Stage(
            "flagged",
            tuple(
                Task(name_of(args, n), f"{HERE}.flagged", (*ranks, "--problem", str(n), *tiny), 40,
                     flags)
                for n in numbers[:MOST_RIVALS]
            ),
        )
    ]  # fmt: skip
    if not args.tiny and not args.lower:
        chosen = [p for p in (problem(args, n) for n in numbers) if p.operator in TORCH]
        asked = [[p.operator.name, p.name, *p.mkn] for p in chosen[:MOST_RIVALS]]
        if asked:
            given = (json.dumps(asked), str(args.ranks))
            found.append(Stage("torch", (Task("torch", f"{HERE}.torch_rival", given, 100),)))
    if not args.tiny:
        found.append(Stage("link", (Task("link", f"{HERE}.link", (), 60),)))
    return found


def problem(args: argparse.Namespace, number: int) -> Problem:
    return (problems.TINY if args.tiny else problems.PROBLEMS)[number]


def name_of(args: argparse.Namespace, number: int) -> str:
    """A task's name: the operator and the whole product."""
    asked = problem(args, number)
    return f"{asked.operator.name} {'x'.join(map(str, asked.mkn))}"


def present(rows: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    """(stage, task) of which a result file has a row that counts, whenever it was written."""
    found = processes.finished(rows)
    for row in rows:
        timed = row.get("best") or (row["stage"] in ("flagged", "torch") and row.get("median_us"))
        if timed:
            found.add((row["stage"], f"{row['operator']} {row['m']}x{row['k']}x{row['n']}"))
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folded", action="store_true", help="all ranks on one GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny problems, without a GPU")
    parser.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    parser.add_argument("--stages", nargs="*", default=list(STAGES), choices=STAGES)
    parser.add_argument("--problems", type=int, nargs="*", help="numbers; by default all")
    parser.add_argument(
        "--missing", type=pathlib.Path, nargs="*", default=[],
        help="run only what these result files have no row of",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block-ms", type=float, default=8.0, help="length of a timed block")
    parser.add_argument("--min-calls", type=int, default=3, help="calls in a timed block, at least")
    parser.add_argument("--profile", action="store_true", help="also profile the best version")
    parser.add_argument("--rivals", action="store_true", help="also time JAX's fused kernel")
    parser.add_argument("--barriers", action="store_true", help="small ones with XLA's barrier too")
    parser.add_argument("--seconds", type=float, default=540, help="end everything after these")
    parser.add_argument("--commit", help="of the code, where this is no checkout")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.seconds
    listed = problems.TINY if args.tiny else problems.PROBLEMS
    numbers = list(range(len(listed))) if args.problems is None else args.problems
    head = {"experiment": "two_gpus", **processes.environment(args.commit)}
    options = ("ranks", "folded", "rounds", "block_ms", "min_calls")
    head["options"] = {name: getattr(args, name) for name in options}
    found = results.Results(args.out, head, summary)
    have: set[tuple[str, str]] = set()
    for path in args.missing:
        have |= present(json.loads(path.read_text())["rows"])
    left = [n for n in numbers if ("speed", name_of(args, n)) not in have]
    stages = [correctness(args), speed(args, left)]
    stages += [] if args.folded else rivals(args, left)
    stages += triton(args)
    for stage in stages:
        if stage.name in args.stages:
            stage = processes.without(stage, have)
            if args.lower:
                stage = stage.using("--lower", together=2, slower=10)
            if args.lower or args.tiny:
                devices = f"--xla_force_host_platform_device_count={args.ranks}"
                cpu = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
                stage = stage.using(environment=cpu)
            processes.run(stage, found, deadline)
    return found.head


if __name__ == "__main__":
    main()
