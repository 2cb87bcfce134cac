"""Expanding collectives: every kind and template, scratch, and dependencies on both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncopate_jax.check.execute import execute
from syncopate_jax.check.verify import verify
from syncopate_jax.errors import InputError, PlanError, UnsupportedError
from syncopate_jax.ir import presets
from syncopate_jax.ir.comm import COLLECTIVES, ComputeDep, OpDep
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.text import from_text, to_text
from syncopate_jax.passes.collective_choice import Choice
from syncopate_jax.passes.expand_collectives import expand_collectives
from syncopate_jax.plans.all_gather_ring import all_gather_ring
from syncopate_jax.plans.collective import collective
from tests.check.random_plans import random_plan
from tests.conformance.template import assert_sound
from tests.golden.compare import golden

CHOICES: dict[str, list[Choice]] = {
    "all_gather": [
        "all_gather_swizzle",
        "all_gather_ring",
        ("all_gather_double_ring", {"split": 2}),
        ("all_gather_mesh", {"mode": "pull"}),
    ],
    "reduce_scatter": [
        "reduce_scatter_direct",
        "reduce_scatter_ring",
        ("reduce_scatter_ring", {"mode": "pull", "split": 2}),
    ],
    "all_reduce": [
        "all_reduce_two_shot",
        ("all_reduce_two_shot", {"algorithm": "ring", "split": 2}),
        ("all_reduce_two_shot", {"algorithm": "ring", "mode": "pull"}),
        "all_reduce_one_shot",
        ("all_reduce_one_shot", {"mode": "pull", "split": 2}),
    ],
    "all_to_all": [("all_to_all_blocks", {"mode": "pull", "split": 2})],
    "broadcast": ["broadcast", ("broadcast", {"algorithm": "direct", "split": 3})],
}
CASES = [(kind, choice) for kind in COLLECTIVES for choice in CHOICES[kind]]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_text(kind: str) -> None:
    plan = collective(3, (3, 4), kind=kind, produced=True)
    text = to_text(expand_collectives(plan))
    assert text == golden(f"passes/expand_{kind}.txt", text)


@pytest.mark.parametrize(("kind", "choice"), CASES, ids=[f"{k}-{c}" for k, c in CASES])
@pytest.mark.parametrize("groups", [None, ((0, 4, 2), (3, 1))])
@pytest.mark.parametrize("shape", [(7, 5, 2), (2, 3, 1)])
def test_does_what_the_collective_did(
    kind: str, choice: Choice, groups: Any, shape: tuple[int, ...]
) -> None:
    plan = collective(5, shape, kind=kind, groups=groups, split=2, split_axis=1)
    expanded = expand_collectives(plan, choose={kind: choice})
    assert not expanded.has_collectives()
    assert_sound(expanded)


@pytest.mark.parametrize("shards", [(1, 4, 0), None])
def test_reshards(shards: tuple[int, ...] | None) -> None:
    plan = collective(3, (5, 2), kind="all_to_all", concat_axis=1, shards=shards)
    expanded = expand_collectives(plan, choose={"all_to_all": ("all_to_all_waves", {"split": 2})})
    assert_sound(expanded)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), ring=st.booleans())
def test_random_plans_stay_sound(seed: int, ring: bool) -> None:
    rings: dict[str, Choice] = {
        "all_gather": "all_gather_ring",
        "reduce_scatter": "reduce_scatter_ring",
        "all_reduce": ("all_reduce_two_shot", {"algorithm": "ring"}),
    }
    plan = expand_collectives(random_plan(seed), choose=rings if ring else None)
    assert not plan.has_collectives()
    assert_sound(plan)


def hand(ops: str, tail: str = "") -> Plan:
    return from_text(
        "plan hand ranks 2\ntensor x [4] float32\ntensor y [4] float32 per_rank\n"
        "tensor z [4] float32 per_rank\ntensor w [2] float32 per_rank\n"
        f"initial r0 x[0:2] produced\ninitial r1 x[2:4] produced\n{ops}{tail}"
    )


def deps(plan: Plan, rank: int, index: int) -> set[str]:
    return set(map(str, plan.op(rank, index).deps))


def test_direct_keeps_collectives() -> None:
    plan = collective(2, (4,))
    assert expand_collectives(plan, how="direct") is plan
    without = all_gather_ring(2, (4,))
    assert expand_collectives(without) is without


def test_operations_wait_for_what_members_waited_for() -> None:
    plan = hand(
        "r0.0 copy y[0:4] -> z[0:4] on nic\n"
        "r0.1 all_gather x[0:2] -> x[0:4] over 0:2 concat 0 after r0.0 compute(r0 x[0:2]) "
        "compute(r0 z[0:1]) on nic # mine\n"
        "r1.0 all_gather x[2:4] -> x[0:4] over 0:2 concat 0 after compute(r1 x[2:4]) on nic\n"
        "r1.1 copy x[0:4] -> y[0:4] after r1.0\n"
    )
    expanded = expand_collectives(plan)
    assert expanded.op(0, 1).direction == "push" and expanded.op(0, 1).channel == "nic"
    assert expanded.op(0, 1).origin.endswith(" for mine")
    # Rank 0 waits for its own; what comes to it from rank 1 for both, but not for tiles of rank 0
    # that produce other data of the collective.
    assert deps(expanded, 0, 1) == {"r0.0", "compute(r0 x[0:2])", "compute(r0 z[0:1])"}
    assert deps(expanded, 1, 0) == {"r0.0", "compute(r1 x[2:4])", "compute(r0 z[0:1])"}
    # What waited for the part of rank 1 waits for all that touches it, and for its tiles.
    assert deps(expanded, 1, 1) == {"r0.1", "r1.0", "compute(r1 x[2:4])"}


def test_group_of_one_passes_waits_on() -> None:
    plan = hand(
        "r0.0 copy y[0:4] -> z[0:4]\n"
        "r0.1 all_reduce z[0:4] -> z[0:4] over 0 sum after r0.0\n"
        "r0.2 all_reduce z[0:4] -> z[0:4] over 0 sum after r0.1 compute(r0 z[0:4])\n"
        "r0.3 copy z[0:4] -> y[0:4] after r0.2\n"
    )
    expanded = expand_collectives(plan)
    assert expanded.num_ops == 2
    assert deps(expanded, 0, 1) == {"r0.0", "compute(r0 z[0:4])"}


def test_result_elsewhere_starts_as_a_copy() -> None:
    plan = hand(
        "r0.0 reduce_scatter y[0:4] -> w[0:2] over 0:2 split 0 sum\n"
        "r1.0 reduce_scatter y[0:4] -> w[0:2] over 0:2 split 0 sum\n"
    )
    expanded = expand_collectives(plan)
    assert str(expanded.op(0, 0).src) == "y[0:2]" and str(expanded.op(0, 0).dst) == "w[0:2]"
    assert deps(expanded, 1, 1) == {"r0.0"}
    y = np.arange(8.0).reshape(2, 4)
    with_data = from_text(
        to_text(expanded).replace("initial r0 x[0:2]", "initial r0 y[0:4]\ninitial r1 y[0:4]\n#")
    )
    held = execute(with_data, {(rank, name): y[rank] for rank in range(2) for name in "yx"})
    np.testing.assert_array_equal(held[0, "w"], y.sum(0)[:2])
    np.testing.assert_array_equal(held[1, "w"], y.sum(0)[2:])
    np.testing.assert_array_equal(held[1, "y"], y[1])


def test_sums_on_the_way_lie_in_scratch() -> None:
    plan = collective(3, (6, 2), kind="reduce_scatter", split=2)
    expanded = expand_collectives(plan, choose={"reduce_scatter": "reduce_scatter_ring"})
    names = [tensor.name for tensor in expanded.tensors]
    assert names == ["y", "scratch0", "scratch1"]
    assert expanded.tensor("scratch0").shape == (6, 1)
    written = [op.dst for rank in range(3) for op in expanded.ops(rank) if op.dst.tensor == "y"]
    own = {goal.box.with_axis(1, i, i + 1) for goal in expanded.goals for i in range(2)}
    assert {chunk.box for chunk in written} == own


def test_all_reduce_in_place_reads_before_it_overwrites() -> None:
    parts = "".join(f"r{rank}.0 all_reduce y[0:4] -> y[0:4] over 0:2 sum\n" for rank in range(2))
    text = "initial r0 y[0:4]\ninitial r1 y[0:4]\n"
    goals = "goal r0 y[0:4] over 0:2\ngoal r1 y[0:4] over 0:2\n"
    for algorithm in ("direct", "ring"):
        choose: dict[str, Choice] = {
            "all_reduce": ("all_reduce_two_shot", {"algorithm": algorithm})
        }
        expanded = expand_collectives(hand(parts, text + goals), choose=choose)
        assert expanded.num_ops == 4
        assert_sound(expanded)


def test_one_shot_in_place_is_refused() -> None:
    parts = "".join(f"r{rank}.0 all_reduce y[0:4] -> y[0:4] over 0:2 sum\n" for rank in range(2))
    message = (
        r"all_reduce_one_shot adds contributions .* all_reduce over \(0, 1\) has both in y; use"
    )
    with pytest.raises(UnsupportedError, match=message):
        expand_collectives(hand(parts), choose={"all_reduce": "all_reduce_one_shot"})


def test_choice_may_depend_on_size() -> None:
    asked: list[tuple[str, int, int]] = []

    def choose(kind: str, ranks: int, size: int) -> Choice:
        asked.append((kind, ranks, size))
        return "all_gather_ring" if size > 8 else "all_gather_swizzle"

    small = expand_collectives(collective(2, (4, 2)), choose=choose)
    large = expand_collectives(collective(2, (4, 4)), choose=choose)
    assert asked == [("all_gather", 2, 8), ("all_gather", 2, 16)]
    assert small.op(0, 0).origin.startswith("all_gather_swizzle(")
    assert large.op(0, 0).origin.startswith("all_gather_ring(")


def test_expansion_keeps_the_ranks_of_a_group_in_order() -> None:
    plan = expand_collectives(collective(4, (3, 2), groups=((3, 0, 2),)))
    assert [op.dst_rank for op in plan.ops(3)] == [0, 2]
    assert [op.src.box.lo[0] for op in plan.ops(0)] == [1, 1]
    assert list(plan.ops(1)) == []
    assert verify(plan) == ()


def test_members_must_agree() -> None:
    plan = hand("r0.0 all_reduce y[0:4] -> z[0:4] over 0:2 sum\n")
    with pytest.raises(PlanError, match="rank 1 lists 0 collectives over group"):
        expand_collectives(plan)


def test_waits_must_exist() -> None:
    plan = hand("r0.0 all_reduce y[0:4] -> z[0:4] over 0 sum after r1.3 # mine\n")
    message = (
        "plan hand: mine of rank 0 waits for r1.3, which does not exist; verify the plan first"
    )
    with pytest.raises(InputError, match=message):
        expand_collectives(plan)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("collective", "template collective is made of collectives, expansion of all_gather over"),
        ("all_to_all_waves", "template all_to_all_waves does not fit all_gather .*argument 'axis'"),
        ("all_to_all_blocks", "template all_to_all_blocks has 2 tensors, all_gather .* needs 1"),
    ],
)
def test_template_must_fit(choice: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        expand_collectives(collective(2, (4, 2)), choose={"all_gather": choice})


OTHERS: list[tuple[str, Choice, str]] = [
    ("all_gather", "reduce_scatter_ring", "reduce_scatter_ring does not do what all_gather over"),
    ("broadcast", "all_to_all_waves", "all_to_all_waves does not do what broadcast over"),
    ("broadcast", "all_gather_mesh", "all_gather_mesh does not do what broadcast over"),
    ("all_gather", ("all_gather_ring", {"shape": (6, 8)}), r"{'shape': \(6, 8\)} does not do what"),
    ("all_reduce", ("all_reduce_one_shot", {"num_ranks": 1}), "'num_ranks': 1} does not do what"),
    ("all_reduce", ("all_reduce_two_shot", {"produced": True}), "'produced': True} does not do"),
    ("all_to_all", ("all_to_all_blocks", {"counts": [[1, 0]] * 2}), "does not do what all_to_all"),
    ("all_gather", ("synthesis", {"group": (1, 0, 2)}), "does not do what all_gather over"),
    ("all_gather", ("synthesis", {"colour": 1}), "synthesis does not fit all_gather .*'colour'"),
]


@pytest.mark.parametrize(("kind", "choice", "message"), OTHERS, ids=range(len(OTHERS)))
def test_refuses_plans_that_do_something_else(kind: str, choice: Choice, message: str) -> None:
    ranks = 2 if kind == "all_to_all" else 3
    plan = collective(ranks, (6, 4), kind=kind)
    with pytest.raises(UnsupportedError, match=message):
        expand_collectives(plan, choose={kind: choice}, topology=presets.ring(ranks))


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (
            {"allgather": "all_gather_ring"},
            "choose: kind 'allgather' is not one of all_gather, red",
        ),
        ("all_gather_ring", "choose must be a mapping or a function, found 'all_gather_ring'"),
        ({"all_gather": 3}, "choose gives 3 for all_gather; it needs the name of a template"),
        (
            {"all_gather": ("all_gather_ring",)},
            r"choose gives \('all_gather_ring',\) for all_gather",
        ),
        ({"all_gather": ("all_gather_ring", 2)}, "a pair of that and a mapping of its arguments"),
        (
            {"all_gather": ("all_gather_ring", {2: 2})},
            r"choose gives \('all_gather_ring', {2: 2}\)",
        ),
        (lambda kind, ranks, size: None, "choose gives None for all_gather"),
    ],
)
def test_refuses_other_choices(choose: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        expand_collectives(collective(2, (4,)), choose=choose)


def test_refuses_unknown_names() -> None:
    with pytest.raises(InputError, match="how 'magic' is not one of template, direct"):
        expand_collectives(collective(2, (4,)), how="magic")
    with pytest.raises(InputError, match="no plan template is called 'ring'"):
        expand_collectives(collective(2, (4,)), choose={"all_gather": "ring"})


def test_new_dependencies_are_of_the_known_kinds() -> None:
    plan = expand_collectives(collective(3, (3, 4), kind="all_reduce"))
    found = {type(dep) for rank in range(3) for op in plan.ops(rank) for dep in op.deps}
    assert found == {OpDep, ComputeDep}


def test_a_group_that_does_not_hold_its_members() -> None:
    plan = replace(collective(3, (6, 6), kind="all_gather"), groups=((0, 2),))
    with pytest.raises(PlanError, match=r"rank 1 op 0 \[bad-group\]: rank 1 takes part in a coll"):
        expand_collectives(plan)
