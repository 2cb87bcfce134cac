"""The ring reduce-scatter: its text, its sums, its dependencies."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.ir.comm import ComputeDep, OpDep
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.reduce_scatter_ring import reduce_scatter_ring
from tests.golden.compare import golden


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_text(mode: str) -> None:
    text = to_text(reduce_scatter_ring(3, (5, 4), split=2, mode=mode))
    assert text == golden(f"plans/reduce_scatter_ring_{mode}.txt", text)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_reduces_ragged_and_empty_shards(mode: str, reduce: str) -> None:
    y = np.random.default_rng(0).integers(-99, 99, (4, 7, 3))
    sizes = (3, 0, 1, 3)
    plan = reduce_scatter_ring(4, (7, 3), shards=sizes, split=2, mode=mode, reduce=reduce)
    held = execute(plan, {(rank, "y"): y[rank] for rank in range(4)}, seed=3)
    expected = y.sum(0) if reduce == "sum" else y.max(0)
    for rank, (start, size) in enumerate(zip((0, 3, 3, 4), sizes, strict=True)):
        shard = slice(start, start + size)
        np.testing.assert_array_equal(held[rank, "y"][shard], expected[shard])


def test_hop_waits_for_the_sum_so_far_and_the_senders_partial() -> None:
    plan = reduce_scatter_ring(4, (8, 4))
    hop = plan.op(1, 1)
    assert hop.deps == (OpDep(0, 0), ComputeDep(1, hop.src))
    assert plan.op(0, 0).dst == hop.src


def test_sum_of_a_shard_ends_at_its_owner() -> None:
    plan = reduce_scatter_ring(4, (4, 1))
    last = [list(plan.ops(rank))[-1] for rank in range(4)]
    assert [(op.dst_rank, op.dst.box.lo[0]) for op in last] == [(1, 1), (2, 2), (3, 3), (0, 0)]
