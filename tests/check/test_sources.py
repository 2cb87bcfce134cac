"""Data that is read, reduced into or overwritten before it is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncopate_jax.check import sources
from syncopate_jax.ir.comm import ComputeDep, OpDep
from syncopate_jax.ir.plan import Plan
from tests.check.small_plans import (
    chunk,
    collective,
    found,
    goal,
    halves,
    plan_of,
    push,
    region,
    relay,
)

WHOLE = "x[0:4,0:6]"


def tiles(text: str, rank: int = 0) -> ComputeDep:
    return ComputeDep(rank, chunk(text))


def test_source_that_nobody_brings() -> None:
    plan = halves(initial=(region(0, "x[0:1,0:6]"), region(1, "x[2:4,0:6]")))
    assert found(plan)[0] == (
        "rank 0 op 0 [not-available]: reads x[1:2,0:6] of rank 0, which is neither there at the "
        "start nor written before; deliver it first"
    )


def test_source_that_is_brought_later() -> None:
    plan = plan_of(
        [push(0, 1, WHOLE, deps=(OpDep(1, 0),))], [push(1, 2, WHOLE)], [],
        initial=[region(0, WHOLE)], goals=[goal(2, WHOLE)],
    )  # fmt: skip
    assert found(plan)[0] == (
        "rank 1 op 0 [not-available]: reads x[0:4,0:6] of rank 1, which is neither there at the "
        "start nor written before; wait for r0.0, which writes it"
    )


def test_reduction_into_nothing() -> None:
    plan = plan_of(
        [push(0, 1, WHOLE, reduce="sum")], [], initial=[region(0, WHOLE)], goals=[goal(1, WHOLE)]
    )
    assert found(plan) == [
        "rank 0 op 0 [nothing-to-reduce]: reduces into x[0:4,0:6] of rank 1, which is neither "
        "there at the start nor written before; deliver it first"
    ]


def test_collective_reduces_into_what_it_writes_itself() -> None:
    parts = [
        [collective(r, "all_reduce", "y[0:4,0:6]", WHOLE, 0, 1, reduce="sum")] for r in range(2)
    ]
    plan = plan_of(
        *parts,
        initial=[region(r, "y[0:4,0:6]") for r in range(2)],
        goals=[goal(r, WHOLE, 0, 1, source="y[0:4,0:6]") for r in range(2)],
    )
    assert found(plan) == []


def test_wait_for_tiles_that_the_plan_does_not_know() -> None:
    plan = relay(deps=(OpDep(0, 0), tiles("x[0:1,0:6]", 1)))
    assert found(plan) == [
        "rank 1 op 0 [no-producer]: waits for the tiles of x[0:1,0:6] on rank 1, but no initial "
        "region says that tiles produce it; mark the region as produced or drop the dependency"
    ]


def test_read_of_what_tiles_produce() -> None:
    assert found(relay(True, deps=(OpDep(0, 0),))) == [
        "rank 0 op 0 [not-produced]: reads x[0:4,0:6] of rank 0, which tiles produce, without "
        "waiting for them; add a dependency on compute(r0 x[0:4,0:6])"
    ]


def produced(*first: ComputeDep, second: tuple = ()) -> Plan:
    """Rank 0 gives its produced x to rank 1, then to rank 2."""
    return plan_of(
        [push(0, 1, WHOLE, deps=first), push(0, 2, WHOLE, deps=second)], [], [],
        initial=[region(0, WHOLE, True)], goals=[goal(1, WHOLE), goal(2, WHOLE)],
    )  # fmt: skip


def test_tiles_in_pieces_cover_the_source() -> None:
    assert found(produced(tiles("x[0:3,0:6]"), tiles("x[2:4,0:6]"), second=(tiles(WHOLE),))) == []
    assert found(produced(tiles("x[0:3,0:6]"), second=(tiles(WHOLE),))) == [
        "rank 0 op 0 [not-produced]: reads x[3:4,0:6] of rank 0, which tiles produce, without "
        "waiting for them; add a dependency on compute(r0 x[3:4,0:6])"
    ]


def test_an_operation_before_has_waited_for_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(produced(tiles(WHOLE), second=(OpDep(0, 0),))) == []
    monkeypatch.setattr(sources, "BLOCK", 1)
    assert found(produced(tiles("x[0:3,0:6]"), tiles("x[2:4,0:6]"), second=(OpDep(0, 0),))) == []
    assert len(found(produced(tiles(WHOLE)))) == 1


def test_issue_order_is_no_wait() -> None:
    assert found(produced(tiles(WHOLE))) == [
        "rank 0 op 1 [not-produced]: reads x[0:4,0:6] of rank 0, which tiles produce, without "
        "waiting for them; add a dependency on compute(r0 x[0:4,0:6])"
    ]


def overwrite(*deps: ComputeDep, reduce: str = "none") -> Plan:
    """Rank 1 writes over (or reduces into) what tiles of rank 0 produce in y."""
    ranks = (1,) if reduce == "none" else (0, 1)
    return plan_of(
        [], [push(1, 0, "y[0:4,0:6]", deps=deps, reduce=reduce)],
        initial=[region(0, "y[0:4,0:6]", True), region(1, "y[0:4,0:6]")],
        goals=[goal(0, "y[0:4,0:6]", *ranks)],
    )  # fmt: skip


def test_plain_write_over_what_tiles_produce() -> None:
    assert found(overwrite(tiles("y[0:4,0:6]"))) == []
    assert found(overwrite()) == [
        "rank 1 op 0 [not-produced]: overwrites y[0:4,0:6] of rank 0, which tiles produce, without "
        "waiting for them; add a dependency on compute(r0 y[0:4,0:6])"
    ]


def test_reduction_commutes_with_production() -> None:
    assert found(overwrite(reduce="sum")) == []


def test_collective_waits_for_the_tiles_of_every_sender() -> None:
    parts = [
        collective(r, "all_reduce", "y[0:4,0:6]", "y[0:4,0:6]", 0, 1, reduce="sum",
                   deps=(tiles("y[0:4,0:6]", r),)) for r in range(2)
    ]  # fmt: skip
    ends = {
        "initial": [region(r, "y[0:4,0:6]", True) for r in range(2)],
        "goals": [goal(r, "y[0:4,0:6]", 0, 1) for r in range(2)],
    }
    assert found(plan_of([parts[0]], [parts[1]], **ends)) == []
    assert found(plan_of([parts[0]], [replace(parts[1], deps=())], **ends)) == [
        f"rank 1 op 0 [not-produced]: {verb} y[0:4,0:6] of rank 1, which tiles produce, without "
        "waiting for them; add a dependency on compute(r1 y[0:4,0:6])"
        for verb in ("reads", "overwrites")
    ]
