"""Every fault of a schedule is found, and what is not found does no harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from syncopate_jax.check.verify_schedule import check_schedule, verify_schedule
from syncopate_jax.errors import DeadlockError, Finding, InputError, PlanError, UnsupportedError
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, ComputeDep, OpDep
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ir.schedule import Schedule
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.tiles import Axis, TileSpace
from syncopate_jax.passes.schedule_plan import schedule_plan
from syncopate_jax.registry import templates
from tests.check.schedule_mutations import listed, mutants, with_rows
from tests.passes.matmul_cases import CASES, Case, gather, product, scatter

Row = list[tuple[int, ...]]


def found(schedule: Schedule, case: Case) -> list[Finding]:
    return list(verify_schedule(schedule, *case.given[1:]))


def texts(schedule: Schedule, case: Case) -> list[str]:
    return [str(finding) for finding in found(schedule, case)]


def edited(schedule: Schedule, name: str, row: int, edit: Callable[[Row], Row]) -> Schedule:
    rows = listed(getattr(schedule, name))
    rows[row] = edit(rows[row])
    return with_rows(schedule, name, rows)


@pytest.fixture(scope="module")
def gathered() -> tuple[Case, Schedule]:
    """Rank 0: tiles 0, 1, then 2 and 3, before which it waits for r1.0."""
    case = gather("all_gather_swizzle", 2, m=4, k=6, tiles=(2, 2, 6))
    return case, schedule_plan(*case.given)


@pytest.fixture(scope="module")
def scattered() -> tuple[Case, Schedule]:
    """Rank 0: tiles 2, 3 for r0.0, then 0 and 1, which add the landing of r1.0."""
    case = scatter("reduce_scatter_direct", 2, m=4, tiles=(2, 2, 5))
    return case, schedule_plan(*case.given)


@pytest.mark.parametrize("name", CASES)
def test_faults_that_do_harm_are_found(name: str) -> None:
    """Every mutant whose result is wrong, or that hangs, for some seed."""
    hurt = 0
    for ranks, workers in ((2, 1), (3, 3)):
        case = CASES[name](ranks)
        schedule = schedule_plan(*case.given, workers=workers)
        for kind, mutant in mutants(schedule, seed=ranks, each=1):
            if found(mutant, case):
                hurt += 1
                continue
            for seed in range(4):
                assert case.wrong(mutant, seed) == [], f"{kind}, seed {seed}"
    assert hurt > 5


@pytest.mark.parametrize("name", ("gather_m_swizzle", "gather_k", "scatter_ring_split", "to_rows"))
def test_the_oracle_sees_missing_waits_and_raises_too(name: str) -> None:
    """So that the test above means something: dropped entries do show in results."""
    case = CASES[name](3)
    schedule = schedule_plan(*case.given)
    kinds = ("drop in waits", "drop in k_waits", "drop in e_waits", "drop in op_signals")
    seen = set()
    for kind, mutant in mutants(schedule, seed=0, each=2):
        if kind in kinds:
            assert found(mutant, case)
            try:
                harm = any(case.wrong(mutant, seed) for seed in range(8))
            except DeadlockError:
                harm = True
            assert harm, kind
            seen.add(kind)
    assert len(seen) >= 2


def test_a_read_before_arrival(gathered: tuple[Case, Schedule]) -> None:
    case, schedule = gathered
    assert found(schedule, case) == []
    early = edited(schedule, "waits", 2, lambda row: [])
    early = edited(early, "waits", 3, lambda row: [(0, 1)])
    assert texts(early, case) == [
        "rank 0 [unordered]: tile 2 (rank 0, position 2) at step position 0 reads what r1.0 "
        "brings, but nothing makes it wait for that; wait for a slot that all of them raise, with "
        "its full count"
    ]


def test_a_step_before_arrival() -> None:
    case = gather("all_gather_swizzle", 2, m=2, k=4, axis=1, tiles=(2, 4, 1))
    schedule = schedule_plan(*case.given)
    assert schedule.k_waits.row(0) == [(2, 0, 1)]
    late = edited(schedule, "k_waits", 0, lambda row: [(3, 0, 1)])
    (finding,) = found(late, case)
    assert finding.code == "unordered"
    assert "tile 0 (rank 0, position 0) at step position 2 reads what r1.0" in finding.message
    turned = schedule.k_order.copy()
    turned[0] = turned[0][::-1]
    assert [f.code for f in found(replace(schedule, k_order=turned), case)] == ["unordered"]


def test_too_few_and_too_many_raises(gathered: tuple[Case, Schedule]) -> None:
    case, schedule = gathered
    more = edited(schedule, "waits", 2, lambda row: [(0, 2)])
    assert texts(more, case) == [
        "rank 0 [too-few-raises]: slot r0:0 is waited for as 2, but raised 1 times; lower the "
        "count or raise it more often",
        "rank 0 [deadlock]: tile 2 (rank 0, position 2) waits for slot r0:0 to reach 2, it stays "
        "at 1; nothing else raises it",
    ]
    twice = edited(schedule, "op_signals", 1, lambda row: row * 2)
    assert [f.code for f in found(twice, case)] == ["lost-signal", "unordered", "unordered"]
    assert texts(twice, case)[0] == (
        "rank 0 [lost-signal]: slot r0:0 is raised 2 times, but waited for as 1 at most; wait for "
        "all of them, or drop the rest"
    )


def test_an_operation_before_its_tiles(scattered: tuple[Case, Schedule]) -> None:
    case, schedule = scattered
    assert found(schedule, case) == []
    (slot, count) = schedule.op_waits.row(0)[0]
    assert count == 2
    early = edited(schedule, "op_waits", 0, lambda row: [(slot, 1)])
    codes = [f.code for f in found(early, case)]
    assert codes == ["lost-signal", "unordered"]
    assert texts(early, case)[1] == (
        "rank 0 op 0 [unordered]: r0.0 depends on compute(r0 y[2:4,0:4]): tile 2 (rank 0, position "
        "0), tile 3 (rank 0, position 1), but nothing makes it wait for that; wait for a slot that "
        "all of them raise, with its full count"
    )


def test_an_addend_before_it_has_landed(scattered: tuple[Case, Schedule]) -> None:
    case, schedule = scattered
    early = edited(schedule, "e_waits", 2, lambda row: [])
    early = edited(early, "e_waits", 3, lambda row: schedule.e_waits.row(2))
    (finding,) = found(early, case)
    assert finding.message.startswith("tile 0 (rank 0, position 2) adds what r1.0 brings, but")


def test_addends(scattered: tuple[Case, Schedule]) -> None:
    case, schedule = scattered
    start = "rank 0 [wrong-addends]: tile 0 (rank 0, position 2) adds landings "
    twice = edited(schedule, "addends", 2, lambda row: row * 2)
    assert texts(twice, case) == [f"{start}[0, 0], needs each of [0] once"]
    never = edited(schedule, "addends", 2, lambda row: [])
    assert texts(never, case) == [f"{start}[], needs each of [0] once"]


def test_landings(scattered: tuple[Case, Schedule]) -> None:
    case, schedule = scattered
    lost = replace(schedule, landing=np.array([-1, 0], np.int32))
    assert texts(lost, case)[0] == (
        "rank 0 op 0 [no-landing]: reduces into y[2:4,0:4] on rank 1, which tiles there write; it "
        "needs a landing that they add"
    )
    high = replace(schedule, landing=np.array([0, 7], np.int32))
    assert texts(high, case) == [
        "rank 1 op 0 [bad-landing]: lands at 7, rank 0 has 1 landings",
    ]
    case = scatter("reduce_scatter_direct", 3, m=6)
    schedule = schedule_plan(*case.given)
    landing = np.zeros_like(schedule.landing)
    shared = texts(replace(schedule, landing=landing), case)
    assert shared[0] == (
        "rank 2 op 0 [shared-landing]: lands at 0 of rank 0, where r1.1 lands too; give each a "
        "landing of its own"
    )
    assert len(shared) == 3


def test_a_landing_without_tiles(gathered: tuple[Case, Schedule]) -> None:
    case, schedule = gathered
    stray = replace(
        schedule,
        landing=np.array([-1, 0], np.int32),
        num_landings=np.array([1, 0], np.int32),
    )
    assert texts(stray, case) == [
        "rank 1 op 0 [stray-landing]: lands at 0 of rank 0, but no tile there writes x[2:4,0:6]; "
        "let it write to its destination"
    ]


def test_deadlock_names_who_waits_for_whom(scattered: tuple[Case, Schedule]) -> None:
    case, schedule = scattered
    order = schedule.order.copy()
    turned = replace(schedule, order=order[:, [2, 3, 0, 1]])
    for name in ("e_waits", "addends", "signals"):
        rows = listed(getattr(schedule, name))
        moved = [rows[r * 4 + p] for r in (0, 1) for p in (2, 3, 0, 1)]
        turned = with_rows(turned, name, moved)
    stuck = texts(turned, case)
    assert stuck[:2] == [
        "rank 0 [deadlock]: tile 0 (rank 0, position 0), epilogue, waits for slot r0:0 to reach "
        "1, it stays at 0; r1.0 would raise it",
        "rank 1 [deadlock]: tile 2 (rank 1, position 0), epilogue, waits for slot r1:0 to reach "
        "1, it stays at 0; r0.0 would raise it",
    ]
    assert "rank 0 op 0 [deadlock]: r0.0 waits for slot r0:1 to reach 2" in stuck[2]
    with pytest.raises(DeadlockError, match=r"tile 0 \(rank 0, position 0\), epilogue, waits for"):
        case.run(turned, 0)


def test_tables_out_of_range(gathered: tuple[Case, Schedule]) -> None:
    case, schedule = gathered
    order = schedule.order.copy()
    order[1, 0] = 0
    assert texts(replace(schedule, order=order), case) == [
        "rank 1 [not-a-permutation]: order must name each of 0..3 once; it lacks 2"
    ]
    assert texts(edited(schedule, "waits", 0, lambda row: [(3, 1)]), case) == [
        "rank 0 [bad-wait]: tile 0 (rank 0, position 0) waits for slot 3 as 1; needs a slot below "
        "1, a count of at least 1 and a step below 1"
    ]
    inside = edited(schedule, "k_waits", 1, lambda row: [(2, 0, 1)])
    assert "tile 1 (rank 0, position 1) waits for slot 0 as 1 at step 2" in texts(inside, case)[0]
    assert (
        "[bad-wait]: r0.0 waits for slot 0 as 0"
        in texts(edited(schedule, "op_waits", 0, lambda row: [(0, 0)]), case)[0]
    )
    assert texts(edited(schedule, "op_signals", 0, lambda row: [(2, 0)]), case) == [
        "[bad-signal]: r0.0 raises slot 0 of rank 2; needs a rank below 2 and a slot below 0"
    ]
    assert (
        "tile 0 (rank 0, position 0) raises slot 1 of rank 1"
        in texts(edited(schedule, "signals", 0, lambda row: [(1, 1)]), case)[0]
    )
    assert texts(edited(schedule, "addends", 0, lambda row: [(0,)]), case) == [
        "rank 0 [bad-addend]: tile 0 (rank 0, position 0) adds landing 0, rank 0 has 0"
    ]
    assert texts(replace(schedule, workers=0), case) == [
        "[no-workers]: needs at least 1 worker, found 0"
    ]


def test_another_tile_space(gathered: tuple[Case, Schedule]) -> None:
    case, schedule = gathered
    space, accesses = product(4, 6, (1, 2, 6))
    assert [str(f) for f in verify_schedule(schedule, space, accesses, case.axis_map)] == [
        "[wrong-space]: the schedule is for 4 tiles of 1 steps, the tile space has 8 of 1; "
        "schedule again"
    ]


def test_tiles_that_do_not_make_what_is_sent(scattered: tuple[Case, Schedule]) -> None:
    """The schedule is for a tile space of the same size that leaves out the last column."""
    case, schedule = scattered
    space = TileSpace((Axis("m", 4, 2), Axis("n", 3, 2), Axis("k", 5, 5, reduction=True)))
    accesses = {"y": replace(case.accesses["y"], shape=(4, 3))}
    texts = [str(f) for f in verify_schedule(schedule, space, accesses, case.axis_map)]
    assert (
        "rank 1 op 0 [lands-in-part]: reduces into y[0:2,0:4], of which tiles of rank 0 leave "
        "out 2 elements; cut it where tiles end"
    ) in texts
    assert any(
        "[not-produced]: waits for compute(r0 y[2:4,0:4]), of which tiles there leave out 2 "
        "elements" in text
        for text in texts
    )


def test_plain_writes_over_tiles(scattered: tuple[Case, Schedule]) -> None:
    case, schedule = scattered
    columns = replace(case.plan.columns, reduce=np.zeros(2, np.int32))
    plain = replace(schedule, plan=case.plan.with_columns(columns))
    assert texts(plain, case)[0] == (
        "rank 0 op 0 [overwrites-tiles]: writes y[2:4,0:4] on rank 1, which tiles there write "
        "too; receive into another tensor"
    )


def relayed() -> tuple[Case, Schedule]:
    """Rank 0 pushes the first half of x to rank 1 and, once it has arrived, the second."""
    x = Tensor("x", (4, 6), "float64")
    halves = [Chunk("x", Box((a, 0), (a + 2, 6))) for a in (0, 2)]
    ops = [
        [
            P2P(0, 0, 1, halves[0], halves[0]),
            P2P(0, 0, 1, halves[1], halves[1], (OpDep(0, 0),)),
        ],
        [],
    ]
    whole = Box.full((4, 6))
    plan: Plan = build_plan(
        "relayed", 2, [x], [Region(0, "x", whole)], [Goal(r, "x", whole) for r in (0, 1)], ops
    )
    case = replace(gather("all_gather_swizzle", 2, m=4, k=6, tiles=(2, 4, 6)), plan=plan)
    return case, schedule_plan(*case.given)


def test_order_is_proven_through_chains() -> None:
    """The tile that needs the first half waits for the second only, which waits for the first."""
    case, schedule = relayed()
    assert [schedule.waits.row(row) for row in (2, 3)] == [[(0, 1)], [(1, 1)]]
    chained = edited(schedule, "waits", 2, lambda row: [(1, 1)])
    chained = edited(chained, "waits", 3, lambda row: [])
    chained = edited(chained, "op_signals", 0, lambda row: [e for e in row if e != (1, 0)])
    chained = edited(chained, "op_signals", 1, lambda row: [(1, 0)])
    chained = edited(chained, "waits", 2, lambda row: [(0, 1)])
    chained = replace(chained, num_slots=np.array([1, 1], np.int32))
    assert texts(chained, case) == []
    assert all(case.wrong(chained, seed) == [] for seed in range(8))
    loose = edited(chained, "op_waits", 1, lambda row: [])
    loose = edited(loose, "op_signals", 0, lambda row: [])
    loose = replace(loose, num_slots=np.array([0, 1], np.int32))
    assert [f.code for f in found(loose, case)] == ["unordered", "unordered"]
    assert "r0.1 depends on r0.0, but nothing" in texts(loose, case)[1]
    assert any(case.wrong(loose, seed) for seed in range(8))


def test_a_count_below_all_raises_proves_nothing() -> None:
    """One slot for both halves: a wait for one of two raises does not say which."""
    case, schedule = relayed()
    shared = edited(schedule, "op_signals", 0, lambda row: [(0, 0), (1, 0)])
    shared = edited(shared, "op_signals", 1, lambda row: [(1, 0)])
    shared = replace(shared, num_slots=np.array([1, 1], np.int32))
    one = edited(edited(shared, "waits", 2, lambda r: [(0, 1)]), "waits", 3, lambda r: [(0, 2)])
    assert [f.code for f in found(one, case)] == ["unordered"]
    both = edited(edited(shared, "waits", 2, lambda r: [(0, 2)]), "waits", 3, lambda r: [])
    assert found(both, case) == []


def test_many_faults_are_counted() -> None:
    case = gather("all_gather_swizzle", 2, m=120, k=6, tiles=(1, 2, 6))
    schedule = schedule_plan(*case.given)
    loose = with_rows(schedule, "waits", [[] for _ in range(schedule.waits.rows)])
    last = found(loose, case)[-1]
    assert str(last) == "[unordered]: and 140 more tiles and operations like the ones above"


def test_check_raises_with_every_finding(scattered: tuple[Case, Schedule]) -> None:
    case, schedule = scattered
    check_schedule(schedule, *case.given[1:])
    broken = edited(schedule, "op_waits", 0, lambda row: [])
    with pytest.raises(PlanError, match=r"schedule of reduce_scatter_direct: 2 finding\(s\)"):
        check_schedule(broken, *case.given[1:])


def test_a_dependency_on_a_landing_is_one_on_the_tiles_that_add_it() -> None:
    case = scatter("all_reduce_two_shot", 2, m=4, tiles=(2, 4, 5), produced=True)
    c = case.plan.columns
    ops = [list(case.plan.ops(r)) for r in (0, 1)]
    bare = [
        [
            replace(
                op,
                deps=tuple(
                    d for d in op.deps if op.reduce != "none" or not isinstance(d, ComputeDep)
                ),
            )
            for op in listed_
        ]
        for listed_ in ops
    ]
    plan = build_plan("bare", 2, case.plan.tensors, case.plan.initial, case.plan.goals, bare)
    assert plan.num_ops == c.n
    case = replace(case, plan=plan)
    schedule = schedule_plan(*case.given)
    assert found(schedule, case) == []
    row = next(i for i in range(c.n) if plan.row(i).reduce == "none")
    loose = edited(schedule, "op_waits", row, lambda entries: [])
    assert any("completion of r" in f.message for f in found(loose, case))


def test_plans_with_collectives() -> None:
    plan = templates.get("collective")(2, (4, 6), kind="all_gather")
    space, accesses = product(4, 6, (2, 2, 6))
    case = gather("all_gather_swizzle", 2, m=4, k=6, tiles=(2, 2, 6))
    schedule = replace(schedule_plan(*case.given), plan=plan)
    with pytest.raises(UnsupportedError, match=r"schedule of .*: its plan has collectives"):
        verify_schedule(schedule, space, accesses, case.axis_map)


def test_an_axis_map_that_does_not_fit(gathered: tuple[Case, Schedule]) -> None:
    case, schedule = gathered
    with pytest.raises(InputError, match="tensor x is bound to operand 'q'"):
        verify_schedule(schedule, case.space, case.accesses, AxisMap.of({"x": "q"}))
