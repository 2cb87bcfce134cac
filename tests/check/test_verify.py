"""Verification as a whole: random plans, random faults, random columns."""

from __future__ import annotations

import os
import random
import re

import numpy as np
import pytest

from syncopate_jax.check.goals import run_goals
from syncopate_jax.check.verify import check, verify
from syncopate_jax.errors import Finding, InputError, PlanError, SyncopateError
from syncopate_jax.ir.columns import Columns
from syncopate_jax.ir.comm import Collective, Operation
from syncopate_jax.ir.plan import Plan
from tests.check.mutations import FAULTS, change_every_reduce, mutant
from tests.check.random_plans import random_plan
from tests.check.small_plans import halves, random_values, relay

CASES = int(os.environ.get("SYNCOPATE_CHECK_CASES", "2000"))
"""Random plans, and as many random faults; raise it for a longer search. `.ci/run` needs 2,000."""
BATCH, QUICK = 100, 600
each_batch = pytest.mark.parametrize(
    "start",
    [
        pytest.param(start, marks=[pytest.mark.slow] if start >= QUICK else [])
        for start in range(0, CASES, BATCH)
    ],
)


def test_check_raises_all_findings_at_once() -> None:
    check(halves())
    with pytest.raises(
        PlanError, match=r"small: 2 finding\(s\)\n  rank 1 op 0 \[race\].*\n.*rank 2"
    ):
        check(relay())


def right(plan: Plan, seed: int | None) -> bool:
    outcomes = run_goals(plan, random_values(plan), seed=seed)
    return all(np.array_equal(one.found, one.expected) for one in outcomes)


@each_batch
def test_valid_plans_verify_and_are_right_in_any_order(start: int) -> None:
    for seed in range(start, start + BATCH):
        plan = random_plan(seed)
        assert verify(plan) == (), f"random_plan({seed})"
        for order in (None, 2 * seed, 2 * seed + 1):
            assert right(plan, order), f"random_plan({seed}) in order {order}"


@each_batch
def test_faults_that_can_show_are_found(start: int) -> None:
    """A faulty plan in which nothing is found is right in every order that is tried."""
    for seed in range(start, start + BATCH):
        made = mutant(random_plan(seed), seed)
        if made is None or verify(made[1]):
            continue
        name, plan = made
        for order in (None, *range(5 * seed, 5 * seed + 5)):
            where = f"{name}: mutant(random_plan({seed}), {seed}) in order {order}"
            try:
                assert right(plan, order), where
            except SyncopateError as error:
                raise AssertionError(where) from error


def test_faults_are_of_every_kind_and_most_are_found() -> None:
    made = [mutant(random_plan(seed), seed) for seed in range(10_000, 10_400)]
    kinds = {one[0] for one in made if one is not None}
    assert kinds == set(FAULTS)
    caught = [bool(verify(one[1])) for one in made if one is not None]
    assert np.mean(caught) > 0.6


def test_a_changed_kind_of_all_reductions_is_found() -> None:
    tried = 0
    for seed in range(400):
        plan = random_plan(seed)
        lists = [list(plan.ops(rank)) for rank in range(plan.num_ranks)]
        changed = change_every_reduce(plan, lists, random.Random(seed))
        if changed is not None:
            several = any(op.reduce != "none" for op in _exchanging(changed))
            codes = {finding.code for finding in verify(changed)}
            assert codes == ({"wrong-reduction"} if several else set()), f"random_plan({seed})"
            tried += several
    assert tried > 100


def _exchanging(plan: Plan) -> list[Operation]:
    """All operations but collectives of one rank, which reduce nothing."""
    ops = (op for rank in range(plan.num_ranks) for op in plan.ops(rank))
    return [op for op in ops if not (isinstance(op, Collective) and len(op.ranks) == 1)]


def scrambled(rng: random.Random) -> Plan:
    """A plan with random entries in its columns, mostly in range, some far out of it."""
    plan = random_plan(rng.randrange(1000))
    changed = {}
    for name in Columns.__slots__:
        column = np.array(getattr(plan.columns, name))
        if name.endswith("start") or not column.size or rng.random() < 0.6:
            continue
        flat = column.reshape(-1)
        for _ in range(rng.randint(1, 3)):
            low, high = rng.choice(((0, 2), (-1, 8), (-(2**31), 2**31 - 1)))
            flat[rng.randrange(len(flat))] = rng.randint(low, high)
        changed[name] = np.sort(column) if name == "rank" and rng.random() < 0.5 else column
    columns = {name: getattr(plan.columns, name) for name in Columns.__slots__}
    return plan.with_columns(Columns(**(columns | changed)))


def test_what_is_no_plan() -> None:
    for wrong in ("ring.json", None):
        with pytest.raises(InputError, match=re.escape(
            f"verify: plan needs a Plan, found {wrong!r}; syncopate_jax.templates.get(name)(ranks, "
            f"shape, …) makes one, syncopate_jax.ir.serial.load reads one from a file"
        )):  # fmt: skip
            verify(wrong)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
@each_batch
def test_any_columns_give_findings_and_nothing_else(start: int) -> None:
    for seed in range(start, start + BATCH):
        plan = scrambled(random.Random(seed))
        findings = verify(plan)
        assert all(isinstance(finding, Finding) for finding in findings)
        if not findings:
            assert right(plan, seed), f"scrambled({seed})"
