"""Which plans carry sums over several hops, and what they become."""

from __future__ import annotations

from typing import Any

import pytest

from syncopate_jax.check.verify import verify
from syncopate_jax.ir.hops import hop_tensors, in_float32, rounds_at_hops
from syncopate_jax.registry import templates

HOPS = [
    ("reduce_scatter_ring", {}, {"y"}),
    ("reduce_scatter_ring", {"mode": "pull", "split": 2}, {"y"}),
    ("reduce_scatter_ring", {"reduce": "max"}, set()),
    ("reduce_scatter_direct", {}, set()),
    ("all_reduce_two_shot", {}, set()),
    ("all_reduce_two_shot", {"algorithm": "ring"}, {"y"}),
    ("all_reduce_one_shot", {}, set()),
    ("all_gather_ring", {}, set()),
]


@pytest.mark.parametrize("name,options,wanted", HOPS)
def test_only_what_adds_to_a_sum_and_sends_it_hops(
    name: str, options: dict[str, Any], wanted: set[str]
) -> None:
    plan = templates.get(name)(4, (8, 4), **options)
    assert hop_tensors(plan) == wanted
    assert rounds_at_hops(plan) == bool(wanted)


def test_two_ranks_have_one_hop_and_wide_or_whole_numbers_round_nothing() -> None:
    ring = templates.get("reduce_scatter_ring")
    assert not hop_tensors(ring(2, (4, 4)))
    assert [rounds_at_hops(ring(3, (6, 4), dtype=d)) for d in ("float16", "float32", "int8")] == [
        True,
        False,
        False,
    ]


def test_in_float32_is_the_same_plan_but_for_its_types() -> None:
    narrow = templates.get("all_reduce_two_shot")(3, (6, 4), algorithm="ring")
    wide = in_float32(narrow)
    assert [tensor.dtype for tensor in wide.tensors] == ["float32"] * 2
    assert not rounds_at_hops(wide) and verify(wide) == ()
    assert wide == in_float32(wide)
    whole = templates.get("reduce_scatter_ring")(3, (6, 4), dtype="int16")
    assert in_float32(whole) == whole
