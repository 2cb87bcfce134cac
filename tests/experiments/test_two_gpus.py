"""The harness for two GPUs, on simulated devices: the same stages with tiny problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from experiments.two_gpus import choose, correct, flagged, measure, problems, programs, run
from experiments.two_gpus.programs import Ranks
from syncopate_jax.tune import measured


def test_a_tiny_problem_is_checked_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--tiny", "--problem", "1", "--at-once", "--rounds", "1", "--min-calls", "1"]
    row = measure.main(given)
    assert json.loads(capsys.readouterr().out) == row
    assert row["best"] == "xla again" and row["wrong"] == [] and row["failed"] == {}
    assert row["errors"]["xla again"] == 0.0
    assert {"xla", "gemm", "exchange", "8 x xla", "8 x gemm"} <= set(row["median_us"])
    assert row["to_gemm_inside"] > 0


def test_a_wrong_version_never_counts() -> None:
    medians = {"fast": 1.0, "slow": 3.0, "xla": 4.0, "gemm": 2.0, "exchange": 1.0}
    errors = {"fast": 0.1, "slow": 1e-3}
    row = measure.summary(problems.PROBLEMS[0], medians, errors, {"fast": None, "slow": None})
    assert row["best"] == "slow" and row["wrong"] == ["fast"]
    assert (row["to_gemm"], row["speedup"], row["gap_closed"]) == (1.5, 1.3333, 0.5)


@pytest.mark.parametrize("folded", [False, True])
def test_operators_are_checked_against_float64(folded: bool) -> None:
    ranks = Ranks(2, folded)
    row = correct.check(problems.SCATTER, "xla", ranks, (32, 32, 32), 1)
    assert row["wrong"] == 0 and 0 < row["worst"] < correct.LIMIT


def test_a_backend_that_cannot_says_why() -> None:
    row = correct.check(problems.SCATTER, "ldst_colocated", Ranks(2, True), (32, 32, 32), 1)
    assert "multiprocessors" in row["refused"]


def test_versions_left_to_the_partitioner_are_timed() -> None:
    (row,) = flagged.main(["--tiny", "--problems", "2", "--rounds", "1"])
    assert set(row["median_us"]) == {"written", "partitioned", "gemm"}


def test_rows_are_summed_up_by_operator(tmp_path: Path) -> None:
    found = run.Results(tmp_path / "out.json", {"experiment": "two_gpus"})
    common: dict[str, Any] = {"operator": "o", "best": "b", "gap_closed": 0.9}
    for to_gemm in (1.0, 1.21):
        row = common | {"to_gemm": to_gemm, "to_bound": to_gemm, "speedup": 1.5}
        found.add("speed", row)
    found.add("correctness", {"wrong": 1})
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["summary"]["o, large"]["to_gemm"] == 1.1
    assert written["summary"]["checked"] == 1 and written["summary"]["correct"] == 0
    assert len(written["rows"]) == 3


def test_every_large_problem_has_choices_that_are_known() -> None:
    for problem in problems.PROBLEMS:
        for options in problems.choices(problem).values():
            assert options["backend"] in problems.BACKENDS
    assert problems.PROBLEMS[1].local(2) == (4096, 7168, 4096)


def test_what_is_chosen_is_faster_somewhere_and_slower_nowhere() -> None:
    problem = problems.PROBLEMS[1]
    assert choose.choice({"best": "colocated", "speedup": 1.2}, problem).backend == "tma_colocated"
    small = {"best": "colocated", "speedup": 0.98, "speedup_inside": 1.1}
    assert choose.choice(small, problem).backend == "tma_colocated"
    assert choose.choice(small | {"speedup": 0.9}, problem) == measured.XLA
    assert choose.choice({"best": "colocated", "speedup": 1.01}, problem) == measured.XLA


def test_repeated_programs_keep_their_input() -> None:
    fn = programs.repeated(jnp.matmul, 3)
    x = jnp.arange(16.0).reshape(4, 4)
    assert (fn(x, x) == x).all()
