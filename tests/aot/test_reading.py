"""What the assembler says is understood, and what is over a budget is said; no compiler needed."""

from __future__ import annotations

import dataclasses

import pytest

from tests.aot import budget, hopper
from tests.aot.hopper import Kernel

SAID = """
Resources(smem_scratch_bytes=196608, tmem_scratch_cols=0)
ptxas warning : Registers are spilled in 'kernel', 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""


def test_a_kernel_is_read() -> None:
    assert Kernel.read(SAID) == [Kernel(168, 20, 196608, serialized=False)]
    slow = SAID + "ptxas info : (C7510) wgmma.mma_async instructions are serialized due to ...\n"
    assert Kernel.read(slow) == [Kernel(168, 20, 196608, serialized=True)]
    assert Kernel.read("") == []


def test_what_is_not_understood() -> None:
    with pytest.raises(AssertionError, match="not understood: Used 12 registers"):
        Kernel.read("Used 12 registers")


def test_what_is_over_a_budget() -> None:
    allowed = {"registers": 160, "spilled": 0, "shared_memory": 196608}
    kernel = Kernel(168, 20, 196608, serialized=True)
    assert budget.over(kernel, allowed) == [
        "registers 168 of 160",
        "spilled 20 of 0",
        "the tensor cores wait for each other",
    ]
    assert budget.over(Kernel(160, 0, 1, serialized=False), allowed) == []


def test_the_particular_budget_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"default": {"spilled": 0, "registers": 1}, "a": {"registers": 2}}
    found |= {"op": {"registers": 3}, "op/b": {"registers": 4}}
    monkeypatch.setattr(budget, "BUDGETS", found)
    assert [
        budget.budget(*pair)["registers"] for pair in (("x", "x"), ("x", "a"), ("op", "b"))
    ] == [
        1,
        2,
        4,
    ]
    assert budget.budget("op", "a") == {"spilled": 0, "registers": 3}


def test_budgets_name_what_there_is() -> None:
    fields = {field.name for field in dataclasses.fields(Kernel)} - {"serialized"}
    assert set(budget.BUDGETS["default"]) == fields
    assert all(set(entry) <= fields for entry in budget.BUDGETS.values())


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = hopper.missing()
    assert reason is not None and "`make test-aot` installs it" in reason
