"""A schedule: what each rank computes in which order, what it waits for, what it raises.

It is a backend's only input, made by the passes from a plan, a tile space and an axis map::

    schedule := for every rank
                  order      tiles in the order they are computed        (place 1: around a tile)
                  waits      before a tile: (slot, count)
                  signals    after a tile: (rank, slot), each raised by 1
                  k_order    reduction steps in the order a tile walks them  (place 2: inside it)
                  k_waits    before a step of a tile: (step position, slot, count)
                  e_waits    before the epilogue: (slot, count)              (place 3: epilogue)
                  addends    landings that the epilogue adds to a tile
                and for every operation of the plan
                  op_waits   before it starts: (slot, count), on the rank that lists it
                  op_signals when its data has landed: (rank, slot), each raised by 1
                  landing    where a reduction's data lands until the epilogue adds it, or -1

Slots are counters, one set a rank, zero at the start of a launch, compared with ``>=``; only their
own rank waits on them, anyone may raise them (design decision 5; paper section 5.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.comm import P2P
from syncopate_jax.ir.plan import Plan

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Variable-length rows of int32 tuples: row i is ``values[start[i]:start[i + 1]]``.

    Attributes:
      start: [rows + 1] ascending from 0.
      values: [entries, width].
    """

    start: Array
    values: Array

    @classmethod
    def of(cls, rows: Sequence[Sequence[tuple[int, ...]]], width: int) -> Rows:
        """Rows from lists of tuples of ``width`` integers."""
        start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(row) for row in rows], out=start[1:])
        flat = [entry for row in rows for entry in row]
        return cls(start, np.array(flat, np.int32).reshape(-1, width))

    @classmethod
    def grouped(cls, owner: Array, values: Array, rows: int) -> Rows:
        """Rows from entries and the row that owns each; entries of a row keep their order."""
        order = np.argsort(owner, kind="stable")
        start = np.searchsorted(owner[order], np.arange(rows + 1)).astype(np.int32)
        return cls(start, np.asarray(values, np.int32)[order])

    @property
    def rows(self) -> int:
        return len(self.start) - 1

    def row(self, i: int) -> list[tuple[int, ...]]:
        """The entries of row ``i``."""
        return [tuple(entry) for entry in self.values[self.start[i] : self.start[i + 1]].tolist()]

    @property
    def owner(self) -> Array:
        """[entries] the row of each entry."""
        return np.repeat(np.arange(self.rows), np.diff(self.start))


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The tables above for every rank; row ``rank * num_tiles + position`` for those of tiles.

    Attributes:
      plan: the plan served, P2P operations only; ``op_*`` rows are rows of its columns.
      num_tiles: tiles a rank computes.
      num_steps: reduction steps inside a tile.
      workers: tile executors a rank (CTAs); position p belongs to worker ``p % workers``. A wait
        is left out where the same worker has already made it.
      order: [ranks, num_tiles] linear tile (row-major in the tile space's parallel axes).
      k_order: [ranks, num_steps] linear reduction step.
      waits: (slot, count). k_waits: (step position, slot, count). e_waits: (slot, count).
      signals: (rank, slot). addends: (landing,).
      op_waits: (slot, count). op_signals: (rank, slot). landing: [ops], -1 for none.
      num_slots: [ranks] slots of each rank.
      num_landings: [ranks] landings of each rank.
    """

    plan: Plan
    num_tiles: int
    num_steps: int
    workers: int
    order: Array
    k_order: Array
    waits: Rows
    k_waits: Rows
    e_waits: Rows
    signals: Rows
    addends: Rows
    op_waits: Rows
    op_signals: Rows
    landing: Array
    num_slots: Array
    num_landings: Array

    def __post_init__(self) -> None:
        ranks, tiles, ops = self.plan.num_ranks, self.num_tiles, self.plan.num_ops
        shapes = {
            "order": (ranks, tiles),
            "k_order": (ranks, self.num_steps),
            "landing": (ops,),
            "num_slots": (ranks,),
            "num_landings": (ranks,),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise InputError(
                    f"schedule of {self.plan.name}: {name} has shape "
                    f"{getattr(self, name).shape}, needs {shape}"
                )
        rows = {name: ranks * tiles for name in ("waits", "k_waits", "e_waits", "signals")}
        rows |= {"addends": ranks * tiles, "op_waits": ops, "op_signals": ops}
        for name, count in rows.items():
            if getattr(self, name).rows != count:
                raise InputError(
                    f"schedule of {self.plan.name}: {name} has {getattr(self, name).rows} rows, "
                    f"needs {count}"
                )

    def at(self, rank: int, position: int) -> int:
        """Row of the tile at ``position`` in the order of ``rank``."""
        return rank * self.num_tiles + position


def describe(schedule: Schedule, rank: int) -> str:
    """One line a tile and operation of ``rank``: order, waits, signals, for people and goldens."""
    plan = schedule.plan
    lines = [
        f"rank {rank}: {schedule.num_tiles} tiles x {schedule.num_steps} steps, "
        f"{schedule.num_slots[rank]} slots, {schedule.num_landings[rank]} landings, "
        f"steps {schedule.k_order[rank].tolist()}"
    ]
    for position, tile in enumerate(schedule.order[rank].tolist()):
        at = schedule.at(rank, position)
        parts = [f"tile {tile}"]
        parts += [f"wait {slot}>={count}" for slot, count in schedule.waits.row(at)]
        parts += [f"step {k} wait {slot}>={n}" for k, slot, n in schedule.k_waits.row(at)]
        parts += [f"epilogue wait {slot}>={count}" for slot, count in schedule.e_waits.row(at)]
        parts += [f"add landing {landing}" for (landing,) in schedule.addends.row(at)]
        parts += [f"raise r{target}:{slot}" for target, slot in schedule.signals.row(at)]
        lines.append("  " + ", ".join(parts))
    lo, hi = np.searchsorted(plan.columns.rank, (rank, rank + 1))
    for row in range(lo, hi):
        op = plan.row(row)
        parts = [f"collective {op.src} -> {op.dst}"]
        if isinstance(op, P2P):
            parts[0] = f"{op.direction} r{op.src_rank} {op.src} -> r{op.dst_rank} {op.dst}"
        parts += [f"wait {slot}>={count}" for slot, count in schedule.op_waits.row(row)]
        if schedule.landing[row] >= 0:
            parts.append(f"land {schedule.landing[row]}")
        parts += [f"raise r{target}:{slot}" for target, slot in schedule.op_signals.row(row)]
        lines.append("  " + ", ".join(parts))
    return "\n".join(lines)
