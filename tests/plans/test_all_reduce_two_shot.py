"""The two-phase all-reduce: its text, its sums, its dependencies."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.check.verify import verify
from syncopate_jax.errors import InputError
from syncopate_jax.ir.comm import ComputeDep, OpDep
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.all_reduce_two_shot import all_reduce_two_shot
from tests.golden.compare import golden


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_text(mode: str, algorithm: str) -> None:
    text = to_text(all_reduce_two_shot(3, (3, 4), mode=mode, algorithm=algorithm))
    assert text == golden(f"plans/all_reduce_two_shot_{algorithm}_{mode}.txt", text)


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_reduces(mode: str, algorithm: str, reduce: str, ranks: int) -> None:
    y = np.random.default_rng(0).integers(-99, 99, (ranks, 7, 3))
    plan = all_reduce_two_shot(
        ranks, (7, 3), split=2, mode=mode, algorithm=algorithm, reduce=reduce
    )
    held = execute(plan, {(rank, "y"): y[rank] for rank in range(ranks)}, seed=3)
    expected = y.sum(0) if reduce == "sum" else y.max(0)
    for rank in range(ranks):
        np.testing.assert_array_equal(held[rank, "out"], expected)


def test_direct_copies_wait_for_every_reduction_and_the_owners_tiles() -> None:
    plan = all_reduce_two_shot(4, (4, 2))
    gather = list(plan.ops(1))[3]
    assert gather.dst.tensor == "out"
    assert set(gather.deps) == {OpDep(0, 0), OpDep(2, 2), OpDep(3, 1), ComputeDep(1, gather.src)}
    for dep in gather.deps:
        if isinstance(dep, OpDep):
            assert plan.op(dep.rank, dep.index).dst == gather.src


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_over_many_ranks_copies_wait_for_their_owners_own(mode: str) -> None:
    plan = all_reduce_two_shot(6, (6, 2), mode=mode, most_listed=5)
    copy = plan.op(2, 5)
    assert (copy.src_rank, copy.dst_rank, copy.dst.tensor) == (2, 2, "out")
    waits = [dep for dep in copy.deps if isinstance(dep, OpDep)]
    assert {plan.op(dep.rank, dep.index).src_rank for dep in waits} == {*range(6)} - {2}
    assert all(plan.op(dep.rank, dep.index).dst == copy.src for dep in waits)
    others = [plan.op(rank, i) for rank in range(6) for i in range(6, 11)]
    assert all([d for d in op.deps if isinstance(d, OpDep)] == [OpDep(op.src_rank, 5)]
               for op in others)  # fmt: skip
    assert len(plan.columns.dep_rank) == 2 * 6 * 5


def test_dependencies_and_their_table_grow_with_the_square_of_the_ranks() -> None:
    assert len(all_reduce_two_shot(8, (8, 2)).columns.dep_rank) == 8 * 8 * 7
    small, large = (all_reduce_two_shot(ranks, (ranks, 2)).columns for ranks in (73, 146))
    assert len(large.dep_rank) < 4.1 * len(small.dep_rank) < 50_000
    assert verify(all_reduce_two_shot(73, (73, 2))) == ()


def test_most_listed_is_a_number_of_ranks() -> None:
    with pytest.raises(InputError, match=r"most_listed must be in 0\.\.\d+, found -1"):
        all_reduce_two_shot(4, (4, 2), most_listed=-1)


def test_ring_has_one_dependency_an_operation() -> None:
    plan = all_reduce_two_shot(6, (12, 2), algorithm="ring")
    assert int(np.diff(plan.columns.dep_start).max()) == 1


def test_algorithm_must_be_known() -> None:
    with pytest.raises(InputError, match="algorithm 'tree' is not one of direct, ring"):
        all_reduce_two_shot(4, (4, 2), algorithm="tree")
