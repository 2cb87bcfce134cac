"""The 2-D mesh all-gather: its text, its phases, its channels."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.execute import execute
from syncopate_jax.errors import InputError
from syncopate_jax.ir.comm import OpDep
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans.all_gather_mesh import all_gather_mesh
from tests.golden.compare import golden


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_text(mode: str) -> None:
    plan = all_gather_mesh(4, (4, 4), mode=mode, produced=True, second_channel="nic")
    text = to_text(plan)
    assert text == golden(f"plans/all_gather_mesh_{mode}.txt", text)


@pytest.mark.parametrize("first", ["rows", "columns"])
@pytest.mark.parametrize("mesh", [(2, 3), (3, 2), (1, 6), (6, 1), None])
def test_gathers_on_every_mesh(mesh: tuple[int, int] | None, first: str) -> None:
    x = np.arange(13.0)[:, None]
    plan = all_gather_mesh(6, x.shape, mesh=mesh, first=first, split=2)
    held = execute(plan, {(rank, "x"): x for rank in range(6)}, seed=5)
    for rank in range(6):
        np.testing.assert_array_equal(held[rank, "x"], x)


@pytest.mark.parametrize(("first", "near"), [("columns", {0, 1, 2}), ("rows", {0, 3})])
def test_first_phase_stays_in_one_line(first: str, near: set[int]) -> None:
    plan = all_gather_mesh(6, (6, 2), mesh=(2, 3), first=first, second_channel="nic")
    ops = list(plan.ops(0))
    assert {op.dst_rank for op in ops if op.channel == "nvlink"} == near - {0}
    assert all(op.dst_rank not in near for op in ops if op.channel == "nic")


def test_second_phase_forwards_each_shard_as_it_comes() -> None:
    plan = all_gather_mesh(4, (4, 2), mesh=(2, 2))
    own, forwarded = plan.op(0, 1), plan.op(0, 2)
    assert own.deps == ()
    assert forwarded.deps == (OpDep(1, 0),)
    assert plan.op(1, 0).dst == forwarded.src


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ((2, 2), "mesh 2 x 2 has 4 ranks, needs 6"),
        ((6,), r"mesh \(6,\) has 1 axes, needs 2"),
        ((0, 6), r"mesh\[0\] must be in 1..2147483647, found 0"),
    ],
)
def test_mesh_must_hold_the_ranks(mesh: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        all_gather_mesh(6, (6, 2), mesh=mesh)


def test_first_must_be_a_mesh_axis() -> None:
    with pytest.raises(InputError, match="first 'depth' is not one of columns, rows"):
        all_gather_mesh(6, (6, 2), first="depth")
