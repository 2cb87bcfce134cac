"""Turns results into the choices that ``backend="auto"`` takes, ``syncopate_jax/tune``.

Run from the repository's root; later files count more::

  python -m experiments.two_gpus.choose experiments/results/two_gpus_h200*.json
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

from experiments.common import results
from experiments.two_gpus import problems
from experiments.two_gpus.problems import Problem
from syncopate_jax.registry import operators
from syncopate_jax.tune import measured

NO_SLOWER, FASTER = 0.97, 1.03


def choice(row: dict[str, Any]) -> measured.Choice:
    """Ours where it is faster than XLA alone or inside a program, and nowhere slower."""
    label, alone = row.get("best"), row.get("speedup", 0.0)
    inside = row.get("speedup_inside", 1.0)
    if label is None or min(alone, inside) < NO_SLOWER or max(alone, inside) < FASTER:
        return measured.XLA
    options = problems.options(label)
    communicating = options["launch"].communicating if "launch" in options else None
    return measured.Choice(options["backend"], options.get("split"), communicating)


def entry(row: dict[str, Any], ranks: int) -> tuple[measured.Problem, dict[str, Any]]:
    """One problem's choice, with the times that speak for it in microseconds."""
    operator = next(o for o in problems.OPERATORS if o.name == row["operator"])
    problem = Problem(row["name"], operator, row["m"], row["k"], row["n"])
    spec = operators.get(operator.name)
    how = (spec.kind, spec.place, spec.gather, spec.scatter)
    key = measured.Problem(f"{spec.lhs},{spec.rhs}", *how, ranks, *problem.local(ranks))
    found = {
        "problem": dataclasses.asdict(key),
        "choice": dataclasses.asdict(choice(row)),
        "best_us": row["median_us"].get(row.get("best")),
        "xla_us": row["median_us"]["xla"],
    }
    return key, found


def main(paths: list[str]) -> dict[str, Any]:
    """The file's content, by kind of device."""
    found: dict[str, dict[measured.Problem, Any]] = {}
    for path in paths:
        result = json.loads(pathlib.Path(path).read_text())
        device = result["device"].split("x ", 1)[1]
        rows = [row for row in result["rows"] if row["stage"] == "speed" and "median_us" in row]
        ranks = result["options"]["ranks"]
        found.setdefault(device, {}).update(entry(row, ranks) for row in rows)
    return {device: list(entries.values()) for device, entries in found.items()}


if __name__ == "__main__":
    made = main(sys.argv[1:])
    target = results.ROOT / "syncopate_jax" / "tune" / measured.FILE
    parts = []
    for name, entries in made.items():
        lines = ",\n  ".join(json.dumps(one) for one in entries)
        parts.append(f' "{name}": [\n  {lines}\n ]')
    target.write_text("{\n" + ",\n".join(parts) + "\n}\n")
