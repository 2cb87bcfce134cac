"""The one-hop all-reduce: its text, its sums, its dependencies."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.check.verify import verify
from syncopate_jax.ir.comm import ComputeDep, OpDep
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.all_reduce_one_shot import all_reduce_one_shot
from tests.golden.compare import golden


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_text(mode: str) -> None:
    text = to_text(all_reduce_one_shot(3, (5, 4), split=2, mode=mode))
    assert text == golden(f"plans/all_reduce_one_shot_{mode}.txt", text)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_reduces_what_cannot_be_divided(mode: str, reduce: str, ranks: int) -> None:
    y = np.random.default_rng(0).integers(-99, 99, (ranks, 1, 7, 3))
    plan = all_reduce_one_shot(ranks, (1, 7, 3), split=3, split_axis=1, mode=mode, reduce=reduce)
    assert verify(plan) == ()
    held = execute(plan, {(rank, "y"): y[rank] for rank in range(ranks)}, seed=3)
    expected = y.sum(0) if reduce == "sum" else y.max(0)
    for rank in range(ranks):
        np.testing.assert_array_equal(held[rank, "out"], expected)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_additions_wait_for_the_copy_they_add_to(mode: str) -> None:
    plan = all_reduce_one_shot(4, (4, 2), mode=mode)
    assert len(plan.columns.dep_rank) == 4 * 3
    for rank in range(4):
        own, *others = plan.ops(rank)
        assert (own.src_rank, own.dst_rank, own.reduce) == (rank, rank, "none")
        assert own.deps == (ComputeDep(rank, own.src),)
        for op in others:
            assert set(op.deps) == {OpDep(op.dst_rank, 0), ComputeDep(op.src_rank, op.src)}
            assert op.reduce == "sum"


def test_partials_held_from_the_start_need_no_wait() -> None:
    plan = all_reduce_one_shot(3, (8, 4), produced=False)
    assert len(plan.columns.cdep_rank) == 0
    assert not any(region.produced for region in plan.initial)
