"""No operator races, hangs or leaves a semaphore counting, however late or early copies are."""

from __future__ import annotations

import pytest

from tests import interpret
from tests.ops import cases, guarded
from tests.ops.cases import CASES, Case

each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@pytest.mark.parametrize("mode", interpret.MODES)
@each_case
@pytest.mark.slow
def test_three_ranks_one_late(case: Case, mode: str) -> None:
    arrays = cases.operands(1, 6, 6, 6)
    options = {"split": 2, "tiles": {"m": 1}}
    assert guarded.run_once(case, 3, arrays, mode, late=1, **options) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("mode", interpret.MODES)
@pytest.mark.parametrize("split", [1, 2])
@each_case
def test_two_ranks(case: Case, split: int, mode: str) -> None:
    arrays = cases.operands(1, 8, 8, 8)
    options = {"split": split, "tiles": {"m": 2, "n": 2, "k": 2}}
    assert guarded.run_once(case, 2, arrays, mode, late=0, **options) < 1e-6


RINGS = {"gather_x_m": "all_gather_ring", "scatter_m": "reduce_scatter_ring"}
QUICK = [("gather_x_m", "eager"), ("scatter_m", "on_wait")]


@pytest.mark.parametrize(
    "name,mode",
    [
        pytest.param(name, mode, marks=[] if (name, mode) in QUICK else pytest.mark.slow)
        for name in RINGS
        for mode in interpret.MODES
    ],
)
def test_rings(name: str, mode: str) -> None:
    arrays = cases.operands(1, 6, 6, 6)
    options = {"split": 2, "plan": RINGS[name], "tiles": {"m": 1}}
    assert guarded.run_once(cases.BY_NAME[name], 3, arrays, mode, late=2, **options) < 1e-6
