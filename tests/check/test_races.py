"""Operations that touch one location without an order between them."""

from __future__ import annotations

import pytest

from syncopate_jax.check import races
from syncopate_jax.ir.comm import OpDep
from syncopate_jax.ir.plan import Plan, Tensor
from tests.check.small_plans import codes, found, goal, halves, plan_of, push, region, relay

WHOLE = "y[0:4,0:6]"
ADVICE = "and neither waits for the other; add a dependency"


def test_read_of_what_is_being_written() -> None:
    assert found(relay()) == [
        f"rank 1 op 0 [race]: reads x[0:4,0:6] of rank 1, which r0.0 writes, {ADVICE}",
        "rank 2 [wrong-value]: goal x[0:4,0:6] misses x[0:4,0:6]",
    ]
    assert found(relay(deps=(OpDep(0, 0),))) == []


def test_each_meeting_is_named_where_it_is() -> None:
    """A stray third push meets the first on rank 1, and the second on both ranks."""
    races_found = [text for text in found(halves(push(0, 1, "x[1:3,1:4]"))) if "[race]" in text]
    assert races_found == [
        f"rank 0 op 1 [race]: writes x[1:2,1:4] of rank 1, which r0.0 writes, {ADVICE}",
        f"rank 1 op 0 [race]: writes x[2:3,1:4] of rank 0, which r0.1 reads, {ADVICE}",
        f"rank 1 op 0 [race]: reads x[2:3,1:4] of rank 1, which r0.1 writes, {ADVICE}",
    ]


def reduction(*deps: OpDep, kinds: tuple[str, str] = ("sum", "sum")) -> Plan:
    """Ranks 1 and 2 reduce into rank 0, which hands the result to rank 3 after ``deps``."""
    return plan_of(
        [push(0, 3, WHOLE, "x[0:4,0:6]", deps=deps)],
        [push(1, 0, WHOLE, reduce=kinds[0])],
        [push(2, 0, WHOLE, reduce=kinds[1])],
        [],
        initial=[region(r, WHOLE) for r in range(3)],
        goals=[
            goal(r, c, 0, 1, 2, source=WHOLE, reduce=kinds[0])
            for r, c in ((0, WHOLE), (3, "x[0:4,0:6]"))
        ],
    )


def test_reductions_commute() -> None:
    assert found(reduction(OpDep(1, 0), OpDep(2, 0))) == []


@pytest.mark.parametrize("kinds", [("sum", "sum"), ("max", "max")])
def test_reader_waits_for_all_reductions(kinds: tuple[str, str]) -> None:
    assert found(reduction(OpDep(1, 0), kinds=kinds)) == [
        f"rank 0 op 0 [race]: reads {WHOLE} of rank 0, which r2.0 reduces ({kinds[0]}) into, "
        f"{ADVICE}"
    ]


def test_kinds_of_reduction_do_not_commute() -> None:
    text = (
        "is the sum of 3 ranks, but 1 of the 2 operations that reduce into it do so by max, the "
        "first is r2.0; reduce by what the goal says, or change the goal"
    )
    assert found(reduction(OpDep(1, 0), OpDep(2, 0), kinds=("sum", "max"))) == [
        f"rank 2 op 0 [race]: reduces (max) into {WHOLE} of rank 0, which r1.0 reduces (sum) into, "
        f"{ADVICE}",
        f"rank 0 [wrong-reduction]: goal {WHOLE} {text}",
        f"rank 3 [wrong-reduction]: goal x[0:4,0:6] {text}",
    ]


def slots(last_waits: bool) -> Plan:
    """Two pieces pass through one slot of rank 1; the second must wait until the first left."""
    wait = (OpDep(1, 0),) if last_waits else (OpDep(0, 0),)
    return plan_of(
        [push(0, 1, "x[0:2,0:6]", "s[0:2,0:6]"),
         push(0, 1, "x[2:4,0:6]", "s[0:2,0:6]", deps=wait)],
        [push(1, 2, "s[0:2,0:6]", "x[0:2,0:6]", deps=(OpDep(0, 0),)),
         push(1, 2, "s[0:2,0:6]", "x[2:4,0:6]", deps=(OpDep(0, 1),))],
        [],
        initial=[region(0, "x[0:4,0:6]")],
        goals=[goal(2, "x[0:4,0:6]")],
        tensors=(Tensor("x", (4, 6)), Tensor("s", (2, 6))),
    )  # fmt: skip


def test_slot_that_is_used_again() -> None:
    assert found(slots(True)) == []
    assert found(slots(False))[0] == (
        f"rank 1 op 0 [race]: reads s[0:2,0:6] of rank 1, which r0.1 writes, {ADVICE}"
    )


def fan(count: int, forgotten: int = -1) -> Plan:
    """Rank 0 gathers ``count`` reductions and gives the result to as many ranks, each waiting for
    the first of them alone, which waits for all (but perhaps one)."""
    everyone = tuple(range(count + 1))
    adds = [[push(r, 0, WHOLE, reduce="sum")] for r in everyone[1:]]
    first = tuple(OpDep(r, 0) for r in everyone[1:] if r != forgotten)
    gives = [
        push(0, r, WHOLE, "x[0:4,0:6]", deps=first if r == 1 else (OpDep(0, 0),))
        for r in everyone[1:]
    ]
    return plan_of(
        gives,
        *adds,
        initial=[region(r, WHOLE) for r in everyone],
        goals=[goal(r, "x[0:4,0:6]", *everyone, source=WHOLE) for r in everyone[1:]],
    )


def test_many_readers_of_many_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One reader that follows all, and that all follow, stands for the whole product of pairs."""
    assert found(fan(12)) == []
    monkeypatch.setattr(races, "BLOCK", 10)
    assert found(fan(12, forgotten=5)) == [
        f"rank 0 op {i} [race]: reads {WHOLE} of rank 0, which r5.0 reduces (sum) into, {ADVICE}"
        for i in range(12)
    ]


def test_writes_to_other_ranks_and_places_do_not_meet() -> None:
    assert codes(halves()) == set()
