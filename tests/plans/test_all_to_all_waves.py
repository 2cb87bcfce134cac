"""The resharding all-to-all: its text, its waves, its size."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.errors import InputError
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.all_to_all_waves import all_to_all_waves
from tests.golden.compare import golden


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_text(mode: str) -> None:
    text = to_text(all_to_all_waves(3, (3, 6), split=2, mode=mode, produced=True))
    assert text == golden(f"plans/all_to_all_waves_{mode}.txt", text)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("split_axis", [None, 0, 1, 2])
def test_reshards(mode: str, split_axis: int | None) -> None:
    x = np.arange(7.0 * 5 * 2).reshape(7, 5, 2)
    plan = all_to_all_waves(
        3, x.shape, split=2, split_axis=split_axis, mode=mode, shards=(4, 0, 3), shards_to=(1, 4, 0)
    )
    held = execute(plan, {(rank, "x"): x for rank in range(3)}, seed=3)
    np.testing.assert_array_equal(held[0, "x"][:, :1], x[:, :1])
    np.testing.assert_array_equal(held[1, "x"][:, 1:], x[:, 1:])


def test_first_pieces_go_to_every_peer_before_second_ones() -> None:
    plan = all_to_all_waves(4, (4, 8), split=2)
    assert [(op.dst_rank, op.src.box.lo[1]) for op in plan.ops(1)] == [
        (2, 4), (3, 6), (0, 0), (2, 5), (3, 7), (0, 1),
    ]  # fmt: skip


def test_axes_must_differ() -> None:
    message = "split_from and split_to are both axis 1; exchange blocks of one axis with"
    with pytest.raises(InputError, match=message):
        all_to_all_waves(4, (4, 8), split_from=1, split_to=-1)


def test_thousand_ranks_are_built_without_a_loop_over_operations() -> None:
    assert all_to_all_waves(1024, (1024, 1024)).num_ops == 1024 * 1023
