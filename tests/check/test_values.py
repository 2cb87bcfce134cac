"""Goals that end with the wrong value, operations for nothing, and what is delivered twice."""

from __future__ import annotations

import pytest

from syncopate_jax.check import atoms, flow, values
from syncopate_jax.ir.comm import OpDep
from syncopate_jax.ir.plan import Plan, Tensor
from tests.check.small_plans import found, goal, halves, plan_of, push, region

P = "y[0:4,0:6]"


def test_goal_that_nothing_reaches() -> None:
    plan = halves()
    plan = halves(goals=(*plan.goals, goal(1, P, 0, 1)))
    assert found(plan) == [f"rank 1 [wrong-value]: goal {P} misses {P} of rank 0, {P} of rank 1"]


def test_goal_that_is_overwritten() -> None:
    plan = halves(push(0, 1, "x[0:2,0:6]", "x[2:4,0:6]", deps=(OpDep(1, 0),)))
    assert found(plan) == [
        "rank 1 [wrong-value]: goal x[2:4,0:6] misses x[2:4,0:6]; holds x[0:2,0:6], which it must "
        "not"
    ]


def sums(*senders: int, ranks: tuple[int, ...] = (0, 1, 2), reduce: str = "sum") -> Plan:
    """Rank 0 should hold the sum over ``ranks``; each of ``senders`` adds its part in turn."""
    lists: list[list] = [[], [], []]
    for sender in senders:
        lists[sender].append(push(sender, 0, P, reduce=reduce))
    return plan_of(
        *lists,
        initial=[region(r, P) for r in range(3)],
        goals=[goal(0, P, *ranks, reduce=reduce)],
    )


def test_every_contribution_once() -> None:
    assert found(sums(1, 2)) == []
    assert found(sums(1, 2, reduce="max")) == []


@pytest.mark.parametrize(
    ("senders", "ranks", "text"),
    [
        ((1,), (0, 1, 2), f"misses {P} of rank 2"),
        ((1, 2, 2), (0, 1, 2), f"holds {P} of rank 2 2 times"),
        ((1, 2), (0, 1), f"holds {P} of rank 2, which it must not"),
        ((1, 1), (0, 2), f"misses {P} of rank 2; holds {P} of rank 1, which it must not"),
    ],
)
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_contributions_are_named(senders, ranks, text: str, reduce: str) -> None:
    assert found(sums(*senders, ranks=ranks, reduce=reduce)) == [
        f"rank 0 [wrong-value]: goal {P} {text}"
    ]


def test_many_contributions_are_cut_short() -> None:
    plan = plan_of(*[[] for _ in range(7)], initial=[region(0, P)], goals=[goal(0, P, *range(7))])
    names = ", ".join(f"{P} of rank {r}" for r in range(1, 5))
    assert found(plan) == [f"rank 0 [wrong-value]: goal {P} misses {names} and 2 more"]


def halved(kinds: tuple[str, str], goals: tuple[str, str]) -> Plan:
    """Ranks 0 and 1 reduce one half of y each, in their own way; rank 0 wants all in the end."""
    top, bottom = "y[0:2,0:6]", "y[2:4,0:6]"
    return plan_of(
        [push(0, 1, bottom, reduce=kinds[1])],
        [push(1, 0, top, reduce=kinds[0]),
         push(1, 0, bottom, "x[2:4,0:6]", deps=(OpDep(0, 0),))],
        initial=[region(0, P), region(1, P)],
        goals=[goal(0, top, 0, 1, reduce=goals[0]), goal(1, bottom, 0, 1, reduce=goals[1]),
               goal(0, "x[2:4,0:6]", 0, 1, source=bottom, reduce=goals[1])],
    )  # fmt: skip


@pytest.mark.parametrize("kinds", [("sum", "sum"), ("max", "max"), ("sum", "max")])
def test_each_goal_says_how_it_is_reduced(kinds: tuple[str, str]) -> None:
    assert found(halved(kinds, kinds)) == []


def test_goals_reduced_by_what_they_do_not_say() -> None:
    text = "of 2 ranks, but 1 of the 1 operations that reduce into it do so by"
    fix = "reduce by what the goal says, or change the goal"
    assert found(halved(("max", "max"), ("sum", "max"))) == [
        f"rank 0 [wrong-reduction]: goal y[0:2,0:6] is the sum {text} max, the first is r1.0; {fix}"
    ]
    assert found(halved(("max", "sum"), ("max", "max"))) == [
        f"rank 1 [wrong-reduction]: goal y[2:4,0:6] is the max {text} sum, the first is r0.0; "
        f"{fix}",
        f"rank 0 [wrong-reduction]: goal x[2:4,0:6] is the max {text} sum, the first is r0.0; "
        f"{fix}",
    ]


def test_only_the_part_of_a_goal_that_is_reduced_wrongly_is_named() -> None:
    lists = [[], [push(1, 0, "y[0:2,0:6]", reduce="max"), push(1, 0, "y[2:4,0:6]", reduce="sum")]]
    plan = plan_of(*lists, initial=[region(0, P), region(1, P)], goals=[goal(0, P, 0, 1)])
    assert found(plan) == [
        "rank 0 [wrong-reduction]: goal y[0:2,0:6] is the sum of 2 ranks, but 1 of the 1 "
        "operations that reduce into it do so by max, the first is r1.0; reduce by what the goal "
        "says, or change the goal"
    ]


