"""Kernels and plans as a user would write them, for tests of ``compile`` and of the backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, ComputeDep, Operation
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.kernel.local import PallasKernel


def block_of(tensor: str, shape: Sequence[int], ranks: int, rank: int) -> Chunk:
    """The rows of ``rank``."""
    rows = shape[0] // ranks
    return Chunk(tensor, Box.full(tuple(shape)).with_axis(0, rank * rows, (rank + 1) * rows))


def gather_plan(ranks: int, **shapes: tuple[int, ...]) -> Plan:
    """Every rank pushes its rows of each tensor to all others, nearest first."""
    lists: list[list[Operation]] = [[] for _ in range(ranks)]
    for step in range(1, ranks):
        for rank, ops in enumerate(lists):
            for name, shape in shapes.items():
                own = block_of(name, shape, ranks, rank)
                ops.append(P2P(rank, rank, (rank + step) % ranks, own, own))
    return build_plan(
        "own_gather",
        ranks,
        [Tensor(name, shape, "float32") for name, shape in shapes.items()],
        [
            Region(r, name, block_of(name, shape, ranks, r).box)
            for r in range(ranks)
            for name, shape in shapes.items()
        ],
        [Goal(r, name, Box.full(shape)) for r in range(ranks) for name, shape in shapes.items()],
        lists,
    )


def gather_and_scatter_plan(
    ranks: int, x: tuple[int, ...], y: tuple[int, ...], reduce: str = "sum"
) -> Plan:
    """Rows of x go to everyone; rows of y, once computed, to their owner, who adds them."""
    gathered = gather_plan(ranks, x=x)
    lists: list[list[Operation]] = [list(gathered.ops(r)) for r in range(ranks)]
    for rank, ops in enumerate(lists):
        for step in range(1, ranks):
            to = (rank + step) % ranks
            part = block_of("y", y, ranks, to)
            made = ComputeDep(rank, part)
            ops.append(P2P(rank, rank, to, part, part, deps=(made,), reduce=reduce))
    everyone = tuple(range(ranks))
    return build_plan(
        "gather_and_scatter",
        ranks,
        [*gathered.tensors, Tensor("y", y, "float32", per_rank=True)],
        [*gathered.initial, *(Region(r, "y", Box.full(y), produced=True) for r in everyone)],
        [
            *gathered.goals,
            *(
                Goal(r, "y", block_of("y", y, ranks, r).box, ranks=everyone, reduce=reduce)
                for r in everyone
            ),
        ],
        lists,
    )


def scale(rows: int, columns: int, tile: int = 2, dtype: Any = "float32") -> PallasKernel:
    """``out = x * s``, row block by row block; s is [rows, 1]."""

    def body(x: jax.Ref, s: jax.Ref, out: jax.Ref) -> None:
        out[...] = x[...] * s[...]

    return PallasKernel(
        body=body,
        grid=(-(-rows // tile),),
        operands=("x", "s"),
        results=("out",),
        in_specs=(
            pl.BlockSpec((tile, columns), lambda i: (i, 0)),
            pl.BlockSpec((tile, 1), lambda i: (i, 0)),
        ),
        out_specs=(pl.BlockSpec((tile, columns), lambda i: (i, 0)),),
        out_shape=(jax.ShapeDtypeStruct((rows, columns), dtype),),
        name="scale",
    )


def attention(queries: int, keys: int, width: int, tile_q: int, tile_k: int) -> PallasKernel:
    """Softmax attention that walks chunks of keys and values, in whatever order they arrive."""
    steps = keys // tile_k

    def body(q: jax.Ref, k: jax.Ref, v: jax.Ref, out: jax.Ref, *state: jax.Ref) -> None:
        acc, top, total = state

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)
            top[...] = jnp.full_like(top, -jnp.inf)
            total[...] = jnp.zeros_like(total)

        scores = jnp.dot(q[...], k[...].T, precision="highest")
        new = jnp.maximum(top[...], scores.max(axis=1, keepdims=True))
        weights, old = jnp.exp(scores - new), jnp.exp(top[...] - new)
        acc[...] = acc[...] * old + jnp.dot(weights, v[...], precision="highest")
        total[...] = total[...] * old + weights.sum(axis=1, keepdims=True)
        top[...] = new

        @pl.when(pl.program_id(1) == steps - 1)
        def _() -> None:
            out[...] = acc[...] / total[...]

    of_queries = pl.BlockSpec((tile_q, width), lambda i, j: (i, 0))
    of_keys = pl.BlockSpec((tile_k, width), lambda i, j: (j, 0))
    column = pltpu.VMEM((tile_q, 1), jnp.float32)
    return PallasKernel(
        body=body,
        grid=(queries // tile_q, steps),
        operands=("q", "k", "v"),
        results=("out",),
        in_specs=(of_queries, of_keys, of_keys),
        out_specs=(of_queries,),
        out_shape=(jax.ShapeDtypeStruct((queries, width), jnp.float32),),
        scratch_shapes=(pltpu.VMEM((tile_q, width), jnp.float32), column, column),
        name="attention",
    )


def product(rows: int, inner: int, columns: int, tile: int, *, has_addend: bool) -> PallasKernel:
    """``out = x @ w``, a row block at a time."""

    def body(x: jax.Ref, w: jax.Ref, out: jax.Ref, addend: Any = None) -> None:
        made = jnp.dot(x[...], w[...], precision="highest")
        out[...] = made if addend is None else made + addend()

    return PallasKernel(
        body=body,
        grid=(rows // tile,),
        operands=("x", "w"),
        results=("out",),
        in_specs=(
            pl.BlockSpec((tile, inner), lambda i: (i, 0)),
            pl.BlockSpec((inner, columns), lambda i: (0, 0)),
        ),
        out_specs=(pl.BlockSpec((tile, columns), lambda i: (i, 0)),),
        out_shape=(jax.ShapeDtypeStruct((rows, columns), jnp.float32),),
        has_addend=has_addend,
        name="product",
    )
