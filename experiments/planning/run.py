"""How long building, verifying and executing plans takes as the number of ranks grows, and how long
scheduling a matrix product beside them takes.

Run from the root of the repository: ``python experiments/planning/run.py``.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from syncopate_jax.check.goals import run_goals
from syncopate_jax.check.verify import verify
from syncopate_jax.check.verify_schedule import verify_schedule
from syncopate_jax.ir.plan import Plan
from syncopate_jax.kernel.access import Access
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.tiles import Axis, TileSpace
from syncopate_jax.passes.schedule_plan import schedule_plan
from syncopate_jax.registry import templates

RESULTS = Path(__file__).parent.parent / "results"
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
EXECUTED_OPERATIONS = 20_000
"""The oracle goes through operations one by one; larger plans are not executed."""


@dataclass(frozen=True, slots=True)
class Case:
    """A template and its arguments, with 4 rows a rank and split, and 64 columns."""

    template: str
    largest: int = 1024
    split: int = 1
    two_dimensional: bool = False

    @property
    def label(self) -> str:
        return f"{self.template}, split {self.split}" if self.split > 1 else self.template

    def build(self, ranks: int) -> Plan:
        columns = 4 * ranks if self.two_dimensional else 64
        shape = (4 * ranks * self.split, columns)
        return templates.get(self.template)(ranks, shape, split=self.split)


CASES = (
    Case("all_gather_swizzle"),
    Case("all_gather_swizzle", largest=256, split=8),
    Case("all_gather_ring"),
    Case("reduce_scatter_direct"),
    Case("reduce_scatter_ring"),
    Case("all_reduce_two_shot"),
    Case("all_to_all_waves", two_dimensional=True),
)


SCHEDULES = (
    ("all_gather_swizzle", 8, 8, 4096),
    ("reduce_scatter_direct", 8, 8, 4096),
    ("reduce_scatter_ring", 8, 8, 4096),
    ("all_gather_swizzle", 64, 1, 16384),
    ("reduce_scatter_direct", 64, 1, 16384),
)
"""Template, ranks, split, and rows and columns of the product, in tiles of 128 x 128."""


def measure_schedule(template: str, ranks: int, split: int, size: int) -> dict[str, Any]:
    """A matrix product beside a plan: the best times to schedule and to verify that, in ms.

    ``load_average`` says how many processes wanted the machine's cores: above their number, times
    on the clock say little, and processor times are longer than on an idle machine, too.
    """
    gathers = template.startswith("all_gather")
    plan = templates.get(template)(ranks, (size, 4096 if gathers else size), split=split)
    axes = (Axis("m", size, 128), Axis("n", size, 128), Axis("k", 4096, 4096, reduction=True))
    accesses = {
        "x": Access("x", (size, 4096), ("m", "k")),
        "y": Access("y", (size, size), ("m", "n"), write=True),
    }
    moved = AxisMap.of({"x": "x"} if gathers else {"y": "y"})
    space = TileSpace(axes)
    times: dict[str, list[float]] = {}
    for _ in range(5 if ranks <= 8 else 2):
        schedule = _timed(times, "schedule", lambda: schedule_plan(plan, space, accesses, moved))
        findings = _timed(
            times,
            "verify_schedule",
            lambda made=schedule: verify_schedule(made, space, accesses, moved),
        )
        if findings:
            raise RuntimeError(f"schedule of {template} over {ranks} ranks: {findings[0]}")
    return {
        "template": template,
        "ranks": ranks,
        "split": split,
        "tiles": schedule.num_tiles,
        "load_average": round(os.getloadavg()[0], 1),
        **{name: round(min(found), 2) for name, found in times.items()},
    }


def measure(case: Case, ranks: int, repeat: int) -> dict[str, Any]:
    """One plan: the best of ``repeat`` times in ms, and the peak memory of this process in MiB.

    ``build_ms`` and ``verify_ms`` are time on the clock, ``build_cpu_ms`` and ``verify_cpu_ms``
    that of this process, which other work on the machine disturbs less.
    """
    times: dict[str, list[float]] = {}
    case.build(2)  # imports the templates
    for _ in range(repeat):
        plan = _timed(times, "build", lambda: case.build(ranks))
        findings = _timed(times, "verify", lambda plan=plan: verify(plan))
        if findings:
            raise RuntimeError(f"{case.label} over {ranks} ranks: {findings[0]}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if plan.num_ops <= EXECUTED_OPERATIONS:
        times["execute_ms"] = [_execute_ms(plan)]
    return {
        "case": case.label,
        **asdict(case),
        "ranks": ranks,
        "operations": plan.num_ops,
        "dependencies": len(plan.columns.dep_rank) + len(plan.columns.cdep_rank),
        **{name: round(min(found), 2) for name, found in times.items()},
        "peak_mib": round(peak),
    }


def _timed[T](times: dict[str, list[float]], name: str, work: Callable[[], T]) -> T:
    clock, own = time.perf_counter(), time.process_time()
    result = work()
    times.setdefault(f"{name}_ms", []).append(1e3 * (time.perf_counter() - clock))
    times.setdefault(f"{name}_cpu_ms", []).append(1e3 * (time.process_time() - own))
    return result


def _execute_ms(plan: Plan) -> float:
    values = {
        tensor.name: np.ones(
            ((plan.num_ranks,) if tensor.per_rank else ()) + tensor.shape, np.float32
        )
        for tensor in plan.tensors
    }
    start = time.perf_counter()
    outcomes = run_goals(plan, values, accumulate=np.float32)
    elapsed = 1e3 * (time.perf_counter() - start)
    if not all(np.array_equal(one.found, one.expected) for one in outcomes):
        raise RuntimeError(f"{plan.name}: executing it gave wrong values")
    return elapsed


def measure_all(largest: int) -> list[dict[str, Any]]:
    """Each plan in a process of its own, so that its peak memory is its own, too."""
    rows = []
    for i, case in enumerate(CASES):
        for ranks in RANKS:
            if ranks > min(largest, case.largest):
                continue
            command = [sys.executable, __file__, "--case", str(i), "--ranks", str(ranks)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{case.label} over {ranks} ranks failed:\n{done.stderr}")
            rows.append(json.loads(done.stdout))
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Processor time to build and verify against the size of the plan, with a line of slope 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")

    def size(row: dict[str, Any]) -> int:
        return row["operations"] + row["dependencies"]

    def spent(row: dict[str, Any]) -> float:
        return row["build_cpu_ms"] + row["verify_cpu_ms"]

    for label in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == label]
        axes.loglog([size(r) for r in mine], [spent(r) for r in mine], "o-", label=label, ms=3)
    last = max(rows, key=size)
    x = np.array([size(min(rows, key=size)), size(last)])
    axes.loglog(x, x / size(last) * spent(last), "k:", label="linear")
    axes.set_xlabel("operations + dependencies")
    axes.set_ylabel("build + verify, processor time (ms)")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def plot_schedules(rows: list[dict[str, Any]], path: Path) -> None:
    """Processor time to schedule and to verify the schedule, a pair of bars each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    place = np.arange(len(rows))
    for i, name in enumerate(("schedule", "verify_schedule")):
        spent = [row[f"{name}_cpu_ms"] for row in rows]
        axes.bar(place + 0.4 * i - 0.2, spent, 0.4, label=name)
    axes.set_yscale("log")
    labels = [f"{r['template']}\n{r['ranks']} ranks, {r['tiles']} tiles" for r in rows]
    axes.set_xticks(place, labels, fontsize=5)
    axes.set_ylabel("processor time (ms)")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=1024, help="most ranks to measure")
    parser.add_argument("--out", type=Path, default=RESULTS / "planning.json")
    parser.add_argument(
        "--schedules", action="store_true", help="measure schedules only, and keep other figures"
    )
    parser.add_argument("--no-plot", action="store_true")
    parser.add_argument("--case", type=int, help="measure one case only, and print it")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of that case")
    given = parser.parse_args()
    if given.case is not None:
        print(json.dumps(measure(CASES[given.case], given.ranks, 2 if given.ranks > 256 else 5)))
        return
    schedules = [measure_schedule(*each) for each in SCHEDULES]
    if given.schedules:
        stored = json.loads(given.out.read_text())
        given.out.write_text(json.dumps({**stored, "schedules": schedules}, indent=1) + "\n")
        plot_schedules(schedules, given.out.with_name("planning_schedules.png"))
        return
    rows = measure_all(given.largest)
    machine = {
        "python": platform.python_version(), "numpy": np.__version__,
        "machine": platform.machine(), "cores": os.cpu_count(),
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        json.dumps({"device": machine, "rows": rows, "schedules": schedules}, indent=1) + "\n"
    )
    if not given.no_plot:
        plot(rows, given.out.with_suffix(".png"))
        plot_schedules(schedules, given.out.with_name("planning_schedules.png"))


if __name__ == "__main__":
    main()
