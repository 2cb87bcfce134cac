"""The tables of ``docs/simulator.md``, from ``experiments/results/predicted.json``."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.common import results
from experiments.simulate import measured
from syncopate_jax.ir import machine

DOCS = results.ROOT / "docs" / "simulator.md"
BACKENDS = {
    "copy_engine": "copy engine",
    "tma_dedicated": "dedicated",
    "tma_colocated": "colocated",
}
KINDS = re.compile("^(all_gather|reduce_scatter|all_reduce|all_to_all)_")  # before a plan's name
UNITS = {"bandwidth": (1e-9, "GB/s"), "flops": (1e-12, "TFLOP/s"), "step_seconds": (1e9, "ns")}


def write(found: dict[str, Any]) -> None:
    """Puts the tables where the page has marks for them."""
    text = DOCS.read_text()
    for name, body in made(found).items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = mark.subn(lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text)
        if count != 1:
            raise SystemExit(
                f"{DOCS}: needs the mark '<!-- {name} -->' once, found it {count} times"
            )
    DOCS.write_text(text)


def made(found: dict[str, Any]) -> dict[str, str]:
    """Each table by the name of its mark."""
    two = [row for row in found["rows"] if row["gpus"] == measured.RANKS]
    more = [row for row in found["rows"] if row["gpus"] != measured.RANKS]
    return {
        "figures": figures(),
        "errors": errors(found, two),
        "by operator": by_operator(two),
        "two gpus": against(row for row in two if row["by"] != "xla"),
        "unfused": against(row for row in two if row["by"] == "xla"),
        "more gpus": ways(more),
    }


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def figures() -> str:
    """The machine's figures, in units that people read."""
    rows = []
    for name, value in dataclasses.asdict(machine.h200()).items():
        if not isinstance(value, float):
            continue
        ends = (unit for end, unit in UNITS.items() if name.endswith(end))
        factor, unit = next(ends, (1e6, "us"))
        rows.append((f"`{name}`", f"{value * factor:.4g} {unit}"))
    return table(("figure", "value"), rows)


def errors(found: dict[str, Any], two: Sequence[dict[str, Any]]) -> str:
    """How far off predictions are, of everything and of what a fit has not seen."""
    fused = [row["ratio"] for row in two if row["by"] != "xla"]
    xla = [row["ratio"] for row in two if row["by"] == "xla"]
    rows = [
        (what, len(ratios), percent(statistics.median(abs(r - 1) for r in ratios)), near(ratios))
        for what, ratios in (("fused operators", fused), ("XLA's unfused programs", xla))
    ]
    rows += [
        (f"fused, fitted without: {one['left_out']}", one["rows"], percent(one["median_error"]), "")
        for one in found["held_out"]
    ]
    return table(("predicted", "rows", "median error", "within 10%"), rows)


def near(ratios: Sequence[float]) -> str:
    return percent(sum(abs(ratio - 1) <= 0.1 for ratio in ratios) / len(ratios))


def percent(share: float) -> str:
    return f"{share:.1%}"


def by_operator(two: Sequence[dict[str, Any]]) -> str:
    """Median of predicted over measured by operator and backend, and what a wave lacks."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in two:
        if row["by"] != "xla":
            by = row["by"].split(" ")[0].replace("_", " ")
            groups.setdefault((row["operator"], by), []).append(row["ratio"])
    rows = [
        (operator, by, len(ratios), f"{statistics.median(ratios):.3f}", f"{min(ratios):.2f}")
        for (operator, by), ratios in sorted(groups.items())
    ]
    return table(("operator", "by", "rows", "median of predicted / measured", "lowest"), rows)


def against(rows: Iterable[dict[str, Any]]) -> str:
    """Measured and predicted microseconds, the runs beside each other."""
    merged: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        key = row["operator"], tuple(row["mkn"]), row["by"].replace("_", " "), row["inside"]
        merged.setdefault(key, {})[row["file"]] = row
    lines = []
    for (operator, mkn, by, inside), found in sorted(merged.items()):
        cells = []
        for file in measured.FILES:
            one = found.get(file)
            cells += (
                [f"{one['measured_us']:.0f}", f"{one['predicted_us']:.0f}", f"{one['ratio']:.2f}"]
                if one
                else [""] * 3
            )
        where = "8 in a program" if inside else "alone"
        lines.append((operator, "x".join(map(str, mkn)), by, where, *cells))
    each = ("measured", "predicted", "ratio") * len(measured.FILES)
    return table(("operator", "M x K x N", "by", "", *each), lines)


def ways(rows: Iterable[dict[str, Any]]) -> str:
    """Predictions for more GPUs: the best of each backend, over plans, pieces and CTAs."""
    lines = []
    for row in sorted(rows, key=lambda r: (r["operator"], r["mkn"], r["gpus"])):
        cells = []
        for backend in BACKENDS:
            own = [way for way in row["ways"] if way["backend"] == backend]
            cells.append(cell(min(own, key=lambda w: w["fused_us"])) if own else "")
        alone = (f"{row[key]:.0f}" for key in ("product_us", "exchange_us"))
        mkn = "x".join(map(str, row["mkn"]))
        lines.append((row["operator"], mkn, row["gpus"], *alone, *cells, f"{row['speedup']:.2f}"))
    head = ("operator", "M x K x N", "GPUs", "product", "exchange", *BACKENDS.values(), "speed-up")
    return table(head, lines)


def cell(way: dict[str, Any]) -> str:
    """Microseconds, and how: plan, CTAs that communicate, pieces of a chunk."""
    how = [KINDS.sub("", way["plan"])]
    how += [f"{way['ctas']} CTAs"] if "ctas" in way else []
    how += [f"/{way['split']}"] if way.get("split", 1) > 1 else []
    return f"{way['fused_us']:.0f} ({', '.join(how)})"
