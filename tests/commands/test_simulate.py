"""``syncopate simulate``: what it says of plans that do not verify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from syncopate_jax import cli
from syncopate_jax.ir import serial
from syncopate_jax.plans.all_gather_ring import all_gather_ring

LACKING = """\
plan lacking ranks 2
tensor x [4] int8
initial r0 x[0:2]
goal r1 x[0:4]
r0.0 push x[0:2] -> r1 x[0:2] on nvlink
"""


@pytest.fixture
def lacking_file(tmp_path: Path) -> Path:
    path = tmp_path / "lacking.txt"
    path.write_text(LACKING)
    return path


def json_of(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, dict, str]:
    code = cli.main([*map(str, argv), "--json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out), printed.err


def test_json_says_what_verify_says(capsys: pytest.CaptureFixture[str], lacking_file: Path) -> None:
    code, timed, err = json_of(capsys, "simulate", lacking_file, "--topology", "h200")
    _, checked, _ = json_of(capsys, "verify", lacking_file)
    assert (code, timed["verified"]) == (0, False)
    assert checked["findings"] and timed["findings"] == checked["findings"]
    assert timed["makespan"] > 0
    assert err.startswith("warning: lacking does not verify: 1 finding(s), the first is rank 1 ")


def test_json_says_that_a_plan_verifies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    serial.save(all_gather_ring(3, (6, 4)), tmp_path / "ring.json")
    code, timed, err = json_of(capsys, "simulate", tmp_path / "ring.json", "--topology", "h200")
    assert (code, err) == (0, "")
    assert (timed["verified"], timed["findings"]) == (True, [])


def test_help_says_the_units(capsys: pytest.CaptureFixture[str]) -> None:
    for command, units in (("simulate", "in seconds"), ("explain", "_us: microseconds")):
        assert cli.main([command, "--help"]) == 0
        assert units in " ".join(capsys.readouterr().out.split())
