"""Moves: dense tables of candidate operations, from which templates build columns without loops.

Entry ``[r, k]`` is the k-th candidate (its *slot*) that rank r lists. Entries whose box is empty
are dropped, so ragged and zero-sized shards need no special case; dependencies name slots and are
renumbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from syncopate_jax.ir.arguments import one_of
from syncopate_jax.ir.columns import Columns, make_columns
from syncopate_jax.ir.shards import Shards

Array = np.ndarray
MODES = ("push", "pull")


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Candidate P2P operations of R ranks, K slots each, with up to D dependencies.

    Attributes:
      src_rank, dst_rank, src_tensor, dst_tensor, reduce, channel: [R, K] as in ``Columns``.
      src_lo, src_hi, dst_lo, dst_hi: [R, K, d] boxes.
      dep_rank, dep_slot: [R, K, D] candidates that must have completed; rank -1 for none.
      produced: [R, K] whether it waits for the tiles that produce its source chunk.
    """

    src_rank: Array
    dst_rank: Array
    src_tensor: Array
    dst_tensor: Array
    src_lo: Array
    src_hi: Array
    dst_lo: Array
    dst_hi: Array
    reduce: Array
    channel: Array
    dep_rank: Array
    dep_slot: Array
    produced: Array

    def columns(self) -> Columns:
        """The operations whose boxes are not empty, dependencies renumbered."""
        return join_columns([self])


def make_moves(
    src_rank: Array,
    dst_rank: Array,
    src_lo: Array,
    src_hi: Array,
    *,
    dst_lo: Array | None = None,
    src_tensor: Array | int = 0,
    dst_tensor: Array | int = 0,
    reduce: Array | int = 0,
    channel: Array | int = 0,
    dep_rank: Array | None = None,
    dep_slot: Array | None = None,
    produced: Array | bool = False,
) -> Moves:
    """Moves from arrays that broadcast to [R, …], flattened to [R, K] in row-major order.

    Boxes are [R, …, d]; ``dst_lo`` is ``src_lo`` if None. Dependencies are [R, …, D].
    """
    lead = src_lo.shape[:-1]
    slots = (lead[0], int(np.prod(lead[1:])))

    def flat(value: Array | int | bool, *last: int) -> Array:
        return np.broadcast_to(value, (*lead, *last)).reshape(*slots, *last)

    d = src_lo.shape[-1]
    low = src_lo if dst_lo is None else dst_lo
    none = np.zeros((*[1] * len(lead), 0), np.int64)
    deps = none if dep_rank is None or dep_slot is None else dep_rank
    dep_slots = none if dep_rank is None or dep_slot is None else dep_slot
    return Moves(
        src_rank=flat(src_rank),
        dst_rank=flat(dst_rank),
        src_tensor=flat(src_tensor),
        dst_tensor=flat(dst_tensor),
        src_lo=flat(src_lo, d),
        src_hi=flat(src_hi, d),
        dst_lo=flat(low, d),
        dst_hi=flat(low + (src_hi - src_lo), d),
        reduce=flat(reduce),
        channel=flat(channel),
        dep_rank=flat(deps, deps.shape[-1]),
        dep_slot=flat(dep_slots, deps.shape[-1]),
        produced=flat(produced).astype(bool),
    )


