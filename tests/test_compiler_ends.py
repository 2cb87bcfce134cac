"""What ranks must end with so that tiles read, and the operator returns, arrays without gaps."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from syncopate_jax.check.verify import verify
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import InputError
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P
from syncopate_jax.ir.plan import Goal, Region, Tensor
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.plans.all_gather_swizzle import all_gather_swizzle
from tests.backends import own_kernels

each_backend = pytest.mark.parametrize("backend", ["xla", "remote_dma"])


def refused(text: str) -> Any:
    return pytest.raises(InputError, match=re.escape(text))


def without(plan: Any, rank: int, lost: Box, rows: int) -> Any:
    """``plan``, but that ``rank`` ends without ``lost``; goals are cut into so many ``rows``."""
    goals = [
        dataclasses.replace(goal, box=box)
        for goal in plan.goals
        for box in goal.box.split(0, goal.box.shape[0] // rows)
        if goal.rank != rank or box != lost
    ]
    lists = [
        [op for op in plan.ops(r) if (op.dst_rank, op.dst.box) != (rank, lost)]
        for r in range(plan.num_ranks)
    ]
    return build_plan("holey", plan.num_ranks, plan.tensors, plan.initial, goals, lists)


@each_backend
def test_gaps_in_what_tiles_read(backend: str) -> None:
    """The corners of the goals are as they were, and the plan is sound."""
    plan = without(own_kernels.gather_plan(3, t=(6, 4)), 0, Box((2, 0), (4, 4)), 2)
    assert verify(plan) == ()
    with refused(
        "plan holey: rank 0 has no t[2:4,0:4], a gap in the t[0:6,0:4] that tiles read as operand "
        "'x' there; add the goal that is missing, and the operations that meet it"
    ):
        fuse(own_kernels.scale(6, 4), plan, {"t": "x"}, axis_name="t", backend=backend)


@each_backend
def test_gaps_in_results(backend: str) -> None:
    whole = all_gather_swizzle(2, (6, 4), dtype="float32", split=3, produced=True)
    plan = without(whole, 1, Box((1, 0), (2, 4)), 1)
    assert verify(plan) == ()
    with refused(
        "rank 1 ends with no x[1:2,0:4], a gap in the x[0:6,0:4] that the operator return"
    ):
        fuse(own_kernels.scale(3, 4), plan, {"x": "out"}, axis_name="t", backend=backend)


def test_gaps_in_what_tiles_produce() -> None:
    """Rank 0 makes rows 0, 2 and 4 of 6, rank 1 the others; each keeps its own."""
    made = [(i % 2, box) for i, box in enumerate(Box.full((6, 4)).split(0, 6))]
    plan = build_plan(
        "striped",
        2,
        [Tensor("y", (6, 4), "float32")],
        [Region(rank, "y", box, produced=True) for rank, box in made],
        [Goal(rank, "y", box) for rank, box in made],
        [[], []],
    )
    assert verify(plan) == ()
    with refused(
        "plan striped: rank 0 produces no y[1:2,0:4], a gap in the y[0:5,0:4] that is result 'out' "
        "there; let its tiles produce that too"
    ):
        fuse(own_kernels.scale(5, 4), plan, {"y": "out"}, axis_name="t", backend="xla")


def total(shape: tuple[int, int], axis: int) -> PallasKernel:
    """y = x summed along the other axis than ``axis``; tiles are of one row or column of x."""

    def body(x: Any, y: Any) -> None:
        y[...] = x[...].sum(1 - axis, keepdims=True)

    block, out = [*shape], [*shape]
    block[axis], out[1 - axis] = 1, 1
    along = (lambda i: (i, 0)) if axis == 0 else (lambda i: (0, i))
    return PallasKernel(
        body,
        grid=(shape[axis],),
        operands=("x",),
        results=("y",),
        in_specs=pl.BlockSpec(tuple(block), along),
        out_specs=pl.BlockSpec((1, 1), along),
        out_shape=jax.ShapeDtypeStruct(tuple(out), jnp.float32),
        name="total",
    )


@each_backend
def test_ranks_that_end_with_more_or_less(backend: str) -> None:
    """Rank 1 gets all rows, rank 0 keeps its own: along rows that is a tile less, else a part."""
    own = [Box((0, 0), (2, 4)), Box((2, 0), (6, 4))]
    x = Tensor("t", (6, 4), "float32")
    plan = build_plan(
        "stair",
        2,
        [x],
        [Region(rank, "t", box) for rank, box in enumerate(own)],
        [Goal(0, "t", own[0]), Goal(1, "t", Box.full((6, 4)))],
        [[P2P(0, 0, 1, Chunk("t", own[0]), Chunk("t", own[0]))], []],
    )
    assert verify(plan) == ()
    options: dict[str, Any] = {"axis_name": "t", "backend": backend}
    assert fuse(total((6, 4), 0), plan, {"t": "x"}, **options).backend.name == backend
    with refused(
        "plan stair: dimension 0 of operand 'x' ends with 2 elements on rank 0 and 6 on rank 1, "
        "but kernel total takes in all of it for a tile; let all ranks end with as much along it"
    ):
        fuse(total((6, 4), 1), plan, {"t": "x"}, **options)
