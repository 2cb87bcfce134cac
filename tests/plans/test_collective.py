"""Library collectives: their text for each kind, groups, splits, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.check.verify import verify
from syncopate_jax.errors import InputError
from syncopate_jax.ir.comm import COLLECTIVES
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.collective import collective
from tests.golden.compare import golden


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_text(kind: str) -> None:
    text = to_text(collective(4, (4, 6), kind=kind, groups=((0, 2), (3, 1)), split=2))
    assert text == golden(f"plans/collective_{kind}.txt", text)


def test_groups_reduce_on_their_own() -> None:
    y = np.random.default_rng(0).integers(-99, 99, (5, 7, 3))
    plan = collective(5, (7, 3), kind="all_reduce", groups=((0, 3), (4, 1)), split=2)
    assert verify(plan) == ()
    held = execute(plan, {(rank, "y"): y[rank] for rank in (0, 3, 4, 1)})
    for group in ((0, 3), (4, 1)):
        for rank in group:
            np.testing.assert_array_equal(held[rank, "out"], y[list(group)].sum(0))
    assert list(plan.ops(2)) == []


def test_all_to_all_joins_along_another_axis() -> None:
    sent = np.random.default_rng(0).integers(-99, 99, (3, 5, 2))
    plan = collective(3, (5, 2), kind="all_to_all", concat_axis=1, shards=(1, 4, 0))
    held = execute(plan, {(rank, "send"): sent[rank] for rank in range(3)})
    np.testing.assert_array_equal(held[0, "recv"][:1], np.concatenate(sent[:, :1], axis=1))
    np.testing.assert_array_equal(held[1, "recv"][:4], np.concatenate(sent[:, 1:], axis=1))


def test_many_ranks_take_no_longer_each() -> None:
    plan = collective(4096, (4096, 8))  # in time that grows as their square, this took minutes
    assert (plan.num_ops, len(plan.initial), len(plan.goals)) == (4096, 4096, 4096)
    assert plan.initial[-1].box.lo == (4095, 0)


def test_plans_that_would_be_too_long() -> None:
    with pytest.raises(InputError, match="split 5000 makes 20480000 pieces of the shards of 4096"):
        collective(4096, (4096, 5000), split=5000)
    with pytest.raises(InputError, match="the plan would list 16785409 goals, at most 16777216"):
        collective(4097, (4097, 2), kind="all_to_all")


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "broadcast"])
def test_group_of_one_has_nothing_to_move_in_place(kind: str) -> None:
    plan = collective(3, (4, 6), kind=kind, groups=((0,), (1, 2)))
    assert [len(list(plan.ops(rank))) for rank in range(3)] == [0, 1, 1]
    assert verify(plan) == ()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "gossip"}, "kind 'gossip' is not one of all_gather, reduce_scatter"),
        ({"concat_axis": 1}, "concat_axis 1 is given, but all_gather takes only axis"),
        ({"kind": "all_to_all", "shards": (1, 3)}, r"shards \(1, 3\) are given, but an all_to_all"),
        ({"groups": ((0,), ())}, r"groups\[1\] is empty, needs at least one rank"),
        ({"groups": ((0, 2),)}, r"groups\[0\] has rank 2, there are 2 ranks"),
        ({"groups": ((0, 1), (1,))}, r"rank 1 is listed twice in groups \(\(0, 1\), \(1,\)\)"),
        (
            {"split": 2, "split_axis": 0},
            r"all_gather of shape \(4, 6\) along axis 0 cannot be",
        ),
        ({"split": 2, "shape": (4,)}, "cannot be split 2 times along axis 0; needs another axis"),
    ],
)
def test_refuses(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        collective(**{"num_ranks": 2, "shape": (4, 6), **wrong})
