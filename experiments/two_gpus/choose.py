"""Turns results into the choices that ``backend="auto"`` takes, ``syncopate_jax/tune``.

Run from the repository's root; later files count more, so that the newest is the last::

  python -m experiments.two_gpus.choose experiments/results/two_gpus_h200.json
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

from experiments.common import results
from experiments.two_gpus import measure, problems
from experiments.two_gpus.problems import Problem
from syncopate_jax.registry import operators
from syncopate_jax.tune import measured

NO_SLOWER, FASTER = 0.97, 1.03


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """One of ours, by how often its time goes into XLA's.

    Attributes:
      inside: the same in the middle of a program; None where that was not timed.
    """

    label: str
    alone: float
    inside: float | None

    @property
    def counts(self) -> bool:
        """Whether it is faster than XLA alone or inside a program, and in neither slower."""
        found = [self.alone] if self.inside is None else [self.alone, self.inside]
        return min(found) >= NO_SLOWER and max(found) >= FASTER

    @property
    def gain(self) -> float:
        return self.alone * (self.inside or self.alone)


def versions(row: dict[str, Any]) -> list[Version]:
    """Ours that gave the right result."""
    times, many = row["median_us"], f"{measure.REPEATS} x "
    return [
        Version(
            label,
            times["xla"] / times[label],
            times[many + "xla"] / times[many + label] if many + label in times else None,
        )
        for label in row["errors"]
        if label not in row["wrong"] and not label.startswith("jax ")
        if problems.BARRIER not in label
    ]


def choice(row: dict[str, Any]) -> tuple[measured.Choice, str | None]:
    """The version that gains most over XLA, and its label; where none counts, XLA's own."""
    best = max((v for v in versions(row) if v.counts), key=lambda v: v.gain, default=None)
    if best is None:
        return measured.XLA, None
    options = problems.options(best.label)
    communicating = options["launch"].communicating if "launch" in options else None
    return measured.Choice(options["backend"], options.get("split"), communicating), best.label


def entry(row: dict[str, Any], ranks: int) -> tuple[measured.Problem, dict[str, Any]]:
    """One problem's choice, with the times that speak for it in microseconds.

    ``best_us`` is of the version chosen, or of the fastest of ours where that is XLA's.
    """
    operator = next(o for o in problems.OPERATORS if o.name == row["operator"])
    problem = Problem(row["name"], operator, row["m"], row["k"], row["n"])
    spec = operators.get(operator.name)
    how = (spec.kind, spec.place, spec.gather, spec.scatter)
    key = measured.Problem(f"{spec.lhs},{spec.rhs}", *how, ranks, *problem.local(ranks))
    chosen, label = choice(row)
    found = {
        "problem": dataclasses.asdict(key),
        "choice": dataclasses.asdict(chosen),
        "best_us": row["median_us"].get(label or row.get("best")),
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
