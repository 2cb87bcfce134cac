"""What every registered plan template must do, whatever its algorithm.

A test module runs the suite by subclassing ``TemplateConformance``; templates are found through
the registry, so that a new one is covered as soon as its file is there.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncopate_jax.check.goals import run_goals
from syncopate_jax.check.verify import verify
from syncopate_jax.errors import InputError
from syncopate_jax.ir.comm import COLLECTIVES
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.serial import from_json, to_json
from syncopate_jax.ir.text import from_text, to_text
from syncopate_jax.passes.expand_collectives import expand_collectives
from syncopate_jax.passes.split_chunks import split_chunks
from syncopate_jax.registry import templates

# Arguments of single templates beyond the common ones: each is tried.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "all_gather_double_ring": [{}, {"inner": 1}, {"outer_channel": "nic"}],
    "all_gather_mesh": [{}, {"first": "rows"}, {"second_channel": "nic"}],
    "all_reduce_one_shot": [{}, {"reduce": "max"}],
    "all_reduce_two_shot": [{}, {"algorithm": "ring"}, {"reduce": "max"}, {"most_listed": 2}],
    "all_to_all_waves": [{}, {"split_from": -1, "split_to": 0}],
    "broadcast": [{}, {"algorithm": "direct"}],
    "collective": [{"kind": kind} for kind in COLLECTIVES],
    **{
        f"hierarchical_{kind}": [{}, {"outer_channel": "nic"}]
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    },
    "reduce_scatter_direct": [{}, {"reduce": "max"}],
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_ranks": 0}, r"num_ranks must be in 1\.\.2147483647, found 0"),
    ({"num_ranks": 2.5}, r"num_ranks must be an integer, found 2\.5"),
    ({"shape": (4, -1)}, r"shape\(4, -1\) must be in 0\.\.2147483647, found -1"),
    ({"split": 0}, r"split must be in 1\.\.2147483647, found 0"),
    ({"axis": 2}, r"axis 2 is not an axis of shape \(4, 6\), which has 2 dimensions"),
    ({"split": 2, "split_axis": -3}, r"split_axis -3 is not an axis of shape \(4, 6\)"),
    ({"shards": (1, 2)}, r"shards \(1, 2\) add up to 3, axis 0 of shape \(4, 6\) needs 4"),
    ({"shards": (4,)}, r"2 ranks need as many shards, found 1"),
    ({"shards": (5, -1)}, r"shards\[1\] must be in 0\.\.2147483647, found -1"),
    ({"mode": "carry"}, r"mode 'carry' is not one of push, pull"),
    ({"reduce": "mean"}, r"reduce 'mean' is not one of sum, max"),
    ({"dtype": "float12"}, r"dtype 'float12' is not one of"),
    ({"tensor": "a b"}, r"name 'a b' must be an identifier"),
]


def examples(count: int) -> settings:
    """Hypothesis settings: the suite's tests are inherited, so each runs in a class of its own."""
    return settings(
        deadline=None,
        max_examples=count,
        suppress_health_check=[HealthCheck.differing_executors],
    )


@st.composite
def arguments(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Valid arguments of the template called ``name``: ragged, empty and odd ones among them."""
    ranks = draw(st.integers(1, 9))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=2, max_size=3)))
    found: dict[str, Any] = {
        "split": draw(st.sampled_from((1, 2, 3, 40))),
        "mode": draw(st.sampled_from(("push", "pull"))),
        "produced": draw(st.booleans()),
        **draw(st.sampled_from(VARIANTS.get(name, [{}]))),
    }
    known = inspect.signature(templates.get(name)).parameters
    if "axis" in known:
        found["axis"] = draw(st.integers(-len(shape), len(shape) - 1))
    axis = found.get("axis", found.get("split_from", 0))
    if found["split"] > 1 and name != "collective":
        found["split_axis"] = draw(st.none() | st.integers(0, len(shape) - 1))
    if draw(st.booleans()) and found.get("kind") != "all_to_all":
        cuts = draw(st.lists(st.integers(0, shape[axis]), min_size=ranks - 1, max_size=ranks - 1))
        found["shards"] = tuple(np.diff((0, *sorted(cuts), shape[axis])).tolist())
    kept = {key: value for key, value in found.items() if key in known}
    return {"num_ranks": ranks, "shape": shape, **kept}


def assert_sound(plan: Plan) -> None:
    """The plan verifies, and reaches its goals in issue order and in a random order."""
    assert verify(plan) == ()
    rng = np.random.default_rng(plan.num_ops)
    values = {
        tensor.name: rng.integers(-99, 99, (*(plan.num_ranks,) * tensor.per_rank, *tensor.shape))
        for tensor in plan.tensors
    }
    for seed in (None, 1):
        for outcome in run_goals(plan, values, seed=seed):
            np.testing.assert_array_equal(outcome.found, outcome.expected, str(outcome.goal))


@pytest.mark.parametrize("name", templates.names())
class TemplateConformance:
    """The suite, run once for each template."""

    @settings(
        deadline=None, max_examples=30, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(data=st.data())
    def test_is_sound(self, name: str, data: st.DataObject) -> None:
        plan = templates.get(name)(**data.draw(arguments(name)))
        assert_sound(plan)
        assert plan.has_collectives() == (name == "collective" and plan.num_ops > 0)

    @settings(
        deadline=None, max_examples=20, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(data=st.data())
    def test_reads_back_the_same(self, name: str, data: st.DataObject) -> None:
        given_arguments = data.draw(arguments(name))
        plan = templates.get(name)(**given_arguments)
        assert plan == templates.get(name)(**given_arguments)
        assert plan == from_text(to_text(plan))
        assert plan == from_json(to_json(plan))

    @settings(
        deadline=None, max_examples=15, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(data=st.data(), parts=st.integers(1, 4), axis=st.integers(0, 1))
    def test_can_be_split(self, name: str, data: st.DataObject, parts: int, axis: int) -> None:
        plan = expand_collectives(templates.get(name)(**data.draw(arguments(name))))
        split = split_chunks(plan, parts, axis)
        assert split.num_ops <= parts * plan.num_ops
        assert split.num_ops >= plan.num_ops
        assert_sound(split)

    def test_says_where_operations_come_from(self, name: str) -> None:
        plan = templates.get(name)(3, (4, 6))
        assert plan.name == name
        assert plan.num_ops > 0
        for rank in range(3):
            assert all(op.origin.startswith(f"{name}(num_ranks=3, ") for op in plan.ops(rank))

    def test_takes_names_and_channel(self, name: str) -> None:
        plan = templates.get(name)(3, (4, 6), tensor="activations", channel="nic", name="mine")
        assert plan.name == "mine"
        assert plan.tensors[0].name == "activations"
        assert {op.channel for rank in range(3) for op in plan.ops(rank)} == {"nic"}

    def test_refuses_wrong_arguments(self, name: str) -> None:
        known = inspect.signature(templates.get(name)).parameters
        extra = {"kind": "reduce_scatter"} if name == "collective" else {}
        tried = [case for case in BAD if set(case[0]) <= set(known)]
        assert len(tried) >= 8
        for wrong, message in tried:
            with pytest.raises(InputError, match=message):
                templates.get(name)(**{"num_ranks": 2, "shape": (4, 6), **extra, **wrong})
