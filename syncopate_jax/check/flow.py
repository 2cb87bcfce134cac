"""The flow of a plan: which atoms each row reads and writes, on which ranks, in which order.

A *location* is one atom of one rank's buffer. Every movement is cut into moves of one atom from
one location to another; locations are numbered densely among those that the plan touches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.atoms import Boxes, Grid
from syncopate_jax.check.bounds import padded_shapes
from syncopate_jax.check.collectives import Transfers
from syncopate_jax.check.order import Order
from syncopate_jax.check.regions import Goals, goal_arrays, region_arrays
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir.plan import Plan

Array = np.ndarray

MAX_ATOMS = 1 << 25
"""Atoms over all operations, regions and goals that are followed: some 3 GB of arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """A plan cut into atoms; ``m`` moves, ``L`` locations.

    Attributes:
      grid: the atoms.
      src_row, dst_row: [m] rows that read and that write, sorted by level.
      src, dst: [m] locations.
      reduce: [m] index into ``comm.REDUCTIONS``.
      batches: where moves of one level start, and the end; moves of one level are unordered.
      initial, produced: [L] whether data is there at the start; whether tiles produce it.
      rank, atom: [L] what each location is.
      cdep_row, cdep_at: row and location of each compute dependency's atoms.
      goals: the goals as arrays.
      goal, goal_at: goal (row of ``goals``) and location of each atom that must be held.
      goal_atom: atom of the source that it must equal.
    """

    grid: Grid
    src_row: Array
    dst_row: Array
    src: Array
    dst: Array
    reduce: Array
    batches: Array
    initial: Array
    produced: Array
    rank: Array
    atom: Array
    cdep_row: Array
    cdep_at: Array
    goals: Goals
    goal: Array
    goal_at: Array
    goal_atom: Array


def find_flow(plan: Plan, transfers: Transfers, order: Order) -> Flow:
    """Cuts a plan into atoms; raises UnsupportedError when there are too many of them."""
    c = plan.columns
    ndim = max((c.ndim if c.n else 0), max((len(t.shape) for t in plan.tensors), default=0))
    src = _moved(c.src_tensor[transfers.src_row], transfers.src_lo, transfers.src_hi, ndim)
    dst = _moved(c.dst_tensor[transfers.dst_row], transfers.dst_lo, transfers.dst_hi, ndim)
    regions, goals = region_arrays(plan, ndim), goal_arrays(plan, ndim)
    held = Boxes(regions.tensor, regions.lo, regions.hi)
    wanted = Boxes(goals.tensor, goals.lo, goals.hi)
    source = Boxes(goals.source, goals.source_lo, goals.source_hi)
    tiles = _moved(c.cdep_tensor, c.cdep_lo, c.cdep_hi, ndim)
    boxes = (src, dst, held, wanted, source, tiles)
    grid = Grid(padded_shapes(plan, ndim), boxes, ((src, dst), (wanted, source)))
    total = sum(grid.volume(box) for box in boxes)
    if total > MAX_ATOMS:
        raise UnsupportedError(
            f"the boxes cut each other into {total} pieces, more than the {MAX_ATOMS} that are "
            "followed; align the boxes of different operations"
        )
    move, src_atom = grid.atoms(src)
    dst_atom = grid.atoms(dst)[1]
    held_of, held_atom = grid.atoms(held)
    wanted_of, wanted_atom = grid.atoms(wanted)
    tiles_of, tiles_atom = grid.atoms(tiles)
    keys = (
        c.src_rank[transfers.src_row[move]] * np.int64(grid.count) + src_atom,
        c.dst_rank[transfers.dst_row[move]] * np.int64(grid.count) + dst_atom,
        regions.rank[held_of] * grid.count + held_atom,
        goals.rank[wanted_of] * grid.count + wanted_atom,
        c.cdep_rank[tiles_of] * np.int64(grid.count) + tiles_atom,
    )
    known, (src_at, dst_at, held_at, wanted_at, tiles_at) = _number(
        keys, plan.num_ranks * grid.count
    )
    initial, produced = np.zeros(len(known), bool), np.zeros(len(known), bool)
    initial[held_at] = True
    produced[held_at[regions.produced[held_of]]] = True
    dst_row = transfers.dst_row[move]
    by_level, batches = _batches(order.level[dst_row])

    def pick(column: Array) -> Array:
        return column if by_level is None else column[by_level]

    return Flow(
        grid,
        pick(transfers.src_row[move]),
        pick(dst_row),
        pick(src_at),
        pick(dst_at),
        pick(transfers.reduce[move]),
        batches,
        initial,
        produced,
        *np.divmod(known, max(grid.count, 1)),
        c.cdep_owner()[tiles_of],
        tiles_at,
        goals,
        wanted_of,
        wanted_at,
        grid.atoms(source)[1],
    )


def _moved(tensor: Array, lo: Array, hi: Array, ndim: int) -> Boxes:
    shape = (len(tensor), ndim)
    return Boxes(
        tensor.astype(np.int64),
        lo.astype(np.int64).reshape(shape),
        hi.astype(np.int64).reshape(shape),
    )


def _number(keys: tuple[Array, ...], limit: int) -> tuple[Array, list[Array]]:
    """The distinct keys, sorted, and the position in them of every given key."""
    count = sum(map(len, keys))
    if limit <= 4 * count + (1 << 16):
        seen = np.zeros(limit, bool)
        for key in keys:
            seen[key] = True
        place = np.cumsum(seen) - 1
        return np.flatnonzero(seen), [place[key] for key in keys]
    known, place = np.unique(np.concatenate(keys), return_inverse=True)
    return known, np.split(place, np.cumsum([len(key) for key in keys])[:-1])


def _batches(level: Array) -> tuple[Array | None, Array]:
    """Permutation that sorts by level (None if it is sorted), and bounds of each level."""
    by_level = None
    if np.any(np.diff(level) < 0):
        by_level = np.argsort(level, kind="stable")
        level = level[by_level]
    cuts = np.flatnonzero(np.diff(level)) + 1
    return by_level, np.concatenate([[0], cuts, [len(level)]]).astype(np.int64)
