"""The one-hop all-gather: its text, its order, and its size."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.all_gather_swizzle import all_gather_swizzle
from tests.golden.compare import golden


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_text(mode: str) -> None:
    text = to_text(all_gather_swizzle(3, (5, 4), split=2, mode=mode, produced=True))
    assert text == golden(f"plans/all_gather_swizzle_{mode}.txt", text)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_gathers_ragged_and_empty_shards(mode: str) -> None:
    x = np.arange(28.0).reshape(7, 4)
    plan = all_gather_swizzle(4, (7, 4), shards=(3, 0, 1, 3), split=2, mode=mode)
    held = execute(plan, {(rank, "x"): x for rank in range(4)}, seed=3)
    for rank in range(4):
        np.testing.assert_array_equal(held[rank, "x"], x)


def test_rank_serves_its_successors_in_turn() -> None:
    plan = all_gather_swizzle(5, (5, 4))
    assert [op.dst_rank for op in plan.ops(3)] == [4, 0, 1, 2]
    plan = all_gather_swizzle(5, (5, 4), mode="pull")
    assert [op.src_rank for op in plan.ops(3)] == [4, 0, 1, 2]


def test_one_rank_has_nothing_to_do() -> None:
    assert all_gather_swizzle(1, (5, 4), split=3).num_ops == 0


def test_thousand_ranks_are_built_without_a_loop_over_operations() -> None:
    plan = all_gather_swizzle(1024, (2048, 64))
    assert plan.num_ops == 1024 * 1023
    assert plan.op(1023, 1022).dst_rank == 1022
