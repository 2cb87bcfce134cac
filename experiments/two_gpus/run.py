"""The fused operators on two GPUs, or on ranks folded onto one, beside every rival: one command.

Run from the repository's root, on a machine with two Hopper GPUs joined by NVLink::

  python -m experiments.two_gpus.run --out experiments/results/two_gpus_h200.json

First every operator and backend is checked, a process a backend, each under a time limit. Then
every problem is timed, most important first. Rows are written as they come, so that a run that is
cut short still counts. ``--folded`` needs one GPU, ``--tiny`` none.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.common import results
from experiments.two_gpus import flagged, problems

STAGES = ("correctness", "speed", "flagged", "torch", "link")
READY_SECONDS = 150  # for all processes to trace and compile
CORRECT_SECONDS = 80
PROBLEM_SECONDS = 40
RIVALS = 6  # problems, the most important, that rivals in processes of their own run too


class Results:
    """Rows by stage, written after each."""

    def __init__(self, path: pathlib.Path, head: dict[str, Any]):
        self.path, self.head = path, head
        self.rows: list[dict[str, Any]] = []

    def add(self, stage: str, row: dict[str, Any]) -> None:
        self.rows.append({"stage": stage, **row})
        print(stage, json.dumps(row)[:600], flush=True)
        self.head["summary"] = summary(self.rows)
        results.write(self.path, self.head, self.rows)


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over the problems of each operator, the small ones apart."""
    found: dict[str, Any] = {}
    rows = list(rows)
    checks = [row for row in rows if row["stage"] == "correctness" and "wrong" in row]
    found["correct"] = sum(not row["wrong"] for row in checks)
    found["checked"] = len(checks)
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


def lines(process: subprocess.Popen[str], seconds: float) -> Iterable[dict[str, Any]]:
    """The JSON lines that a process prints; it is ended after ``seconds``."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)
    timer.cancel()
    process.wait()


def start(module: str, arguments: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    """A stage's process, its standard error in a file beside nothing else."""
    command = [sys.executable, "-m", f"experiments.two_gpus.{module}", *arguments]
    log = pathlib.Path(os.environ.get("TMPDIR", "/tmp")) / f"two_gpus_{module}.log"
    with log.open("a") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=results.ROOT,
            env={**os.environ, **environment},
        )


