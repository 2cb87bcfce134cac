"""The broadcast: its text, chain and direct, what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.errors import InputError
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.broadcast import broadcast
from tests.golden.compare import golden


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("algorithm", ["chain", "direct"])
def test_text(mode: str, algorithm: str) -> None:
    plan = broadcast(3, (4, 2), root=1, split=2, mode=mode, algorithm=algorithm, produced=True)
    text = to_text(plan)
    assert text == golden(f"plans/broadcast_{algorithm}_{mode}.txt", text)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("algorithm", ["chain", "direct"])
def test_reaches_every_rank(mode: str, algorithm: str) -> None:
    x = np.arange(14.0).reshape(7, 2)
    plan = broadcast(5, x.shape, root=3, split=3, mode=mode, algorithm=algorithm)
    held = execute(plan, {(3, "x"): x}, seed=3)
    for rank in range(5):
        np.testing.assert_array_equal(held[rank, "x"], x)


def test_chain_is_a_pipeline_of_pieces() -> None:
    plan = broadcast(4, (4, 2), split=2)
    assert [len(list(plan.ops(rank))) for rank in range(4)] == [2, 2, 2, 0]
    assert str(plan.op(2, 1).deps[0]) == "r1.1"


def test_root_must_be_a_rank() -> None:
    with pytest.raises(InputError, match="root 4 is not one of 4 ranks"):
        broadcast(4, (4, 2), root=4)


def test_algorithm_must_be_known() -> None:
    with pytest.raises(InputError, match="algorithm 'tree' is not one of chain, direct"):
        broadcast(4, (4, 2), algorithm="tree")
