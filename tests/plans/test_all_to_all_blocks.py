"""The all-to-all of blocks: its text, ragged counts, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.errors import InputError
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.all_to_all_blocks import all_to_all_blocks
from tests.golden.compare import golden

COUNTS = [[2, 0, 3], [0, 1, 1], [4, 1, 0]]


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_text(mode: str) -> None:
    text = to_text(all_to_all_blocks(3, (3, 4), mode=mode, produced=True))
    assert text == golden(f"plans/all_to_all_blocks_{mode}.txt", text)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("split_axis", [None, 1])
def test_exchanges_as_many_as_counted(mode: str, split_axis: int | None) -> None:
    sent = np.random.default_rng(0).integers(-99, 99, (3, 5, 2))
    plan = all_to_all_blocks(3, (5, 2), counts=COUNTS, split=2, split_axis=split_axis, mode=mode)
    held = execute(plan, {(rank, "send"): sent[rank] for rank in range(3)}, seed=3)
    assert plan.tensor("recv").shape == (6, 2)
    for rank in range(3):
        parts = []
        for source, row in enumerate(COUNTS):
            start = sum(row[:rank])
            parts.append(sent[source, start : start + row[rank]])
        expected = np.concatenate(parts)
        np.testing.assert_array_equal(held[rank, "recv"][: len(expected)], expected)


@pytest.mark.parametrize(("produced", "place"), [(False, 0), (True, -1)])
def test_own_block_goes_first_unless_tiles_produce_it(produced: bool, place: int) -> None:
    ops = list(all_to_all_blocks(3, (3, 4), produced=produced).ops(1))
    assert [op.direction for op in ops].count("copy") == 1
    assert ops[place].direction == "copy"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"counts": [[1, 1], [1, 1]], "shards": (1, 2)}, "counts and shards both given"),
        ({"counts": [[1, 1], [1]]}, r"counts has rows of \[2, 1\], needs 2 rows of 2"),
        ({"counts": [[1, 1], [1, -1]]}, r"counts\[1\]\[1\] must be in 0..2147483647, found -1"),
        ({"counts": [[1, 1], [2, 2]]}, "rank 1 sends 4 in counts, its extent has only 3"),
    ],
)
def test_refuses_counts(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        all_to_all_blocks(2, (3, 4), **wrong)
