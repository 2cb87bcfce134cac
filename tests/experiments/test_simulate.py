"""The simulator against measured times: the fit, what it predicts, and the page that says so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from experiments.simulate import calibrate, measured, predict, tables
from experiments.two_gpus import problems
from experiments.two_gpus.problems import Problem
from syncopate_jax.ir import machine

FOUND = json.loads(predict.RESULT.read_text())
TWO = [row for row in FOUND["rows"] if row["gpus"] == measured.RANKS]
AIM = 0.1


def test_the_fit_can_be_made_again(tmp_path: Path) -> None:
    fitted = calibrate.main(tmp_path / "m.json")
    stored = machine.h200()
    for name in calibrate.FITTED:
        assert getattr(fitted, name) == pytest.approx(getattr(stored, name), rel=0.02), name
    same = {name: getattr(stored, name) for name in calibrate.FITTED}
    assert dataclasses.replace(fitted, **same) == stored
    assert machine.load(tmp_path / "m.json") == fitted


def test_a_fit_recovers_the_machine_that_made_the_rows() -> None:
    """The rows can tell every figure apart, if they are exact."""
    bare, _ = measured.read()
    true = dataclasses.replace(
        machine.h200(), step_seconds=1.1e-8, call_seconds=4e-5, link_bandwidth=350e9
    )
    rows = [dataclasses.replace(row, seconds=row.predicted(true)) for row in bare]
    fitted = calibrate.fit(rows)
    for name in calibrate.FITTED:
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=0.02), name


def test_predictions_are_within_a_tenth_in_the_median() -> None:
    fused = [row for row in TWO if row["by"] != "xla"]
    _, timed = measured.read()
    assert len(TWO) == len(timed) and len(fused) == sum(row.label != "xla" for row in timed)
    assert FOUND["summary"]["fused_median_error"] == predict.error(fused) < AIM
    assert max(one["median_error"] for one in FOUND["held_out"]) <= AIM
    counts = [one["rows"] for one in FOUND["held_out"]]
    assert [sum(counts[:2]), sum(counts[2:4]), counts[4]] == [len(fused)] * 3  # none is left out


def again(rows: list[measured.Timed]) -> None:
    """Predicts rows anew and compares with what is stored."""
    stored = {
        (row["file"], row["operator"], tuple(row["mkn"]), row["by"], row["inside"]): row
        for row in TWO
    }
    for row in predict.against_measured(machine.h200(), rows, lambda _: None):
        key = row["file"], row["operator"], row["mkn"], row["by"], row["inside"]
        assert row["predicted_us"] == pytest.approx(stored[key]["predicted_us"], rel=1e-3), key
        assert row["measured_us"] == stored[key]["measured_us"]


def test_some_predictions_can_be_made_again() -> None:
    _, timed = measured.read()
    again([row for row in timed if row.inside and row.file == measured.FILES[0]])


def test_what_other_processes_slowed_is_left_out() -> None:
    """Calls of the noisy run that are short and alone; the others, and the quiet run's, stay."""
    run = measured.RUNS[1]
    bare, timed = measured.read([run])
    everything = measured.read([dataclasses.replace(run, least=0.0)])
    left_out = [row for row in everything[1] if row not in timed]
    left_out += [row for row in everything[0] if row not in bare]
    assert left_out and all(row.seconds < run.least for row in left_out)
    assert not any(getattr(row, "inside", False) for row in left_out)
    assert {row.what for row in everything[0] if row not in bare} == {"product", "exchange"}
    alone = {"product", "exchange"}
    assert all(row.seconds >= run.least for row in bare if row.what in alone)


def test_a_cell_names_the_plan() -> None:
    way = {"plan": "all_reduce_two_shot", "ctas": 16, "split": 4, "fused_us": 282.4}
    assert tables.cell(way) == "282 (two_shot, 16 CTAs, /4)"
    assert tables.cell({"plan": "all_gather_double_ring", "fused_us": 1.0}) == "1 (double_ring)"


@pytest.mark.slow
def test_all_predictions_can_be_made_again() -> None:
    again(measured.read()[1])


def test_the_page_has_these_figures() -> None:
    page = tables.DOCS.read_text()
    for name, body in tables.made(FOUND).items():
        assert f"<!-- {name} -->\n{body}\n<!-- end -->" in page, f"run predict --tables: {name}"


def test_a_page_without_a_mark_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- figures -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "DOCS", page)
    with pytest.raises(SystemExit, match="needs the mark '<!-- errors -->' once, found it 0 times"):
        tables.write(FOUND)


def test_more_gpus_are_predicted_for_every_problem() -> None:
    more = [row for row in FOUND["rows"] if row["gpus"] != measured.RANKS]
    assert len(more) == len(predict.wanted()) * len(predict.MORE_RANKS)
    for row in more:
        assert row["best"] == min(row["ways"], key=lambda way: way["fused_us"])
        # No way is faster than its tiles alone on all multiprocessors.
        assert row["best"]["fused_us"] >= row["product_us"] * 0.99


def test_a_problem_on_more_gpus() -> None:
    problem = Problem("small", problems.TO_ROWS, 2048, 2048, 2048)
    row = predict.on_more(machine.h200(), problem, 4)
    backends = {way["backend"] for way in row["ways"]}
    assert backends == {"copy_engine", "tma_dedicated"}
    assert {way["backend"] for way in row["refused"]} == {"tma_colocated"}
    cell = tables.cell(row["best"])
    assert cell.startswith(f"{row['best']['fused_us']:.0f} (waves")
