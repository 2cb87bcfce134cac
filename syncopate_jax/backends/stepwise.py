"""Any plan, run with ``lax.ppermute``: operation by operation, correct everywhere, fast nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncopate_jax.backends.buffers import Buffer
from syncopate_jax.errors import DeadlockError
from syncopate_jax.ir.hops import hop_tensors
from syncopate_jax.ir.plan import Plan

Arrays = dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class Round:
    """Operations that one ``ppermute`` does: alike in text, with different ends.

    Attributes:
      rows: rows of the plan's columns; no rank sends or receives twice.
      shape: of the chunk.
      src, dst: tensors.
      reduce: index into ``comm.REDUCTIONS``.
    """

    rows: tuple[int, ...]
    shape: tuple[int, ...]
    src: str
    dst: str
    reduce: int


def rounds(plan: Plan) -> list[Round]:
    """The plan's P2P operations as rounds, in an order that keeps every dependency.

    Raises DeadlockError when dependencies go round in a circle.
    """
    c = plan.columns
    owner, needed = c.dep_owner(), c.dep_row(plan.num_ranks)
    waiting = np.bincount(owner, minlength=c.n)
    unblocks: dict[int, list[int]] = {}
    for row, dep in zip(owner.tolist(), needed.tolist(), strict=True):
        unblocks.setdefault(dep, []).append(row)
    ready = np.flatnonzero(waiting == 0).tolist()
    out: list[Round] = []
    done = 0
    while ready:
        done += len(ready)
        out += _pack(plan, ready)
        following = []
        for row in ready:
            for blocked in unblocks.get(row, ()):
                waiting[blocked] -= 1
                if waiting[blocked] == 0:
                    following.append(blocked)
        ready = sorted(following)
    if done < c.n:
        raise DeadlockError(
            f"plan {plan.name}: {c.n - done} operations wait for each other in a circle; "
            f"run check.verify for the whole circle"
        )
    return out


def _pack(plan: Plan, rows: list[int]) -> list[Round]:
    """Cuts operations that may run in any order into rounds, greedily."""
    c, out = plan.columns, []
    groups: dict[tuple[tuple[int, ...], str, str, int], list[int]] = {}
    for row in rows:
        src, dst = plan.tensors[c.src_tensor[row]], plan.tensors[c.dst_tensor[row]]
        d = len(dst.shape)
        shape = tuple((c.dst_hi[row, :d] - c.dst_lo[row, :d]).tolist())
        groups.setdefault((shape, src.name, dst.name, int(c.reduce[row])), []).append(row)
    for key, left in groups.items():
        while left:
            senders: set[int] = set()
            receivers: set[int] = set()
            now, later = [], []
            for row in left:
                s, d = int(c.src_rank[row]), int(c.dst_rank[row])
                if s in senders or d in receivers:
                    later.append(row)
                else:
                    senders.add(s)
                    receivers.add(d)
                    now.append(row)
            out.append(Round(tuple(now), *key))
            left = later
    return out


def run(
    plan: Plan,
    buffers: Mapping[str, Buffer],
    arrays: Arrays,
    axis_names: tuple[str, ...],
) -> Arrays:
    """Runs the operations between tensors in ``arrays``.

    ``arrays[tensor]`` is what ``buffers[tensor]`` says a rank holds. Data moves in the order of the
    whole plan; operations that concern another tensor are left out.

    What is added to is held in float32 (if its dtype has fewer bits) and rounded once, at the end;
    a sum that hops carry travels in float32, all else in its tensor's dtype.
    """
    rank = lax.axis_index(axis_names)
    steps = [step for step in rounds(plan) if step.src in arrays and step.dst in arrays]
    added, carried = {step.dst for step in steps if step.reduce == 1}, hop_tensors(plan)
    held = {name: _wide(x) if name in added else x for name, x in arrays.items()}
    for step in steps:
        wide = step.reduce > 0 and step.src in carried
        sent = held[step.src] if wide else held[step.src].astype(arrays[step.src].dtype)
        held[step.dst] = _round(plan, step, buffers, sent, held[step.dst], rank, axis_names)
    return {name: x.astype(arrays[name].dtype) for name, x in held.items()}


def _wide(x: jax.Array) -> jax.Array:
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow else x


def _round(
    plan: Plan,
    step: Round,
    buffers: Mapping[str, Buffer],
    source: jax.Array,
    target: jax.Array,
    rank: jax.Array,
    axis_names: tuple[str, ...],
) -> jax.Array:
    """``target``, this rank's array of ``step.dst``, after the round."""
    c, rows = plan.columns, list(step.rows)
    ends = list(zip(c.src_rank[rows].tolist(), c.dst_rank[rows].tolist(), strict=True))
    out_at = np.zeros((plan.num_ranks, len(plan.tensor(step.src).shape)), np.int32)
    into_at = np.zeros((plan.num_ranks, len(step.shape)), np.int32)
    receives = np.zeros(plan.num_ranks, bool)
    for row, (s, d) in zip(rows, ends, strict=True):
        out_at[s] = c.src_lo[row, : out_at.shape[1]] - buffers[step.src].lo[s]
        into_at[d] = c.dst_lo[row, : into_at.shape[1]] - buffers[step.dst].lo[d]
        receives[d] = True
    sent = lax.dynamic_slice(source, jnp.asarray(out_at)[rank], step.shape)
    got = lax.ppermute(sent, axis_names, ends).astype(target.dtype)
    at = jnp.asarray(into_at)[rank]
    old = lax.dynamic_slice(target, at, step.shape)
    if step.reduce == 1:
        got = old + got
    elif step.reduce == 2:
        got = jnp.maximum(old, got)
    new = jnp.where(jnp.asarray(receives)[rank], got, old)
    return lax.dynamic_update_slice(target, new, at)
