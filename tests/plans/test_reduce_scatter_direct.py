"""The one-hop reduce-scatter: its text, its sums, its size."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.reduce_scatter_direct import reduce_scatter_direct
from tests.golden.compare import golden


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_text(mode: str) -> None:
    text = to_text(reduce_scatter_direct(3, (5, 4), split=2, mode=mode))
    assert text == golden(f"plans/reduce_scatter_direct_{mode}.txt", text)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_reduces_ragged_and_empty_shards(mode: str, reduce: str) -> None:
    y = np.random.default_rng(0).integers(-99, 99, (4, 7, 3))
    sizes = (3, 0, 1, 3)
    plan = reduce_scatter_direct(4, (7, 3), shards=sizes, split=2, mode=mode, reduce=reduce)
    held = execute(plan, {(rank, "y"): y[rank] for rank in range(4)}, seed=3)
    expected = y.sum(0) if reduce == "sum" else y.max(0)
    for rank, (start, size) in enumerate(zip((0, 3, 3, 4), sizes, strict=True)):
        shard = slice(start, start + size)
        np.testing.assert_array_equal(held[rank, "y"][shard], expected[shard])


def test_nothing_waits_for_another_operation() -> None:
    plan = reduce_scatter_direct(4, (8, 4))
    assert len(plan.columns.dep_rank) == 0
    assert [op.dst_rank for op in plan.ops(2)] == [3, 0, 1]
    plan = reduce_scatter_direct(4, (8, 4), mode="pull")
    assert [op.src_rank for op in plan.ops(2)] == [3, 0, 1]


def test_partials_held_from_the_start_need_no_wait() -> None:
    plan = reduce_scatter_direct(4, (8, 4), produced=False)
    assert len(plan.columns.cdep_rank) == 0
    assert not any(region.produced for region in plan.initial)


def test_thousand_ranks_are_built_without_a_loop_over_operations() -> None:
    plan = reduce_scatter_direct(1024, (2048, 64))
    assert plan.num_ops == len(plan.columns.cdep_rank) == 1024 * 1023
