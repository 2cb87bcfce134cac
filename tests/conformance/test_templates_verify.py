"""What every template must pass: its plans verify, and are right in any order they allow."""

from __future__ import annotations

import itertools
import random
import zlib
from typing import Any

import numpy as np
import pytest

from syncopate_jax.check.goals import run_goals
from syncopate_jax.check.verify import verify
from syncopate_jax.errors import InputError, SyncopateError
from syncopate_jax.ir.plan import Plan
from syncopate_jax.registry import templates
from tests.check.mutations import change_every_reduce, mutant
from tests.check.small_plans import random_values

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "collective": (
        *({"kind": kind} for kind in KINDS),
        {"kind": "all_to_all", "concat_axis": 1},
        {"kind": "all_reduce", "reduce": "max"},
    ),
    "reduce_scatter_direct": ({}, {"reduce": "max"}),
    "reduce_scatter_ring": ({}, {"reduce": "max"}),
    "all_reduce_one_shot": ({}, {"reduce": "max"}),
    "all_reduce_two_shot": ({"algorithm": "direct"}, {"algorithm": "ring"}, {"most_listed": 2}),
}
"""Arguments of one template's own, beyond those that all take."""


def plans(name: str) -> list[tuple[str, Plan]]:
    """Plans of a template over ranks, shapes (ragged, too), splits, directions and producers."""
    made = []
    for ranks, split, produced in itertools.product((1, 2, 3, 4, 6, 8), (1, 3), (False, True)):
        for shape in ((4 * ranks, 6), (3 * ranks + 1, ranks + 2, 2), (3, 5)):
            for own in VARIANTS.get(name, ({},)):
                for mode in ("push", "pull") if name != "collective" else ("",):
                    given = {"split": split, "produced": produced, **own}
                    given |= {"mode": mode} if mode else {}
                    try:
                        plan = templates.get(name)(ranks, shape, **given)
                    except InputError:
                        continue  # this shape leaves no axis to split
                    made.append((f"{name}({ranks}, {shape}, {given})", plan))
    assert len(made) >= 40
    return made


def right(plan: Plan, order: int | None) -> bool:
    outcomes = run_goals(plan, random_values(plan), seed=order)
    return all(np.array_equal(one.found, one.expected) for one in outcomes)


@pytest.mark.parametrize("name", templates.names())
def test_plans_verify(name: str) -> None:
    for text, plan in plans(name):
        assert verify(plan) == (), text


@pytest.mark.parametrize("name", templates.names())
def test_plans_are_right_in_any_order(name: str) -> None:
    for text, plan in plans(name)[::3]:
        seed = zlib.crc32(text.encode())
        for order in (None, seed, seed + 1):
            assert right(plan, order), f"{text} in order {order}"


@pytest.mark.parametrize("name", templates.names())
def test_a_changed_kind_of_all_reductions_is_found(name: str) -> None:
    for text, plan in plans(name)[::3]:
        reduced = any(goal.box.size and len(goal.ranks) > 1 for goal in plan.goals)
        lists = [list(plan.ops(rank)) for rank in range(plan.num_ranks)]
        changed = change_every_reduce(plan, lists, random.Random(0))
        codes = {finding.code for finding in verify(changed or plan)}
        assert codes == ({"wrong-reduction"} if reduced else set()), text


@pytest.mark.parametrize("name", templates.names())
def test_faults_in_plans_are_found(name: str) -> None:
    """A faulty plan in which nothing is found is right in every order that is tried."""
    tried = caught = 0
    for text, plan in plans(name)[::3]:
        seed = zlib.crc32(text.encode())
        made = mutant(plan, seed)
        if made is None:
            continue
        tried += 1
        if verify(made[1]):
            caught += 1
            continue
        for order in (None, seed, seed + 1, seed + 2):
            where = f"{made[0]} in {text}, order {order}"
            try:
                assert right(made[1], order), where
            except SyncopateError as error:
                raise AssertionError(where) from error
    assert caught > tried // 4
