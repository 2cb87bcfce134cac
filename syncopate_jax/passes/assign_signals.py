"""Pass: a slot for everything that is waited for, who raises it, and where reductions land.

::

    tile (r0, 4) waits for r1.0              slot r0:0, raised by r1.0
    r0.2 waits for r1.0                      the same slot
    r0.1 waits for 4 tiles of rank 0         slot r0:1, raised by each of them, waited for as 4
    r2.0 waits for r1.0, which lands on r0   slot r2:0, raised by r1.0 too
    r3.0 reduces into tiles of rank 0        landing 0 of rank 0, added by those tiles

A slot belongs to the rank that waits and counts one event: the completion of an operation, or of
all tiles of a set. Nothing is raised that nobody waits for. Slots of operations come first, in the
order of the plan, then those of tiles.
"""

from __future__ import annotations

import numpy as np

from syncopate_jax.ir.schedule import Rows, Schedule
from syncopate_jax.passes.build_depgraph import DepGraph
from syncopate_jax.passes.order_tiles import TileOrder
from syncopate_jax.passes.place_waits import TileWaits

Array = np.ndarray


def assign_signals(graph: DepGraph, order: TileOrder, waits: TileWaits) -> Schedule:
    """The schedule: ``graph`` in ``order``, with ``waits`` turned into slots and counts."""
    return _Assigner(graph, order, waits).schedule()


class _Assigner:
    def __init__(self, graph: DepGraph, order: TileOrder, waits: TileWaits):
        self.graph, self.order, self.waits = graph, order, waits
        self.plan, self.columns = graph.plan, graph.plan.columns
        self.ops, self.ranks = graph.plan.num_ops, graph.plan.num_ranks
        self.tiles, self.steps = graph.space.num_tiles, graph.space.num_steps
        # What is waited for: an operation's row, or the number of operations plus an event.
        self.kinds = max(self.ops + graph.events.count, 1)
        self.count = np.concatenate([np.ones(self.ops, np.int64), np.diff(graph.events.start)])

    def schedule(self) -> Schedule:
        graph, waits, c = self.graph, self.waits, self.columns
        waiter = np.concatenate([graph.after_op, graph.event_op])
        awaited = np.concatenate([graph.after_dep, graph.event + self.ops])
        by_tile = c.dst_rank[waits.op] * self.kinds + waits.op
        by_op = c.rank[waiter] * self.kinds + awaited
        self.known = np.unique(np.concatenate([by_tile, by_op]))
        rank, thing = np.divmod(self.known, self.kinds)
        first = np.searchsorted(rank, np.arange(self.ranks + 1))
        self.slot = np.arange(len(rank)) - first[rank]
        tile_rows = self._tile_waits(self._slots(by_tile))
        op_slots = self._slots(by_op)
        op_order = np.lexsort((op_slots, waiter))
        op_values = np.stack([op_slots, self.count[awaited]], axis=1)
        landing, addends, num_landings = self._landings()
        return Schedule(
            plan=self.plan,
            num_tiles=self.tiles,
            num_steps=self.steps,
            workers=waits.workers,
            order=self.order.order,
            k_order=self.order.k_order,
            **tile_rows,
            addends=addends,
            op_waits=Rows.grouped(waiter[op_order], op_values[op_order], self.ops),
            **self._raises(rank, thing),
            landing=landing,
            num_slots=np.diff(first).astype(np.int32),
            num_landings=num_landings,
        )

    def _slots(self, codes: Array) -> Array:
        return self.slot[np.searchsorted(self.known, codes)]

    def _tile_waits(self, slots: Array) -> dict[str, Rows]:
        at, place = self.waits.at, self.waits.place
        rows = self.ranks * self.tiles
        values = np.stack([place, slots, np.ones_like(slots)], axis=1)
        parts = (
            ("waits", place == 0, [1, 2]),
            ("k_waits", (place > 0) & (place < self.steps), [0, 1, 2]),
            ("e_waits", place == self.steps, [1, 2]),
        )
        return {
            name: Rows.grouped(at[chosen], values[chosen][:, columns], rows)
            for name, chosen, columns in parts
        }

    def _raises(self, rank: Array, thing: Array) -> dict[str, Rows]:
        value = np.stack([rank, self.slot], axis=1)
        by_op = thing < self.ops
        event = thing[~by_op] - self.ops
        owner, tile = self.graph.events.expand(event)
        at = self.waits.position[tile]
        rows = self.ranks * self.tiles
        return {
            "op_signals": Rows.grouped(thing[by_op], value[by_op], self.ops),
            "signals": Rows.grouped(at, value[~by_op][owner], rows),
        }

    def _landings(self) -> tuple[Array, Rows, Array]:
        """Landing of each operation, landings added by each tile, landings of each rank."""
        rows = np.flatnonzero(self.graph.lands)
        rank = self.columns.dst_rank[rows]
        by_rank = np.argsort(rank, kind="stable")
        first = np.searchsorted(rank[by_rank], np.arange(self.ranks + 1))
        landing = np.full(self.ops, -1, np.int32)
        landing[rows[by_rank]] = np.arange(len(rows)) - first[rank[by_rank]]
        at = self.waits.position[self.graph.addend_tile]
        number = landing[self.graph.addend_op]
        order = np.lexsort((number, at))
        addends = Rows.grouped(at[order], number[order][:, None], self.ranks * self.tiles)
        return landing, addends, np.diff(first).astype(np.int32)