def check_all(args: argparse.Namespace, found: Results) -> None:
    """Every backend at once, each in a process of its own."""
    backends = problems.BACKENDS if not args.tiny else ("xla",)
    backends = tuple(b for b in backends if not (args.folded and b == "copy_engine"))
    common = ["--ranks", str(args.ranks), *(["--folded"] if args.folded else [])]
    if args.tiny:
        common += ["--calls", "1", "--soak", "0", "--mkn", "16", "16", "16"]
    started = {b: start("correct", ["--backend", b, *common]) for b in backends}
    for backend in () if args.tiny else ("tma_dedicated", "tma_colocated"):
        even = ["--mkn", "256", "192", "256", "--soak", "0"]  # tiles that nothing cuts
        name = f"{backend}, even"
        started[name] = start("correct", ["--backend", backend, *common, *even])
    lock = threading.Lock()

    def collect(backend: str, process: subprocess.Popen[str]) -> None:
        for row in lines(process, CORRECT_SECONDS):
            with lock:
                found.add("correctness", row)
        if process.returncode:
            with lock:
                row = {"backend": backend, "failed": f"ended with {process.returncode}"}
                found.add("correctness", row)

    threads = [threading.Thread(target=collect, args=item) for item in started.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def begin_speed(args: argparse.Namespace, numbers: Sequence[int]) -> list[Any]:
    """A process a problem, which traces and then waits."""
    common = ["--ranks", str(args.ranks), "--rounds", str(args.rounds)]
    common += ["--block-ms", str(args.block_ms), "--min-calls", str(args.min_calls)]
    flags = ("folded", "tiny", "profile", "rivals")
    common += [f"--{name}" for name in flags if getattr(args, name)]
    return [(n, start("measure", ["--problem", str(n), *common])) for n in numbers]


def time_all(started: Sequence[Any], args: argparse.Namespace, found: Results) -> None:
    """Lets one process after the other measure, once all have traced."""
    timers = [threading.Timer(READY_SECONDS, process.kill) for _, process in started]
    for timer in timers:
        timer.start()
    waiting = []
    for (number, process), timer in zip(started, timers, strict=True):
        if process.stdout.readline().strip() == "ready":
            waiting.append((number, process))
        else:
            found.add("speed", {"problem": number, "failed": "did not get ready"})
        timer.cancel()
    for number, process in waiting:
        if time.monotonic() > args.deadline:
            process.kill()
            found.add("speed", {"problem": number, "failed": "left out: out of time"})
            continue
        process.stdin.write("go\n")
        process.stdin.flush()
        rows = list(lines(process, PROBLEM_SECONDS))
        for row in rows:
            found.add("speed", row)
        if not rows:
            found.add("speed", {"problem": number, "failed": f"ended with {process.returncode}"})


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folded", action="store_true", help="all ranks on one GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny problems, without a GPU")
    parser.add_argument("--stages", nargs="*", default=list(STAGES), choices=STAGES)
    parser.add_argument("--problems", type=int, nargs="*", help="numbers; by default all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block-ms", type=float, default=8.0, help="length of a timed block")
    parser.add_argument("--min-calls", type=int, default=3, help="calls in a timed block, at least")
    parser.add_argument("--profile", action="store_true", help="also profile the best version")
    parser.add_argument("--rivals", action="store_true", help="also time JAX's fused kernel")
    parser.add_argument("--seconds", type=float, default=480, help="start nothing after these")
    parser.add_argument("--commit", help="of the code, where this is no checkout")
    args = parser.parse_args(argv)
    args.deadline = time.monotonic() + args.seconds
    listed = problems.TINY if args.tiny else problems.PROBLEMS
    numbers = list(range(len(listed))) if args.problems is None else args.problems
    head = {"experiment": "two_gpus", **environment(args)}
    options = ("ranks", "folded", "rounds", "block_ms", "min_calls")
    head["options"] = {name: getattr(args, name) for name in options}
    found = Results(args.out, head)
    started = begin_speed(args, numbers) if "speed" in args.stages else []
    if "correctness" in args.stages:
        check_all(args, found)
    if started:
        time_all(started, args, found)
    if args.folded:
        return found.head
    if "flagged" in args.stages:
        flags = " ".join((os.environ.get("XLA_FLAGS", ""), *(flagged.FLAGS, ())[args.tiny]))
        arguments = ["--ranks", str(args.ranks), "--problems", *map(str, numbers[:RIVALS])]
        arguments += ["--tiny", "--rounds", "1"] if args.tiny else []
        for row in lines(start("flagged", arguments, XLA_FLAGS=flags), args.seconds / 5):
            found.add("flagged", row)
    if "torch" in args.stages and not args.tiny:
        asked = [
            [p.operator.name, p.name, *p.mkn]
            for p in (listed[n] for n in numbers[:RIVALS])
            if p.operator in (problems.GATHER, problems.SCATTER, problems.REDUCE)
        ]
        process = start("torch_rival", [json.dumps(asked), str(args.ranks)])
        for row in lines(process, args.seconds / 5):
            found.add("torch", row)
    if "link" in args.stages and not args.folded and not args.tiny:
        for row in lines(start("link", []), 60):
            found.add("link", row)
    return found.head


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """As ``results.environment``, asked in a process that ends: this one keeps off the GPUs."""
    code = "import json; from experiments.common import results; print(results.environment())"
    code = code.replace("results.environment()", "json.dumps(results.environment())")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=results.ROOT, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if args.commit:
        found["commit"] = args.commit
    return found


if __name__ == "__main__":
    main()