def relay(
    where: str,
    mode: str,
    shards: Shards,
    receiver: Array,
    owner: Array,
    *,
    prev_rank: Array | None = None,
    prev_step: Array | None = None,
    src_tensor: Array | int = 0,
    dst_tensor: Array | int = 0,
    reduce: int = 0,
    channel: Array | int = 0,
    produced: Array | bool = False,
) -> Moves:
    """Every rank hands one shard to one other rank a step; the pieces of a shard follow each other.

    Tables are indexed by sender and step, [R, T]; ``receiver`` is a permutation of the ranks at
    each step. Slots are ``step * pieces + piece``.

    Args:
      mode: ``push`` lists each operation on the sender, ``pull`` on the receiver.
      owner: [R, T] whose shard is handed on.
      prev_rank, prev_step: [R, T, D] which ranks handed the sender what it now hands on, and at
        which step; step -1 for none. A push waits for the operation of ``prev_rank``, a pull for
        the sender's own.
      produced: [R, T] whether the tiles that produce the source chunk must have run.

    Raises:
      InputError: ``mode`` is neither push nor pull.
    """
    pull = one_of(where, "mode", mode, MODES) == 1
    ranks, steps = receiver.shape
    sender = np.broadcast_to(np.arange(ranks)[:, None], (ranks, steps))
    rows, step = sender, np.broadcast_to(np.arange(steps), (ranks, steps))
    if pull:  # row of a receiver: the sender that has it as receiver at that step
        rows = np.empty_like(receiver)
        rows[receiver, step] = sender

    def listed(value: Array | int | bool) -> Array:
        return np.broadcast_to(value, (ranks, steps))[rows, step][..., None]

    pieces = np.arange(shards.num_pieces)[:, None]
    dep_rank = dep_slot = None
    if prev_rank is not None and prev_step is not None:
        wide = (ranks, steps, prev_step.shape[-1])
        from_step = np.broadcast_to(prev_step, wide)[rows, step]
        from_rank = sender[..., None] if pull else prev_rank
        from_rank = np.broadcast_to(from_rank, wide)[rows, step]
        dep_rank = np.where(from_step < 0, -1, from_rank)[:, :, None]
        dep_slot = from_step[:, :, None] * shards.num_pieces + pieces
        dep_rank = np.broadcast_to(dep_rank, dep_slot.shape)
    whose = listed(owner)[..., 0]
    return make_moves(
        listed(sender),
        listed(receiver),
        shards.lo[whose],
        shards.hi[whose],
        src_tensor=listed(src_tensor),
        dst_tensor=listed(dst_tensor),
        reduce=reduce,
        channel=listed(channel),
        dep_rank=dep_rank,
        dep_slot=dep_slot,
        produced=listed(produced),
    )


def join_columns(phases: Sequence[Moves]) -> Columns:
    """As ``Moves.columns``, of phases one after the other, whose slots are counted through.

    Phases may differ in D: one in which an operation waits for many does not widen the others.
    """
    parts = [np.all(phase.src_hi > phase.src_lo, axis=-1) for phase in phases]
    keep = np.concatenate(parts, axis=1)
    index = np.cumsum(keep, axis=1) - 1
    row = (np.cumsum(keep) - 1).reshape(keep.shape)
    rank, slot = np.nonzero(keep)
    given = {
        field.name: np.concatenate([getattr(phase, field.name) for phase in phases], axis=1)
        for field in fields(Moves)
        if field.name not in ("dep_rank", "dep_slot")
    }
    given = {name: table[rank, slot] for name, table in given.items()}
    produced = given.pop("produced")
    owner, dep_rank, dep_slot = [], [], []
    first = 0
    for phase, kept in zip(phases, parts, strict=True):
        found, place = phase.dep_rank[kept], phase.dep_slot[kept]
        known = (found >= 0) & keep[np.maximum(found, 0), np.maximum(place, 0)]
        rows = row[:, first : first + kept.shape[1]][kept]
        owner.append(np.repeat(rows, np.count_nonzero(known, axis=1)))
        dep_rank.append(found[known])
        dep_slot.append(place[known])
        first += kept.shape[1]
    owners, ranks, slots = map(np.concatenate, (owner, dep_rank, dep_slot))
    order = np.argsort(owners, kind="stable")
    return make_columns(
        len(rank),
        phases[0].src_lo.shape[-1],
        rank=rank,
        **given,
        dep_start=_starts(np.bincount(owners, minlength=len(rank))),
        dep_rank=ranks[order],
        dep_index=index[ranks, slots][order],
        cdep_start=_starts(produced),
        cdep_rank=given["src_rank"][produced],
        cdep_tensor=given["src_tensor"][produced],
        cdep_lo=given["src_lo"][produced],
        cdep_hi=given["src_hi"][produced],
    )


def _starts(counts: Array) -> Array:
    return np.concatenate(([0], np.cumsum(counts)))
