"""The experiments on one GPU, without one: what is run, what tools say, and tables of results."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.common import lowering, processes, results
from experiments.hopper import machinery, memory, run, sanitize, stages
from experiments.two_gpus import correct, problems


def test_every_task_is_one_of_a_kind_and_can_be_started() -> None:
    found = stages.stages()
    assert len({stage.name for stage in found}) == len(found)
    assert set(stages.FIRST) | set(stages.NEEDS_GPU) <= {stage.name for stage in found}
    for stage in found:
        assert len({task.name for task in stage.tasks}) == len(stage.tasks)
        for module in {task.module for task in stage.tasks}:
            assert callable(importlib.import_module(module).main)
        for task in stage.tasks:
            if task.module == stages.CORRECT:
                correct.parser().parse_args(list(task.arguments))


def test_limits_leave_time_for_both_commands() -> None:
    """Each task at a third of its limit, in the order in which they run."""

    def expected(stage: processes.Stage) -> float:
        return sum(task.seconds for task in stage.tasks) / 3 / min(stage.together, len(stage.tasks))

    by_name = {stage.name: stage for stage in stages.stages()}
    first = sum(expected(by_name[name]) for name in stages.FIRST)
    rest = sum(expected(stage) for name, stage in by_name.items() if name not in stages.FIRST)
    assert first < 540 and rest < 540


def test_a_run_goes_on_where_one_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(processes, "environment", lambda commit: {"commit": commit})
    monkeypatch.setattr(processes, "run", lambda stage, found, _: asked.append(stage))
    old = tmp_path / "old.json"
    done = {"stage": "memory", "task": "mosaic_gpu/tma_dedicated", "ended": 0}
    cut = {"stage": "memory", "task": "triton/ldst_dedicated", "ended": "out of its time: "}
    old.write_text(json.dumps({"rows": [done, cut]}))
    given = ["--stages", "memory", "--skip-done", str(old), "--out", str(tmp_path / "new.json")]
    head = run.main(given)
    (stage,) = asked
    assert [task.name for task in stage.tasks] == ["triton/ldst_dedicated"]
    assert json.loads((tmp_path / "new.json").read_text())["rows"] == [done]
    assert head["summary"] == {"memory": {"tasks": 1, "ended_well": 1}}
    with pytest.raises(SystemExit):
        run.main(["--stages", "nothing", "--out", str(old)])


def test_rows_are_counted() -> None:
    rows: list[dict[str, Any]] = [
        {"stage": "folded", "wrong": 0},
        {"stage": "folded", "wrong": 2},
        {"stage": "folded", "refused": "it cannot"},
        {"stage": "folded", "lowers": True},
        {"stage": "folded", "ended": 0},
    ]
    assert run.summary(rows) == {
        "folded": {
            "tasks": 1, "ended_well": 1, "checked": 2, "right": 1, "refused": 1,
            "programs": 1, "lower": 1,
        }
    }  # fmt: skip


@pytest.mark.parametrize(
    "said,wrong",
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= Invalid __global__ write of size 4\n========= ERROR SUMMARY: 3 errors\n", 3),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n", 2),
        ("========= COMPUTE-SANITIZER\n", None),
    ],
)
def test_what_the_sanitizer_says(said: str, wrong: int | None) -> None:
    row = sanitize.read(said)
    assert row["wrong"] == wrong
    assert row.get("first", "").startswith("Invalid") == ("Invalid" in said)


def test_without_the_sanitizer_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "find", lambda: None)
    row = sanitize.main(["--tool", "memcheck", "--backend", "tma_dedicated"])
    assert row["found_at"] == "not there" and "values" not in row
    assert processes.read(capsys.readouterr().out) == row


def test_memory_is_read_within_limits() -> None:
    found = memory.main(["--tiny", "--calls", "3"])
    assert (found["asked"], found["calls"], found["most_above_base"]) == (3, 3, 0)


def test_the_table_of_what_machinery_costs(tmp_path: Path) -> None:
    times = {"all": 200.0, "no waits": 199, "no signals": 198, "no sends": 150, "table only": 140}
    rows = [
        {"stage": "machinery", "operator": "o", "backend": "b", "median_us": times},
        {"stage": "machinery", "median_us": {"local kernel": 100.0, "table only": 101.0}},
        {"stage": "machinery", "task": "machinery", "ended": 0},
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": rows}))
    assert machinery.table(path).splitlines()[2:] == [
        "| `o`, `b` | 200 | -0.5% | -1.0% | -25.0% | -30.0% |",
        "",
        "One rank: 100 us in the local kernel's own order,",
        "+1.0% in the table's.",
    ]


def test_the_page_of_kernels_has_the_table_of_the_file() -> None:
    made = machinery.table(results.ROOT / "experiments/results/hopper_machinery_h200.json")
    assert len(made.splitlines()) > 8
    assert made in (results.ROOT / "docs/kernels.md").read_text()


@pytest.mark.slow
def test_kernels_lack_what_is_left_out() -> None:
    """The kernel's text is shorter with each, and is the whole again afterwards."""
    args = argparse.Namespace(tiny=False, ranks=2)

    def size(name: str) -> int:
        jax.clear_caches()
        with machinery.LEFT_OUT[name]():
            variant = machinery.kernels(problems.GATHER, "tma_dedicated", args)[machinery.WHOLE]
            traced = variant.fn.trace(*variant.shapes)
            return len(traced.lower(lowering_platforms=("cuda",)).as_text())

    whole, *others, again = [size(name) for name in (*machinery.LEFT_OUT, machinery.WHOLE)]
    assert abs(again - whole) < 50  # names of source lines differ
    assert max(others) < whole - 100


def test_what_does_not_lower_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    x = jax.ShapeDtypeStruct((2,), "float32")
    assert lowering.lowered("right", lambda x: x + 1, (x,))["lowers"]
    row = lowering.lowered("wrong", lambda x: x.reshape(3), (x,))
    assert row["lowers"] is False and "cannot reshape" in row["failed"]
    (row,) = correct.main([
        "--backend", "ldst_colocated", "--lower", "--folded", "--calls", "1",
        "--operators", "all_gather_matmul",
    ])  # fmt: skip
    assert "brings data to tiles" in row["refused"]
