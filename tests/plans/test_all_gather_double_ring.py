"""The double-ring all-gather: its text, its groups, its channels."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.errors import InputError
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.all_gather_double_ring import all_gather_double_ring
from tests.golden.compare import golden


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_text(mode: str) -> None:
    plan = all_gather_double_ring(4, (4, 4), mode=mode, produced=True, outer_channel="nic")
    text = to_text(plan)
    assert text == golden(f"plans/all_gather_double_ring_{mode}.txt", text)


@pytest.mark.parametrize(("ranks", "inner"), [(9, 3), (8, 2), (8, 4), (6, 1), (6, 6), (6, None)])
def test_gathers_for_every_inner_size(ranks: int, inner: int | None) -> None:
    x = np.arange(ranks * 2 + 1.0)[:, None]
    plan = all_gather_double_ring(ranks, x.shape, inner=inner, split=2)
    assert all(len(list(plan.ops(rank))) >= ranks - 1 for rank in range(ranks))
    held = execute(plan, {(rank, "x"): x for rank in range(ranks)}, seed=5)
    for rank in range(ranks):
        np.testing.assert_array_equal(held[rank, "x"], x)


def test_each_shard_crosses_between_groups_once_a_place() -> None:
    plan = all_gather_double_ring(6, (6, 2), inner=3, outer_channel="nic")
    crossing = [op for rank in range(6) for op in plan.ops(rank) if op.channel == "nic"]
    assert len(crossing) == 6
    assert all(op.src_rank // 3 != op.dst_rank // 3 for op in crossing)
    assert len({(op.src, op.dst_rank % 3) for op in crossing}) == 6


def test_inner_must_divide() -> None:
    message = r"inner 4 does not divide 6 ranks; 2 would be left over"
    with pytest.raises(InputError, match=message):
        all_gather_double_ring(6, (6, 2), inner=4)
