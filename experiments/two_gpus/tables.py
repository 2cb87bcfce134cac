"""The tables of this folder's README from a result file: problems, those inside programs, aims.

Run from the repository's root::

  python -m experiments.two_gpus.tables experiments/results/two_gpus_h200.json
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.two_gpus.measure import REPEATS
from experiments.two_gpus.problems import BARRIER

MANY = f"{REPEATS} x "
LARGE_M = (4096, 8192)
MODELS = ("llama3-8b", "llama3-70b")
BARS = {
    "all_gather_matmul": 1.03,
    "matmul_reduce_scatter": 1.05,
    "matmul_all_reduce": 1.10,
    "all_to_all_matmul": 1.05,
    "matmul_all_to_all": 1.05,
}
SAME_PRODUCT = ("matmul_reduce_scatter", "matmul_all_reduce")
CLOSED = 0.8

Row = dict[str, Any]
Key = tuple[str, int, int, int]


def key(row: Row) -> Key:
    """What makes rows of two stages the same problem."""
    return row["operator"], row["m"], row["k"], row["n"]


@dataclass(frozen=True, slots=True)
class Found:
    """One problem's row.

    Attributes:
      rivals: least microseconds by stage, of a process of its own in the same run.
      rivals_inside: the same of a call amid a program, where it was timed so.
    """

    row: Row
    rivals: dict[str, float]
    rivals_inside: dict[str, float]

    @property
    def us(self) -> dict[str, float]:
        return self.row["median_us"]

    @property
    def operator(self) -> str:
        return self.row["operator"]

    @property
    def ours(self) -> float:
        return self.us[self.row["best"]]

    @property
    def aimed_at(self) -> bool:
        """Whether the aims for large problems speak of it."""
        model = self.row["name"].partition("/")[0]
        return model in MODELS and self.row["m"] in LARGE_M

    @property
    def inside(self) -> dict[str, float] | None:
        """Microseconds a call of ours, XLA, the product and the exchange, amid a program.

        ``barrier``: of ours with XLA's barrier in place of a greeting.
        """
        if "best_inside" not in self.row:
            return None
        best = self.row["best_inside"]
        labels = {"ours": best}
        if f"{MANY}{best} {BARRIER}" in self.us:
            labels["barrier"] = f"{best} {BARRIER}"
        labels |= {name: name for name in ("xla", "gemm", "exchange") if MANY + name in self.us}
        return {name: self.us[MANY + label] / REPEATS for name, label in labels.items()}

    @property
    def jax(self) -> float | None:
        return min((t for label, t in self.us.items() if label.startswith("jax ")), default=None)


def read(path: pathlib.Path) -> list[Found]:
    """A file's problems, with the fastest of each rival."""
    rows = json.loads(path.read_text())["rows"]
    alone: dict[Key, dict[str, float]] = {}
    inside: dict[Key, dict[str, float]] = {}
    for row in rows:
        if row["stage"] in ("flagged", "torch") and row.get("median_us"):
            times = {label: time for label, time in row["median_us"].items() if label != "gemm"}
            once = [time for label, time in times.items() if not label.startswith(MANY)]
            many = [time / REPEATS for label, time in times.items() if label.startswith(MANY)]
            alone.setdefault(key(row), {})[row["stage"]] = min(once)
            if many:
                inside.setdefault(key(row), {})[row["stage"]] = min(many)
    speed = [row for row in rows if row["stage"] == "speed" and row.get("best")]
    return [Found(row, alone.get(key(row), {}), inside.get(key(row), {})) for row in speed]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [heads, *rows]
    made = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([made[0], "|---" * len(heads) + "|", *made[1:]])


def problem_rows(found: Sequence[Found]) -> Iterator[list[str]]:
    """A line a problem, by operator, with what it took."""
    for operator in BARS:
        for one in sorted((f for f in found if f.operator == operator), key=_size):
            us = one.us
            gap = one.row["gap_closed"]
            rivals = [one.rivals.get(stage) for stage in ("flagged", "torch")]
            yield [
                operator,
                "x".join(str(one.row[letter]) for letter in "mkn"),
                f"{one.ours:.0f}",
                one.row["best"],
                f"{us['xla']:.0f}",
                f"{us['gemm']:.0f}",
                f"{us['exchange']:.0f}",
                f"{one.ours / us['gemm']:.2f}",
                f"{gap:.0%}" if gap is not None else "",
                f"{one.jax:.0f}" if one.jax else "",
                *(f"{rival:.0f}" if rival else "" for rival in rivals),
            ]


def inside_rows(found: Sequence[Found]) -> Iterator[list[str]]:
    """A line a problem that was timed in a program."""
    for operator in BARS:
        for one in sorted((f for f in found if f.operator == operator), key=_size):
            if (times := one.inside) is not None:
                yield [
                    operator,
                    "x".join(str(one.row[letter]) for letter in "mkn"),
                    f"{times['ours']:.0f}",
                    one.row["best_inside"],
                    f"{times['xla']:.0f}",
                    f"{times['gemm']:.0f}",
                    f"{times['exchange']:.0f}",
                    f"{times['xla'] / times['ours']:.2f}",
                    f"{times['ours'] / times['gemm']:.2f}",
                    f"{times['barrier']:.0f}" if "barrier" in times else "",
                    f"{one.us['xla'] / one.ours:.2f}",
                ]


def _size(one: Found) -> tuple[int, ...]:
    return one.row["k"] * one.row["n"], one.row["m"]


