"""Measured choices: looked up exactly, for what is like, and never where XLA was faster."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources

import pytest

from syncopate_jax.options import Launch
from syncopate_jax.tune import measured
from syncopate_jax.tune.measured import XLA, Choice, Problem

DEVICE = "NVIDIA H200"
SCATTER = Problem("bmk,kn", "reduce_scatter", "out", "", "m", 2, 4096, 14336, 8192)


def test_a_measured_problem_takes_its_choice() -> None:
    found = measured.choose(SCATTER, DEVICE)
    assert found == Choice("tma_dedicated", split=2, communicating=4)
    assert found.launch == Launch(communicating=4)


def test_a_problem_that_is_like_a_measured_one_takes_the_nearest_choice() -> None:
    assert measured.choose(replace(SCATTER, m=5120), DEVICE).split == 2
    assert measured.choose(replace(SCATTER, m=7168), DEVICE).split == 4


def test_a_measured_problem_that_tiles_cut_takes_its_choice_and_what_is_like_it_none() -> None:
    cut = Problem("bmk,kn", "all_gather", "lhs", "m", "", 2, 8192, 8192, 29568)
    assert measured.choose(cut, DEVICE) == Choice("copy_engine")
    assert measured.choose(replace(cut, n=29568 + 128 * 2), DEVICE) == XLA


@pytest.mark.parametrize(
    "change",
    [{"m": 65536}, {"m": 8192 + 64}, {"k": 0}, {"ranks": 4}, {"scatter": "n"}, {"operands": "a,b"}],
    ids=str,
)
def test_what_was_not_measured_is_left_to_xla(change: dict) -> None:
    assert measured.choose(replace(SCATTER, **change), DEVICE) == XLA


def test_other_devices_have_no_choices() -> None:
    assert measured.choose(SCATTER, "another") == XLA


def test_no_choice_was_slower_than_xla_by_more_than_3_percent() -> None:
    text = resources.files("syncopate_jax.tune").joinpath(measured.FILE).read_text()
    entries = json.loads(text)[DEVICE]
    ours = [e for e in entries if e["choice"]["backend"] != "xla"]
    assert len(ours) > 10
    assert max(e["best_us"] / e["xla_us"] for e in ours) < 1.03
