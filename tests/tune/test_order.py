"""The order of ``compile``'s auto: complete, and what the stored results say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from syncopate_jax.registry import backends
from syncopate_jax.tune.order import MADE, READ, by_speed

RESULTS = Path(__file__).parents[2] / "experiments/results"
KINDS = {
    "copy_engine": "copy_engine",
    "dedicated": "tma_dedicated",
    "colocated": "tma_colocated",
    "triton copy_engine": "copy_engine",
    "triton dedicated": "ldst_dedicated",
    "triton colocated": "ldst_colocated",
}
READERS = ("all_gather_matmul", "all_to_all_matmul")


def test_what_was_measured_comes_first_and_xla_last() -> None:
    """A backend that nothing was measured of has no place, and is asked ahead of ``xla``."""
    on_gpus = [n for n in backends.names() if {"mosaic_gpu", "triton"} & {*backends.get(n).targets}]
    assert sorted(READ) == sorted(MADE) and {*KINDS.values()} <= {*READ} <= {*on_gpus} - {"xla"}
    assert by_speed(("xla", "zebra", "ape", *READ), True) == (*READ, "ape", "zebra", "xla")
    assert by_speed(("xla", *READ), False) == (*MADE, "xla")


@pytest.mark.parametrize("file", ["two_gpus_h200", "two_gpus_triton_h200"])
@pytest.mark.parametrize("reads", [True, False])
def test_the_order_is_that_of_the_measured_means(file: str, reads: bool) -> None:
    """Geometric means of what is over the fastest, of rows that timed several backends alone."""
    excess: dict[str, list[float]] = {}
    for row in json.loads((RESULTS / f"{file}.json").read_text())["rows"]:
        if "speed" not in row["stage"] or "median_us" not in row:
            continue
        if (row["operator"] in READERS) != reads:
            continue
        best: dict[str, float] = {}
        for version, time in row["median_us"].items():
            parts = version.split()
            kind = KINDS.get(" ".join(parts[: 2 if parts[0] == "triton" else 1]))
            if kind:
                best[kind] = min(best.get(kind, math.inf), time)
        if len(best) > 1:
            for kind, time in best.items():
                excess.setdefault(kind, []).append(math.log(time / min(best.values())))
    assert len(excess) > 1
    order = sorted(excess, key=lambda kind: sum(excess[kind]) / len(excess[kind]))
    assert order == list(by_speed(excess, reads))
