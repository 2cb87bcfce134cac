"""Predicted times of operators on GPUs: against what was measured on two, and for four and eight.

From the repository's root, without a GPU; writes ``experiments/results/predicted.json`` and the
tables of ``docs/simulator.md``::

  python -m experiments.simulate.predict            # both; some minutes
  python -m experiments.simulate.predict --tables   # the tables alone, from the JSON
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from experiments.common import results
from experiments.simulate import calibrate, measured, tables
from experiments.simulate.measured import RANKS, Bare, Timed
from experiments.two_gpus import problems
from experiments.two_gpus.problems import Problem
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir import machine
from syncopate_jax.ir.machine import Machine
from syncopate_jax.ops.on_machine import Predicted, predict_call
from syncopate_jax.options import Launch, Options
from syncopate_jax.registry import operators

RESULT = measured.RESULTS / "predicted.json"
MORE_RANKS = (4, 8)
PLANS = {
    "all_gather_matmul": ("all_gather_swizzle", "all_gather_ring", "all_gather_double_ring"),
    "matmul_reduce_scatter": ("reduce_scatter_direct", "reduce_scatter_ring"),
    "matmul_all_reduce": ("all_reduce_two_shot",),
    "all_to_all_matmul": ("all_to_all_waves",),
    "matmul_all_to_all": ("all_to_all_waves",),
}
SPLITS = (1, 4)
CTAS = (4, 8, 16)


def call(
    found: Machine, problem: Problem, ranks: int, options: Options, lag: float | None = None
) -> Predicted:
    """The predicted call of a problem."""
    operator = problem.operator
    x, w = ([*problem.mkn[i : i + 2]] for i in (0, 1))
    for shape, shared in ((x, operator.x), (w, operator.w)):
        if shared is not None:
            shape[shared] //= ranks
    spec = operators.get(operator.name)
    return predict_call(found, spec, (1, *x), tuple(w), ranks, options, lag=lag)


def seconds(found: Machine, row: Timed) -> float:
    """What the clock should have shown for a measured row."""
    label = next(iter(problems.choices(row.problem))) if row.label == "xla" else row.label
    run = measured.BY_FILE[row.file]
    options = Options(**problems.options(label), tiles=run.tiles)
    one = call(found, row.problem, RANKS, options, run.lag)
    device = one.unfused if row.label == "xla" else one.fused
    if row.label != "xla" and options.backend != "copy_engine":
        device += run.barrier
    if row.inside:
        return measured.inside(found, device, row.problem, row.calls)
    return found.timed(device, found.host_exchange, row.calls)


def against_measured(
    found: Machine, rows: Iterable[Timed], note: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Each row beside its prediction, in microseconds."""
    made = []
    for row in rows:
        predicted = seconds(found, row)
        made.append(
            {
                "file": row.file,
                "operator": row.problem.operator.name,
                "mkn": row.problem.mkn,
                "by": row.label,
                "inside": row.inside,
                "predicted_us": round(predicted * 1e6, 1),
                "measured_us": round(row.seconds * 1e6, 1),
                "ratio": round(predicted / row.seconds, 4),
            }
        )
        note(str(made[-1]))
    return made


def error(rows: Iterable[dict[str, Any]]) -> float:
    """Median of how far predictions are off, as a share of the measured time."""
    return round(statistics.median(abs(row["ratio"] - 1) for row in rows), 4)


