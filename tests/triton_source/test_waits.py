"""The waits of rewritten Triton kernels, which are assembly: what the text does, step by step."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from syncopate_jax.triton_source import device
from tests import triton_interpret

COMPARISONS = {"lt": operator.lt, "ge": operator.ge, "ne": operator.ne}
STEPS = 200
"""More than any of these waits takes."""
BARRIER, FENCE = "barrier.sync 0", "fence.proxy.async.global"


class Thread:
    """Runs text of a wait as one thread; refuses what none of them has.

    Attributes:
      memory: all that it may read, int32.
      polled: called ahead of every acquire.
      met: barriers and fences in their order.
    """

    def __init__(self, number: int, memory: Sequence[np.ndarray], polled: Callable[[], None]):
        self.values: dict[str, int] = {"%tid.x": number}
        self.memory, self.polled, self.met = memory, polled, list[str]()

    def run(self, text: str, given: Sequence[int]) -> None:
        self.values |= {f"${i}": value for i, value in enumerate(given, 1)}
        parts = (part.strip() for part in re.findall(r"\w+:|[^;:{}]+;", text))
        lines = [part.rstrip(";") for part in parts if not part.startswith(".")]
        at = 0
        for _ in range(STEPS):
            if at == len(lines):
                return
            target = self._step(lines[at])
            at = lines.index(f"{target}:") if target else at + 1
        raise AssertionError(f"the wait does not end: {lines[at]}")

    def _step(self, line: str) -> str | None:
        """The label that follows; None: the next line."""
        if line in (BARRIER, FENCE):
            self.met.append(line)
        elif jump := re.fullmatch(r"(@p )?bra (\w+)", line):
            return jump[2] if not jump[1] or self.values["p"] else None
        elif not line.endswith(":"):
            name, _, rest = line.partition(" ")
            to, *operands = rest.split(", ")
            self.values[to] = self._value(name, operands)
        return None

    def _value(self, name: str, operands: list[str]) -> int:
        if name in ("ld.global.b32", "ld.acquire.sys.global.b32"):
            if "acquire" in name:
                self.polled()
            (place,) = operands
            return self._read(sum(self._get(one) for one in place.strip("[]").split(" + ")))
        a, *others = map(self._get, operands)
        if compared := re.fullmatch(r"setp\.(\w+)\.[su]32", name):
            return COMPARISONS[compared[1]](a, *others)
        if name in ("mov.b32", "mov.u32"):
            return a
        if name == "add.s32":
            return a + others[0]
        assert name == "mad.wide.s32", f"what does {name} do? say it here"
        return a * others[0] + others[1]

    def _read(self, address: int) -> int:
        places = [(array, address - array.ctypes.data) for array in self.memory]
        inside = [(array, at) for array, at in places if 0 <= at < array.nbytes]
        assert inside, "the wait reads what is neither a row nor a counter"
        array, at = inside[0]
        return int(array.reshape(-1)[at // 4])

    def _get(self, operand: str) -> int:
        return int(operand) if re.fullmatch(r"-?\d+", operand) else self.values[operand]


@triton.jit
def waits_for_rows(rows_ptr, counters_ptr, begin, end, FENCED: tl.constexpr):  # type: ignore[no-untyped-def]
    device.wait_rows(rows_ptr, begin, end, counters_ptr, FENCED)


@triton.jit
def waits_for_one(rows_ptr, counters_ptr, begin, end, FENCED: tl.constexpr):  # type: ignore[no-untyped-def]
    device.wait_count(counters_ptr + tl.load(rows_ptr), tl.load(rows_ptr + 1), FENCED)


def wait(
    monkeypatch: pytest.MonkeyPatch,
    kernel: Any,
    counters: Sequence[int],
    rows: Sequence[tuple[int, int]],
    *,
    fenced: bool = False,
    number: int = 0,
    raised_by: int = 0,
) -> tuple[list[str], list[int]]:
    """What a thread meets, and the counters at each of its polls, of which each raises them all."""
    seen: list[int] = []
    held, table = np.array(counters, np.int32), np.array([*rows, (99, 99)], np.int32)

    def polled() -> None:
        held[...] += raised_by
        seen.append(int(held.max()))

    thread = Thread(number, (held, table), polled)

    def asm(text: Any, constraints: str, args: list[Any], *_: Any, **__: Any) -> None:
        assert constraints.count(",") == len(args)
        given = [int(arg.handle.data.item()) if hasattr(arg, "handle") else arg for arg in args]
        thread.run(getattr(text, "value", text), given)

    monkeypatch.setattr(triton_interpret, "_rounded_pairs", asm)
    arrays = {"rows_ptr": table, "counters_ptr": held}
    triton_interpret.run_alone(kernel, 1, arrays, begin=0, end=len(rows), FENCED=fenced)
    return thread.met, seen


each_kernel = pytest.mark.parametrize("kernel", [waits_for_rows, waits_for_one])


@each_kernel
@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("there", [3, 4, 1000])
def test_a_wait_ends_where_the_counter_is_there_or_past_it(
    there: int, fenced: bool, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters of launches that share them, or that are raised more often, are past it."""
    met, seen = wait(monkeypatch, kernel, [0, 0, there], [(2, 3)], fenced=fenced)
    assert seen == [there]
    assert met == ([BARRIER, FENCE] if fenced else [BARRIER])


@each_kernel
def test_a_wait_goes_on_until_then(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(monkeypatch, kernel, [0], [(0, 3)], raised_by=1)[1] == [1, 2, 3]
    assert wait(monkeypatch, kernel, [0], [(0, 3)], raised_by=2)[1] == [2, 4]
    with pytest.raises(AssertionError, match="the wait does not end"):
        wait(monkeypatch, kernel, [2], [(0, 3)])


@each_kernel
def test_one_thread_polls_and_the_others_meet_it(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wait(monkeypatch, kernel, [0], [(0, 3)], number=1) == ([BARRIER], [])


def test_every_row_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(0, 1), (2, 5), (1, 2)]
    assert wait(monkeypatch, waits_for_rows, [1, 7, 5], rows) == ([BARRIER], [7, 7, 7])
    for short in ([0, 2, 5], [1, 1, 5], [1, 2, 4]):
        with pytest.raises(AssertionError, match="the wait does not end"):
            wait(monkeypatch, waits_for_rows, short, rows)


@pytest.mark.parametrize("number", [0, 1])
def test_nothing_to_wait_for_costs_no_barrier(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(monkeypatch, waits_for_rows, [0], [], fenced=True, number=number) == ([], [])
    assert wait(monkeypatch, waits_for_one, [0], [(0, 0)], fenced=True, number=number) == ([], [])
