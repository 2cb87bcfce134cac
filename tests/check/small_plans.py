"""Tiny plans over two to four ranks, correct until a test breaks them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from syncopate_jax.check.verify import verify
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, Collective, Operation
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor

X = Tensor("x", (4, 6), "float32")
Y = Tensor("y", (4, 6), "float32", per_rank=True)


def chunk(text: str) -> Chunk:
    """``x[0:2,0:6]`` as a chunk."""
    name, box = text.split("[")
    return Chunk(name, Box.parse("[" + box))


def move(rank: int, src_rank: int, dst_rank: int, src: str, dst: str = "", **more) -> P2P:
    return P2P(rank, src_rank, dst_rank, chunk(src), chunk(dst or src), **more)


def push(src_rank: int, dst_rank: int, src: str, dst: str = "", **more) -> P2P:
    return move(src_rank, src_rank, dst_rank, src, dst, **more)


def region(rank: int, text: str, produced: bool = False) -> Region:
    found = chunk(text)
    return Region(rank, found.tensor, found.box, produced)


def goal(rank: int, text: str, *ranks: int, source: str = "", reduce: str = "sum") -> Goal:
    found = chunk(text)
    if not source:
        return Goal(rank, found.tensor, found.box, ranks=ranks, reduce=reduce)
    origin = chunk(source)
    return Goal(rank, found.tensor, found.box, origin.tensor, origin.box.lo, ranks, reduce)


def plan_of(
    *lists: list[Operation],
    initial: list[Region],
    goals: list[Goal],
    tensors: tuple[Tensor, ...] = (X, Y),
    name: str = "small",
) -> Plan:
    return build_plan(name, len(lists), tensors, initial, goals, lists)


def halves(*extra: Operation, **changes) -> Plan:
    """Two ranks that swap halves of x; ``extra`` goes to the end of the right lists."""
    lists: list[list[Operation]] = [[push(0, 1, "x[0:2,0:6]")], [push(1, 0, "x[2:4,0:6]")]]
    for op in extra:
        lists[op.rank].append(op)
    plan = plan_of(
        *lists,
        initial=[region(0, "x[0:2,0:6]"), region(1, "x[2:4,0:6]")],
        goals=[goal(0, "x[0:4,0:6]"), goal(1, "x[0:4,0:6]")],
    )
    return replace(plan, **changes)


def relay(produced: bool = False, **more) -> Plan:
    """Rank 0 holds x, which goes to rank 1 and from there to rank 2."""
    return plan_of(
        [push(0, 1, "x[0:4,0:6]")],
        [push(1, 2, "x[0:4,0:6]", **more)],
        [],
        initial=[region(0, "x[0:4,0:6]", produced)],
        goals=[goal(1, "x[0:4,0:6]"), goal(2, "x[0:4,0:6]")],
    )


def with_column(plan: Plan, name: str, row: int, value: object) -> Plan:
    """The plan with one entry of one column replaced."""
    columns = plan.columns
    column = getattr(columns, name).copy()
    column[row] = value
    return plan.with_columns(replace(columns, **{name: column}))


def collective(rank: int, kind: str, src: str, dst: str, *ranks: int, **more) -> Collective:
    return Collective(rank, kind, chunk(src), chunk(dst), ranks, **more)


def found(plan: Plan) -> list[str]:
    """Every finding as text."""
    return [str(finding) for finding in verify(plan)]


def codes(plan: Plan) -> set[str]:
    """The kinds of fault found."""
    return {finding.code for finding in verify(plan)}


def random_values(plan: Plan, seed: int = 0) -> dict[str, np.ndarray]:
    """Integers for every tensor, with a leading axis over ranks where it is per rank."""
    rng = np.random.default_rng(seed)
    return {
        tensor.name: rng.integers(
            1, 1 << 20, ((plan.num_ranks,) if tensor.per_rank else ()) + tensor.shape
        )
        for tensor in plan.tensors
    }
