"""Sums over several hops: which of a plan's tensors hand on what has been added to them.

A direct reduction adds every partial to its owner's accumulator and rounds that once. A ring adds
on the way, and what a hop hands on would be rounded each time in a tensor of two bytes an element:
such tensors are carried in float32 (design decision: float32 sums, rounded once).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from syncopate_jax.ir import comm
from syncopate_jax.ir.plan import Plan

_ROUND = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_SUM = comm.REDUCTIONS.index("sum")


def hop_tensors(plan: Plan) -> frozenset[str]:
    """Tensors of which some rank adds to another rank's what a third has added to its own.

    Transfers only: of a plan's collectives it is not known how they travel.
    """
    c = plan.columns
    rows = np.flatnonzero((c.reduce == _SUM) & (c.kind == 0))
    count = len(plan.tensors)
    into = c.dst_rank[rows].astype(np.int64) * count + c.dst_tensor[rows]
    out_of = c.src_rank[rows].astype(np.int64) * count + c.src_tensor[rows]
    found: set[str] = set()
    for place in np.intersect1d(into, out_of).tolist():
        name = plan.tensors[place % count].name
        if name in found:
            continue
        kept, sent = rows[into == place], rows[out_of == place]
        boxes = np.unique(np.stack([c.dst_lo[kept], c.dst_hi[kept]], axis=1), axis=0)
        apart = (boxes[:, 0] >= c.src_hi[sent][:, None]) | (c.src_lo[sent][:, None] >= boxes[:, 1])
        if not np.all(np.any(apart, axis=-1)):
            found.add(name)
    return frozenset(found)


def rounds_at_hops(plan: Plan) -> bool:
    """Whether a sum is rounded to less than float32 before it is complete."""
    return any(plan.tensor(name).dtype in _ROUND for name in hop_tensors(plan))


def in_float32(plan: Plan) -> Plan:
    """The same plan with every tensor of fewer bits in float32, so that no hop rounds.

    All of them, as a transfer between two tensors moves bytes and converts nothing.
    """
    tensors = (
        replace(tensor, dtype="float32") if tensor.dtype in _ROUND else tensor
        for tensor in plan.tensors
    )
    return replace(plan, tensors=tuple(tensors))