def test_one_operation_of_several_that_reduces_wrongly() -> None:
    """The sum of a chain whose second hop takes the maximum."""
    plan = plan_of(
        [push(0, 1, P, reduce="sum")],
        [push(1, 2, P, reduce="max", deps=(OpDep(0, 0),))],
        [push(2, 3, P, "x[0:4,0:6]", deps=(OpDep(1, 0),))],
        [],
        initial=[region(r, P) for r in range(3)],
        goals=[goal(3, "x[0:4,0:6]", 0, 1, 2, source=P)],
    )
    assert found(plan) == [
        "rank 3 [wrong-reduction]: goal x[0:4,0:6] is the sum of 3 ranks, but 1 of the 2 "
        "operations that reduce into it do so by max, the first is r1.0; reduce by what the goal "
        "says, or change the goal"
    ]


def test_wrong_reductions_beyond_the_first_are_not_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(values, "EXPLAINED", 1)
    texts = found(halved(("sum", "sum"), ("max", "max")))
    assert texts[1:] == [
        f"rank {rank} [wrong-reduction]: goal {box} is reduced in the wrong way, like the ones "
        "above"
        for rank, box in ((1, "y[2:4,0:6]"), (0, "x[2:4,0:6]"))
    ]


def test_goals_beyond_the_first_are_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "EXPLAINED", 1)
    plan = plan_of([], [], initial=[], goals=[goal(r, "x[0:4,0:6]") for r in range(2)])
    assert found(plan) == [
        "rank 0 [wrong-value]: goal x[0:4,0:6] misses x[0:4,0:6]",
        "rank 1 [wrong-value]: goal x[0:4,0:6] has the wrong value, like the ones above",
    ]


def test_operation_that_serves_no_goal() -> None:
    assert found(halves(push(0, 1, "x[0:2,0:6]", "y[0:2,0:6]"))) == [
        "rank 0 op 1 [dead]: brings y[0:2,0:6] to rank 1, which reaches no goal; drop it or add "
        "the goal it serves"
    ]


def test_value_that_is_delivered_twice() -> None:
    assert found(halves(push(0, 1, "x[0:2,0:3]", deps=(OpDep(0, 0),)))) == [
        "rank 0 op 1 [delivered-twice]: brings x[0:2,0:3] to rank 1, which holds that value "
        "already; deliver each element once"
    ]


def test_value_that_was_there_at_the_start() -> None:
    plan = halves()
    plan = halves(initial=(*plan.initial, region(1, "x[0:1,0:6]")))
    assert found(plan) == [
        "rank 0 op 0 [delivered-twice]: brings x[0:1,0:6] to rank 1, which holds that value "
        "already; deliver each element once"
    ]


def moved(source: str) -> Plan:
    """Parts of x go to other coordinates of z, and the goal says from where they come."""
    return plan_of(
        [push(0, 1, "x[1:3,2:5]", "z[4:6,0:3]"), push(0, 1, "x[3:4,2:5]", "z[6:7,0:3]")],
        [],
        initial=[region(0, "x[0:4,0:6]")],
        goals=[goal(1, "z[4:7,0:3]", source=source)],
        tensors=(Tensor("x", (4, 6)), Tensor("z", (9, 3))),
    )


def test_goal_at_other_coordinates() -> None:
    assert found(moved("x[1:4,2:5]")) == []
    assert found(moved("x[1:4,3:6]")) == [
        "rank 1 [wrong-value]: goal z[4:7,0:3] misses x[1:3,3:4]; holds x[1:3,2:3], which it must "
        "not"
    ]


def sliding(extent: int) -> Plan:
    """A vector slides to and fro by one element, which cuts it into single elements."""
    ops = []
    for i in range(4):
        src, dst = (f"x[0:{extent - 1}]", f"z[1:{extent}]")
        names = (src, dst) if i % 2 == 0 else (f"z[0:{extent - 1}]", f"x[0:{extent - 1}]")
        ops.append(push(0, 0, *names, deps=(OpDep(0, i - 1),) if i else ()))
    return plan_of(
        ops, initial=[region(0, f"x[0:{extent}]"), region(0, "z[0:1]")],
        goals=[goal(0, f"z[1:{extent}]", source=f"x[0:{extent - 1}]")],
        tensors=(Tensor("x", (extent,)), Tensor("z", (extent,))),
    )  # fmt: skip


def test_cuts_that_spread_to_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = found(sliding(40))
    assert expected[0].startswith("rank 0 [wrong-value]: goal z[1:40]")
    monkeypatch.setattr(atoms, "MAX_ROUNDS", 2)
    assert found(sliding(40)) == expected


def test_too_many_cuts_are_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atoms, "MAX_ROUNDS", 2)
    monkeypatch.setattr(atoms, "MAX_CUTS", 50)
    assert found(sliding(40)) == [
        "[too-fine]: not proven: boxes cut dimension 0 of the tensors ever finer as they are moved "
        "to other coordinates; 80 elements are more than 50, the most that are told apart; align "
        "the boxes"
    ]


def test_too_many_atoms_are_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MAX_ATOMS", 7)
    assert found(halves()) == [
        "[too-fine]: not proven: the boxes cut each other into 14 pieces, more than the 7 that are "
        "followed; align the boxes of different operations"
    ]


def test_too_many_cells_are_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atoms, "MAX_CELLS", 2)
    assert found(halves()) == [
        "[too-fine]: not proven: the boxes cut the tensors into 3 atoms, more than the 2 that are "
        "numbered; align the boxes of different operations"
    ]


def test_scalars_and_plans_without_operations() -> None:
    scalar = Tensor("s", (), "float32")
    plan = plan_of(
        [push(0, 1, "s[]")], [], initial=[region(0, "s[]")], goals=[goal(1, "s[]")],
        tensors=(scalar,),
    )  # fmt: skip
    assert found(plan) == []
    still = {"initial": [region(0, "x[0:4,0:6]")], "goals": [goal(0, "x[1:2,0:6]")]}
    assert found(plan_of([], **still)) == []
    assert found(plan_of([], initial=[], goals=[], tensors=())) == []