def held_out(bare: Sequence[Bare], timed: Sequence[Timed]) -> list[dict[str, Any]]:
    """Errors on what a fit has seen nothing of: the other file, the other half of the problems.

    The links were measured once, and serve every fit. The last fit leaves out nothing but the
    times of XLA's kernels, and sees only what a clock showed and what a call has beside a kernel.
    """
    fused = [row for row in timed if row.label != "xla"]
    # Operators that share a product fall into the same half.
    half = {problem.mkn: i % 2 for i, problem in enumerate(problems.PROBLEMS)}
    cuts: dict[str, Callable[[Any], bool]] = {
        file: lambda row, file=file: row.file == file for file in measured.FILES
    }
    for number, name in enumerate(("even problems", "odd problems")):
        cuts[name] = lambda row, number=number: half[row.problem.mkn] == number
    fits = {
        name: (
            [row for row in bare if row.problem is None or not left_out(row)],
            [row for row in fused if left_out(row)],
        )
        for name, left_out in cuts.items()
    }
    clocked = [row for row in bare if not row.what.endswith(" kernel")]
    fits["times of kernels"] = clocked, fused
    found = []
    for name, (used, rows) in fits.items():
        made = against_measured(calibrate.fit(used), rows, lambda _: None)
        found.append({"left_out": name, "rows": len(made), "median_error": error(made)})
    return found


def candidates(problem: Problem) -> Iterator[dict[str, Any]]:
    """Ways to run a problem on more GPUs, as options."""
    name = problem.operator.name
    for plan in PLANS[name]:
        yield {"backend": "tma_colocated", "plan": plan}
        for split in SPLITS:
            yield {"backend": "copy_engine", "plan": plan, "split": split}
            for ctas in CTAS:
                yield {"backend": "tma_dedicated", "plan": plan, "split": split, "ctas": ctas}


def on_more(found: Machine, problem: Problem, ranks: int) -> dict[str, Any]:
    """Predicted device times of a problem by every way there is, in microseconds."""
    ways, refused, why = [], [], ""
    unfused: Predicted | None = None
    for given in candidates(problem):
        options = {k: v for k, v in given.items() if k != "ctas"}
        launch = Launch(communicating=given.get("ctas"))
        try:
            one = call(found, problem, ranks, Options(**options, launch=launch))
        except UnsupportedError as refusal:
            refused.append(given)
            why = str(refusal)
            continue
        unfused = one
        ways.append({**given, "fused_us": round(one.fused * 1e6, 1)})
    if unfused is None:
        raise SystemExit(f"no way to run {problem} on {ranks} GPUs; the last: {why}")
    best = min(ways, key=lambda way: way["fused_us"])
    return {
        "name": problem.name,
        "operator": problem.operator.name,
        "mkn": problem.mkn,
        "ranks": ranks,
        "product_us": round(unfused.product * 1e6, 1),
        "exchange_us": round(unfused.exchange * 1e6, 1),
        "unfused_us": round(unfused.unfused * 1e6, 1),
        "best": best,
        "speedup": round(unfused.unfused * 1e6 / best["fused_us"], 3),
        "ways": ways,
        "refused": refused,
    }


def wanted() -> list[Problem]:
    """The problems that are predicted on more GPUs: those of the models' layers, whole."""
    return [p for p in problems.PROBLEMS if p.name.startswith("llama3-") and p.m >= 4096]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="write the tables from the JSON")
    args = parser.parse_args(argv)
    if not args.tables:
        write(RESULT)
    tables.write(json.loads(RESULT.read_text()))


def write(path: pathlib.Path) -> None:
    """All predictions, as JSON."""
    found = machine.h200()
    bare, timed = measured.read()
    two = against_measured(found, timed)
    fused = [row for row in two if row["by"] != "xla"]
    head = {
        "experiment": "simulate",
        "machine": found.name,
        "measured": [measured.LINKS, *measured.FILES],
        "summary": {
            "fused_rows": len(fused),
            "fused_median_error": error(fused),
            "xla_rows": len(two) - len(fused),
            "xla_median_error": error(row for row in two if row["by"] == "xla"),
        },
        "held_out": held_out(bare, timed),
    }
    rows = [{"gpus": RANKS, **row} for row in two]
    for ranks in MORE_RANKS:
        for problem in wanted():
            one = on_more(found, problem, ranks)
            print(one["operator"], one["mkn"], ranks, one["best"], one["speedup"], flush=True)
            rows.append({"gpus": ranks, **one})
    results.write(path, head, rows)


if __name__ == "__main__":
    main()
