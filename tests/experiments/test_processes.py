"""Stages as processes: rows as they come, limits, turns, and what has been done before."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.common import processes, results
from experiments.common.processes import Stage, Task

TASKS = """
import sys, time
from experiments.common import processes
kind = sys.argv[1]
print({"not": "a row"})
if kind == "turn":
    processes.wait_turn()
    begun = time.time()
    time.sleep(0.2)
    processes.emit({"begun": begun, "done": time.time()})
if kind == "slow":
    time.sleep(60)
if kind == "hang":
    processes.emit({"first": 1})
    print('{"cut": "sho', end="", flush=True)
    time.sleep(60)
if kind == "orphan":
    import os, signal, subprocess
    subprocess.Popen(["sleep", "40"])
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "fail":
    raise SystemExit("no such thing")
"""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> results.Results:
    (tmp_path / "tasks_of_this_test.py").write_text(TASKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return results.Results(tmp_path / "out.json", {"experiment": "e"}, lambda rows: {})


def stage(*kinds: str, together: int = 1, seconds: float = 20) -> Stage:
    tasks = tuple(
        Task(f"{i} {kind}", "tasks_of_this_test", (kind,), seconds) for i, kind in enumerate(kinds)
    )
    return Stage("s", tasks, together)


def ends(found: results.Results) -> dict[str, Any]:
    return {row["task"]: row["ended"] for row in found.rows if "ended" in row}


def test_one_at_a_time_and_what_went_wrong(found: results.Results) -> None:
    processes.run(stage("turn", "turn", "fail"), found, time.monotonic() + 60)
    first, second = (row for row in found.rows if "begun" in row)
    assert first["done"] <= second["begun"]
    ended = ends(found)
    assert (ended["0 turn"], ended["1 turn"]) == (0, 0)
    assert ended["2 fail"] == "ended with 1: no such thing"
    assert json.loads(found.path.read_text())["rows"] == found.rows


def test_who_is_not_ready_in_time_costs_nobody_else(
    found: results.Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "READY_SECONDS", 5)
    processes.run(stage("slow", "turn"), found, time.monotonic() + 60)
    assert ends(found)["0 slow"].startswith("out of its time") and ends(found)["1 turn"] == 0


def test_a_task_is_ended_and_its_rows_kept(found: results.Results) -> None:
    processes.run(stage("hang", "turn", together=2, seconds=5), found, time.monotonic() + 60)
    assert [row["first"] for row in found.rows if "first" in row] == [1]
    assert ends(found)["0 hang"].startswith("out of its time") and ends(found)["1 turn"] == 0


def test_nothing_begins_after_the_end(found: results.Results) -> None:
    processes.run(stage("turn", "turn"), found, time.monotonic() - 1)
    assert set(ends(found).values()) == {"left out: out of time"}


def test_a_dry_run_has_more_time() -> None:
    (task,) = stage("turn", seconds=3).using("--tiny", environment={"A": "b"}, slower=10).tasks
    assert (task.arguments, task.environment, task.seconds) == (("turn", "--tiny"), {"A": "b"}, 30)


def test_what_is_done_is_left_out() -> None:
    rows = [
        {"stage": "s", "task": "0 turn", "ended": 0},
        {"stage": "s", "task": "1 hang", "ended": "out of its time: "},
        {"stage": "other", "task": "2 fail", "ended": 0},
    ]
    left = processes.without(stage("turn", "hang", "fail"), processes.finished(rows))
    assert [task.name for task in left.tasks] == ["1 hang", "2 fail"]


def test_a_child_that_holds_the_output(found: results.Results) -> None:
    begun = time.monotonic()
    processes.run(stage("orphan", seconds=2), found, begun + 60)
    assert time.monotonic() - begun < 30
    assert ends(found)["0 orphan"].startswith("ended with -9")
