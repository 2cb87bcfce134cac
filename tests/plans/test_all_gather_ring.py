"""The ring all-gather: its text and how pieces pipeline."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.ir.comm import ComputeDep, OpDep
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.all_gather_ring import all_gather_ring
from tests.golden.compare import golden


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_text(mode: str) -> None:
    text = to_text(all_gather_ring(3, (5, 4), split=2, mode=mode, produced=True))
    assert text == golden(f"plans/all_gather_ring_{mode}.txt", text)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_gathers_ragged_and_empty_shards(mode: str) -> None:
    x = np.arange(28.0).reshape(4, 7)
    plan = all_gather_ring(4, (4, 7), axis=1, shards=(3, 0, 1, 3), split=2, mode=mode)
    held = execute(plan, {(rank, "x"): x for rank in range(4)}, seed=3)
    for rank in range(4):
        np.testing.assert_array_equal(held[rank, "x"], x)


def test_piece_waits_only_for_the_hop_that_brought_it() -> None:
    plan = all_gather_ring(4, (8, 4), split=2, produced=True)
    own, forwarded = plan.op(1, 1), plan.op(1, 3)
    assert own.deps == (ComputeDep(1, own.src),)
    assert forwarded.deps == (OpDep(0, 1),)
    assert plan.op(0, 1).dst == forwarded.src


def test_only_neighbours_talk() -> None:
    plan = all_gather_ring(5, (5, 4))
    ends = {(op.src_rank, op.dst_rank) for rank in range(5) for op in plan.ops(rank)}
    assert ends == {(rank, (rank + 1) % 5) for rank in range(5)}
