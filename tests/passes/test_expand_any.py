"""Any choice of templates for any collectives: a plan that does the same, or one clear error."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from syncopate_jax.check.verify import verify
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir import presets
from syncopate_jax.ir.comm import COLLECTIVES
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.topology import Topology
from syncopate_jax.passes.collective_choice import Choice
from syncopate_jax.passes.expand_collectives import expand_collectives
from syncopate_jax.plans.collective import collective
from syncopate_jax.registry import templates
from tests.check.random_plans import random_plan
from tests.conformance.template import assert_sound

NAMES = (*templates.names(), "direct", "synthesis")
EXTRA: list[dict[str, Any]] = [
    {}, {}, {"split": 2}, {"split": 3}, {"mode": "pull"}, {"algorithm": "ring"}, {"chunks": 2},
    {"split": 0}, {"colour": 1}, {"shape": (3,)}, {"num_ranks": 1}, {"produced": True},
    {"name": "mine"}, {"dtype": "int8"}, {"reduce": "max"}, {"axis": 1}, {"split_axis": 1},
    {"shards": (1, 2)}, {"nodes": 2}, {"per_node": 2}, {"tensor": "y"}, {"seed": 3}, {"root": 1},
    {"group": (0, 1)}, {"one_shot": True}, {"dimension": 0}, {"channel": "nic"},
]  # fmt: skip


def odd_collective(rng: random.Random) -> Plan | None:
    """One of any kind and shape over any groups; None where there is no such collective."""
    ranks, ndim = rng.randint(1, 8), rng.randint(1, 4)
    shape = tuple(rng.choice((0, 1, 2, 3, 5, 7, 8, 12)) for _ in range(ndim))
    given: dict[str, Any] = {"kind": rng.choice(COLLECTIVES), "split": rng.randint(1, 3)}
    given["axis"] = rng.randrange(ndim)
    rest, groups = rng.sample(range(ranks), ranks), []
    while rest and rng.random() < 0.8:
        size = rng.randint(1, len(rest))
        groups.append(tuple(rest[:size]))
        del rest[:size]
    if rng.random() < 0.6:
        given["groups"] = groups
    elif rng.random() < 0.5:
        extent = shape[given["axis"]]
        ends = [0, *sorted(rng.randint(0, extent) for _ in range(ranks - 1)), extent]
        given["shards"] = [b - a for a, b in itertools.pairwise(ends)]
    for key, values in (
        ("produced", (True, False)),
        ("concat_axis", range(ndim)),
        ("split_axis", range(ndim)),
        ("reduce", ("max",)),
    ):
        if rng.random() < 0.3:
            given[key] = rng.choice(values)
    try:
        return collective(ranks, shape, **given)
    except InputError:
        return None


def any_topology(rng: random.Random, ranks: int) -> Topology:
    found = [presets.ring(ranks), presets.h200_nvlink(ranks), presets.nodes(ranks, 1)]
    for rows in (rows for rows in range(1, ranks) if ranks % rows == 0):
        found += [presets.torus(rows, ranks // rows), presets.nodes(rows, ranks // rows, 1)]
    return rng.choice(found)


def any_choice(rng: random.Random, kind: str) -> Choice:
    likely = [name for name in NAMES if kind in name or name in ("direct", "synthesis")]
    name = rng.choice(likely if rng.random() < 0.7 else NAMES)
    return name if rng.random() < 0.4 else (name, rng.choice(EXTRA))


def attempt(seed: int) -> str:
    """What became of one plan: it is right, there was none, or it was refused."""
    rng = random.Random(seed)
    plan = random_plan(seed) if rng.random() < 0.4 else odd_collective(rng)
    if plan is None:
        return "none"
    assert verify(plan) == ()
    how = rng.choice(("template", "template", "synthesis", "direct"))
    choose = {kind: any_choice(rng, kind) for kind in COLLECTIVES if rng.random() < 0.6}
    topology = any_topology(rng, plan.num_ranks) if rng.random() < 0.9 else None
    try:
        expanded = expand_collectives(plan, how, choose, topology)
    except (InputError, UnsupportedError) as error:
        assert str(error) and len(str(error)) < 600
        return "refused"
    assert expanded.goals == plan.goals
    assert_sound(expanded)
    return "right"


@pytest.mark.parametrize("seeds", [range(60)])
def test_does_the_same_or_is_refused(seeds: range) -> None:
    found = [attempt(seed) for seed in seeds]
    assert {"right", "refused"} <= set(found)


@pytest.mark.parametrize("produced", [True, False])
def test_sums_of_a_result_and_of_what_is_not_are_kept_apart(produced: bool) -> None:
    """Synthesis halves what 8 nodes of one rank add up: sums of half the data hold the result."""
    plan = collective(8, (32, 2), kind="reduce_scatter", produced=produced)
    expanded = expand_collectives(plan, "synthesis", None, presets.nodes(8, 1))
    assert expanded.goals == plan.goals
    assert_sound(expanded)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 5000, 1000))
def test_many_do_the_same_or_are_refused(first: int) -> None:
    found = [attempt(seed) for seed in range(first, first + 1000)]
    assert found.count("right") > 400 and found.count("refused") > 40
