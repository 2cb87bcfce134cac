"""Every planted fault in the order of communication shows, in each kind of operator."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests import interpret
from tests.faults import planted
from tests.ops import cases, guarded
from tests.ops.cases import BY_NAME, CASES, Case

KINDS = ("gather_x_m", "gather_w_k", "scatter_m", "all_reduce", "to_rows", "to_columns")
"""A gathered row block, a gathered contraction, sums, both at once, and both ways of resharding."""
FAULTS = {
    "drop_a_wait": KINDS,
    "drop_the_last_wait": KINDS,
    "forget_what_is_being_sent": KINDS,
    "never_start": KINDS,
    "start_before_the_tile_is_stored": ("scatter_m", "all_reduce", "to_columns"),
}
QUICK = {
    ("drop_a_wait", "gather_x_m"),
    ("drop_a_wait", "scatter_m"),
    ("drop_the_last_wait", "to_columns"),
    ("forget_what_is_being_sent", "to_rows"),
    ("start_before_the_tile_is_stored", "scatter_m"),
}
PAIRS = [
    pytest.param(fault, kind, marks=[] if (fault, kind) in QUICK else pytest.mark.slow)
    for fault, kinds in FAULTS.items()
    for kind in kinds
]


def small() -> Any:
    return cases.operands(1, 4, 4, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_without_a_fault_nothing_is_wrong(kind: str) -> None:
    assert guarded.what_is_wrong(BY_NAME[kind], 2, small()) == ""


@pytest.mark.parametrize("fault,kind", PAIRS)
def test_fault_is_seen(fault: str, kind: str) -> None:
    with planted.planted(getattr(planted, fault)) as done:
        found = guarded.what_is_wrong(BY_NAME[kind], 2, small(), timeout=4.0)
    assert done and all(done), "the operator has no place for this fault"
    assert found, f"{fault} in {kind} went unnoticed"


@pytest.mark.slow
@pytest.mark.parametrize("mode", interpret.MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_missing_wait_is_seen_in_each_mode(case: Case, mode: str) -> None:
    with planted.planted(planted.drop_a_wait) as done:
        found = guarded.what_is_wrong(case, 2, small(), modes=(mode,), timeout=4.0)
    assert done and all(done) and found


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k == "gather_x_m" else pytest.mark.slow) for k in KINDS]
)
def test_wrong_arrival_number_is_seen(kind: str) -> None:
    arrays = cases.operands(1, 6, 6, 6)
    with planted.wrong_arrival_number():
        found = guarded.what_is_wrong(BY_NAME[kind], 3, arrays, timeout=4.0)
    assert found, f"a wrong semaphore in {kind} went unnoticed"


def test_a_deadlock_ends_soon_and_names_its_semaphore() -> None:
    with planted.planted(planted.never_start):
        began = time.monotonic()
        found = guarded.what_is_wrong(BY_NAME["scatter_m"], 2, small(), timeout=3.0)
    assert found.startswith("DeadlockFound: no device made a step for 3.0 s")
    assert "device 1 waits for semaphore" in found and "to reach" in found
    assert time.monotonic() - began < 120  # compiling included, on a busy machine
