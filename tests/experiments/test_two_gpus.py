"""The harness for two GPUs, on simulated devices: the same stages with tiny problems."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common import results
from experiments.two_gpus import choose, correct, flagged, measure, problems, programs, run
from experiments.two_gpus.problems import Problem
from syncopate_jax.ops import fused
from syncopate_jax.ops.blocked import block
from syncopate_jax.options import Launch, Options
from syncopate_jax.registry import operators
from syncopate_jax.tune import measured


def test_a_tiny_problem_is_checked_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--tiny", "--problem", "1", "--rounds", "1", "--min-calls", "1"]
    row = measure.main(given)
    assert json.loads(capsys.readouterr().out) == row
    assert row["best"] == "xla again" and row["wrong"] == [] and row["failed"] == {}
    assert row["errors"]["xla again"] == 0.0
    alone = {"xla", "gemm", "exchange"}
    assert alone | {f"8 x {name}" for name in alone} <= set(row["median_us"])
    assert row["to_gemm_inside"] >= row["to_bound_inside"] > 0 and set(row["host_us"]) == {
        "xla",
        "xla again",
    }


def test_a_wrong_version_never_counts() -> None:
    medians = {"fast": 1.0, "slow": 3.0, "xla": 4.0, "gemm": 2.0, "exchange": 1.0}
    errors = {"fast": 0.1, "slow": 1e-3}
    row = measure.summary(problems.PROBLEMS[0], medians, errors, {"fast": None, "slow": None})
    assert row["best"] == "slow" and row["wrong"] == ["fast"]
    assert (row["to_gemm"], row["speedup"], row["gap_closed"]) == (1.5, 1.3333, 0.5)


SMALL = ["--tiny", "--calls", "1", "--operators", "matmul_reduce_scatter"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--gradients", "--folded"],
        pytest.param(["--folded"], marks=pytest.mark.slow),
        pytest.param(["--gradients"], marks=pytest.mark.slow),
    ],
)
def test_operators_are_checked_against_float64(more: list[str]) -> None:
    (row,) = correct.main([*SMALL, "--backend", "xla", *more])
    assert row["wrong"] == 0 and 0 < row["worst"] < correct.LIMIT


def test_what_is_wrong_counts_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correct, "LIMIT", 1e-4)
    (row,) = correct.main([*SMALL, "--backend", "xla"])
    assert row["wrong"] == 1
    assert correct.off(np.array([np.nan]), np.ones(1)) == np.inf


@pytest.mark.parametrize("more", [[], pytest.param(["--folded"], marks=pytest.mark.slow)])
def test_two_operators_by_turns(more: list[str]) -> None:
    given = ["--tiny", "--calls", "0", "--soak", "2", "--backend", "xla"]
    (row,) = correct.main([*given, *more])
    assert (row["calls"], row["wrong"], row["worst"]) == (4, 0, 0.0)


def test_a_backend_that_cannot_says_why() -> None:
    given = ["--backend", "ldst_colocated", "--folded", "--sms", "1", "--calls", "1"]
    (row,) = correct.main([*given, "--operators", "matmul_reduce_scatter"])
    assert "needs at least 1 CTA a rank" in row["refused"]


def test_versions_left_to_the_partitioner_are_timed() -> None:
    row = flagged.main(["--tiny", "--problem", "2", "--rounds", "1"])
    assert set(row["median_us"]) == {"written", "partitioned", "8 x written", "gemm"}


def test_what_a_file_lacks() -> None:
    timed = {"operator": "matmul_all_reduce", "m": 8, "k": 16, "n": 4, "median_us": {"xla": 1.0}}
    rows = [
        {"stage": "speed", "best": "colocated", **timed},
        {"stage": "flagged", **timed},
        {"stage": "speed", "problem": 3, "failed": "left out: out of time"},
        {"stage": "correctness", "task": "tma_dedicated", "ended": 0},
        {"stage": "correctness", "task": "ldst_dedicated", "ended": "out of its time: "},
    ]
    name = "matmul_all_reduce 8x16x4"
    wanted = {("speed", name), ("flagged", name), ("correctness", "tma_dedicated")}
    assert run.present(rows) == wanted


def test_rows_are_summed_up_by_operator(tmp_path: Path) -> None:
    found = results.Results(tmp_path / "out.json", {"experiment": "two_gpus"}, run.summary)
    common: dict[str, Any] = {"operator": "o", "best": "b", "gap_closed": 0.9}
    for to_gemm in (1.0, 1.21):
        row = common | {"to_gemm": to_gemm, "to_bound": to_gemm, "speedup": 1.5}
        found.add("speed", row)
    found.add("correctness", {"wrong": 1})
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["summary"]["o, large"]["to_gemm"] == 1.1
    assert written["summary"]["checked"] == 1 and written["summary"]["correct"] == 0
    assert len(written["rows"]) == 3


def test_a_label_says_its_options() -> None:
    found = problems.options("dedicated 8/1")
    assert found == {"backend": "tma_dedicated", "launch": Launch(communicating=8), "split": 1}
    assert problems.options("copy_engine /4") == {"backend": "copy_engine", "split": 4}
    assert problems.options("colocated") == {"backend": "tma_colocated"}


def test_every_large_problem_has_choices_that_are_known() -> None:
    for problem in problems.PROBLEMS:
        choices = problems.choices(problem)
        assert 1 <= len(choices) <= 3
        for options in choices.values():
            assert options["backend"] in problems.BACKENDS
    assert problems.PROBLEMS[1].local(2) == (4096, 7168, 4096)


def tiles(problem: Problem, options: dict[str, Any]) -> tuple[tuple[int, int], int]:
    """Rows and columns of a tile on one of two H200s, and the number of tiles."""
    operator, spec = problem.operator, operators.get(problem.operator.name)
    x, w = ([*problem.mkn[i : i + 2]] for i in (0, 1))
    for shape, shared in ((x, operator.x), (w, operator.w)):
        if shared is not None:
            shape[shared] //= 2
    layout = block(spec, (1, *x), tuple(w), 2)
    given = Options(**options)
    _, kernel, _ = fused.prepare(
        spec.kind, layout, "bfloat16", "bfloat16", given, target="mosaic_gpu"
    )
    config = kernel.loop.config
    axes = set(range(len(kernel.grid))) - set(kernel.reduction_axes)
    return (config.tile_m, config.tile_n), math.prod(kernel.grid[i] for i in axes)


def test_large_problems_have_wide_tiles_and_small_ones_enough_tiles() -> None:
    few = []
    for problem in problems.PROBLEMS:
        for options in problems.choices(problem).values():
            tile, count = tiles(problem, options)
            assert count >= 100
            if not problem.small:
                assert tile == (128, 256), problem
            if problem.m == 512:
                few.append((tile, count))
    assert set(few) == {((128, 128), 128)}


def speed_row(**times: float) -> dict[str, Any]:
    """XLA takes 100 microseconds alone, 800 for eight in a program."""
    ours = [label for label in times if not label.startswith("8 x ")]
    medians = {"xla": 100.0, "8 x xla": 800.0, **times}
    return {"median_us": medians, "errors": dict.fromkeys([*ours, "jax 8"], 0.0), "wrong": []}


def test_what_is_chosen_is_faster_somewhere_and_slower_nowhere() -> None:
    def chosen(**times: float) -> str | None:
        return choose.choice(speed_row(**times))[1]

    assert chosen(colocated=80) == "colocated"
    assert chosen(colocated=99) is None
    assert chosen(colocated=102, **{"8 x colocated": 700}) == "colocated"
    assert chosen(colocated=104, **{"8 x colocated": 700}) is None
    # The fastest alone is slow inside a program, and the other way round.
    copies, kernel = {"8 x copy_engine": 900.0}, {"8 x colocated": 600.0}
    assert chosen(copy_engine=70, colocated=110, **copies, **kernel) is None
    assert chosen(copy_engine=70, colocated=98, **copies, **kernel) == "colocated"
    wrong = speed_row(colocated=80) | {"wrong": ["colocated"]}
    assert choose.choice(wrong) == (measured.XLA, None)


def test_the_choices_that_are_kept_are_those_of_the_newest_file() -> None:
    kept = json.loads((results.ROOT / "syncopate_jax/tune" / measured.FILE).read_text())
    assert choose.main([str(results.ROOT / "experiments/results/two_gpus_h200.json")]) == kept


def test_a_version_of_pytorch_that_fails_is_named_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("", ".distributed", ".distributed._symmetric_memory", ".multiprocessing"):
        monkeypatch.setitem(sys.modules, f"torch{name}", mock.MagicMock(__version__="0"))
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # the worker's own, gone again after the test
        monkeypatch.setenv(name, "")
    rival = importlib.import_module("experiments.two_gpus.torch_rival")
    monkeypatch.delitem(sys.modules, rival.__name__)
    operators = {"nccl": lambda: None, "fused": mock.Mock(side_effect=AttributeError("none"))}
    monkeypatch.setattr(rival, "versions", lambda *_: operators)
    monkeypatch.setattr(rival, "timed", lambda fn, _: fn() or 5.0)
    found = "all but 1: fused of matmul_all_reduce 8x16x4: AttributeError: none"
    with pytest.raises(RuntimeError, match=found):
        rival.worker(0, 2, [["matmul_all_reduce", "p", 8, 16, 4]])
    row = json.loads(capsys.readouterr().out)
    assert (row["median_us"], row["failed"]) == ({"nccl": 5.0}, {"fused": "AttributeError: none"})


def test_repeated_programs_keep_their_input() -> None:
    fn = programs.repeated(jnp.matmul, 3)
    x = jnp.arange(16.0).reshape(4, 4)
    assert (fn(x, x) == x).all()