def aim_rows(found: Sequence[Found]) -> Iterator[list[str]]:
    """A line an aim: found alone, and with those that were timed in a program taken from there."""
    large = [one for one in found if one.aimed_at]
    for operator, bar in BARS.items():
        mine = [one for one in large if one.operator == operator]
        bound = "all_to_all" in operator
        what = "the larger of product and exchange" if bound else "the product"
        alone = _mean(_to_bound(one) if bound else _to_gemm(one) for one in mine)
        mixed = _mean(_mixed_to_gemm(one, bound) for one in mine)
        aim = f"{operator}: at most {bar:.2f} of {what}"
        yield [aim, f"{alone:.3f}", f"{mixed:.3f}", _verdict(alone <= bar, mixed <= bar)]
    for operator in SAME_PRODUCT:
        mine = [one for one in large if one.operator == operator]
        least = _mean(one.ours / _least_gemm(one, found) for one in mine)
        aim = f"{operator}: the same of the faster of two processes' products"
        yield [aim, f"{least:.3f}", "", _verdict(*[least <= BARS[operator]] * 2)]
    for operator in (*BARS, None):
        mine = [one for one in large if operator in (one.operator, None)]
        alone = _mean(one.row["gap_closed"] for one in mine)
        mixed = _mean(map(_mixed_gap, mine))
        aim = f"{CLOSED:.0%} of the gap closed: {operator or 'all of these'}"
        yield [aim, f"{alone:.0%}", f"{mixed:.0%}", _verdict(alone >= CLOSED, mixed >= CLOSED)]
    for name, share, mixed in (
        ("XLA", [one.us["xla"] / one.ours for one in large], _mixed_to_xla(large)),
        ("XLA with flags", _times_faster(large, "flagged"), _mixed_faster(large, "flagged")),
        ("JAX's kernel", [one.jax / one.ours for one in large if one.jax], None),
        ("PyTorch", _times_faster(large, "torch"), None),
    ):
        aim = f"faster than {name} on every large shape ({len(share)} of {len(large)} compared)"
        yield [
            aim,
            f"{min(share):.3f} at least",
            f"{min(mixed):.3f} at least" if mixed else "",
            _verdict(min(share) > 1, min(mixed or share) > 1),
        ]
    small = [one for one in found if one.row["m"] not in LARGE_M]
    alone = [one.us["xla"] / one.ours for one in small]
    inside = [one.inside["xla"] / one.inside["ours"] for one in small if one.inside]
    yield [
        f"small problems faster than XLA ({len(small)})",
        f"{min(alone):.2f} to {max(alone):.2f}",
        f"{min(inside):.2f} to {max(inside):.2f}",
        _verdict(min(alone) > 1, min(inside) > 1),
    ]


def _mean(values: Iterable[float]) -> float:
    """Geometric; 0 where something was lost."""
    found = [max(value, 0.0) for value in values]
    return math.prod(found) ** (1 / len(found))


def _to_gemm(one: Found) -> float:
    return one.ours / one.us["gemm"]


def _least_gemm(one: Found, found: Iterable[Found]) -> float:
    """XLA tunes a product in every process anew: the fastest of all that multiply the same."""
    like = [f for f in found if key(f.row)[1:] == key(one.row)[1:]]
    return min(f.us["gemm"] for f in like if f.operator in SAME_PRODUCT)


def _to_bound(one: Found) -> float:
    return one.ours / max(one.us["gemm"], one.us["exchange"])


def _mixed_to_gemm(one: Found, bound: bool) -> float:
    """In a program, if it was timed there."""
    if one.inside:
        least = max(one.inside["gemm"], one.inside["exchange"]) if bound else one.inside["gemm"]
        return one.inside["ours"] / least
    return _to_bound(one) if bound else _to_gemm(one)


def _mixed_gap(one: Found) -> float:
    if times := one.inside:
        return (times["xla"] - times["ours"]) / (times["xla"] - times["gemm"])
    return one.row["gap_closed"]


def _times_faster(found: Iterable[Found], stage: str) -> list[float]:
    """A rival's time over ours, where it was timed in a process of its own."""
    return [one.rivals[stage] / one.ours for one in found if stage in one.rivals]


def _mixed_faster(found: Iterable[Found], stage: str) -> list[float]:
    """The same, in a program if both were timed there."""
    return [
        one.rivals_inside[stage] / one.inside["ours"]
        if one.inside and stage in one.rivals_inside
        else one.rivals[stage] / one.ours
        for one in found
        if stage in one.rivals
    ]


def _mixed_to_xla(found: Iterable[Found]) -> list[float]:
    return [
        one.inside["xla"] / one.inside["ours"] if one.inside else one.us["xla"] / one.ours
        for one in found
    ]


def _verdict(alone: bool, inside: bool) -> str:
    if alone == inside:
        return "reached" if alone else "missed"
    return "missed alone, reached in a program" if inside else "reached alone, missed in a program"


PROBLEM_HEADS = (
    "Operator", "M x K x N", "ours", "by", "XLA", "gemm", "exchange", "to gemm", "gap", "JAX",
    "flagged", "PyTorch",
)  # fmt: skip
INSIDE_HEADS = (
    "Operator", "M x K x N", "ours", "by", "XLA", "gemm", "exchange", "faster than XLA", "to gemm",
    "ours with a barrier", "alone, faster than XLA",
)  # fmt: skip
AIM_HEADS = ("Aim", "Alone", "In a program where timed so", "")


def main(path: str) -> str:
    """All three tables."""
    found = read(pathlib.Path(path))
    return "\n\n".join((
        table(PROBLEM_HEADS, problem_rows(found)),
        table(INSIDE_HEADS, inside_rows(found)),
        table(AIM_HEADS, aim_rows(found)),
    ))  # fmt: skip


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
