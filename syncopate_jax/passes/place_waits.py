"""Pass: where each tile waits for the operations it needs; waits already made are left out.

::

    tile at position 4 needs r1.0 at step position 0      a wait before the tile
    tile at position 5 needs r1.0, same worker            none: position 4 has waited
    tile at position 5 needs r2.0 from step position 3    a wait before that step
    tile at position 7 adds the landing of r3.1           a wait before its epilogue

A wait is dropped only where the same worker has made it before, which is sound because counters
never fall. It is kept where another wait implies it by a chain of operations: on some targets it
is the wait itself that makes a transfer's data visible to its reader.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncopate_jax.ir.arguments import integer
from syncopate_jax.passes.build_depgraph import DepGraph
from syncopate_jax.passes.order_tiles import TileOrder

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class TileWaits:
    """Waits of tiles for operations, sorted by tile, place and operation.

    Attributes:
      at: [waits] row of the tile, ``rank * num_tiles + position``.
      place: [waits] step position; 0 is before the tile, ``num_steps`` before its epilogue.
      op: [waits] row of the operation whose data must have arrived.
      position: [ranks * tiles] row of each linear tile: the inverse of the order.
      workers: tile executors a rank.
    """

    at: Array
    place: Array
    op: Array
    position: Array
    workers: int


def place_waits(
    graph: DepGraph, order: TileOrder, *, workers: int = 1, minimal: bool = True
) -> TileWaits:
    """Waits for ``workers`` tile executors a rank, position p being worker ``p % workers``'s.

    ``minimal=False`` keeps those that the same worker has made before. Raises InputError when
    ``workers`` is below 1.
    """
    integer(f"schedule of {graph.plan.name}", "workers", workers, 1)
    ranks, tiles = graph.plan.num_ranks, graph.space.num_tiles
    position = np.zeros(ranks * tiles, np.int64)
    base = np.arange(ranks)[:, None] * tiles
    position[order.order + base] = np.arange(tiles) + base
    op = np.concatenate([graph.need_op, graph.addend_op])
    at = position[np.concatenate([graph.need_tile, graph.addend_tile])]
    epilogue = np.full(len(graph.addend_op), graph.space.num_steps)
    place = np.concatenate([_first_step(graph, order), epilogue])
    if len(op):
        keys = _first_places(op, at, place, tiles, workers if minimal else tiles, graph)
        at, place, op = at[keys], place[keys], op[keys]
    return TileWaits(at, place, op, position, workers)


def _first_step(graph: DepGraph, order: TileOrder) -> Array:
    """[needs] first position in the rank's step order at which the tile reads the data."""
    if not len(graph.need_op):
        return np.zeros(0, np.int64)
    sets = len(graph.step_sets)
    known, which = np.unique(graph.need_op * sets + graph.need_steps, return_inverse=True)
    op, chosen = np.divmod(known, sets)
    walked = order.k_order[graph.plan.columns.dst_rank[op]]
    found = np.take_along_axis(graph.step_sets[chosen], walked.astype(np.int64), axis=1)
    return np.argmax(found, axis=1)[which]


def _first_places(
    op: Array, at: Array, place: Array, tiles: int, workers: int, graph: DepGraph
) -> Array:
    """Entries to keep: for each operation and worker the first place, in sorted order."""
    when = at * (graph.space.num_steps + 1) + place
    owner = op * workers + at % tiles % workers
    order = np.lexsort((when, owner))
    first = np.ones(len(order), bool)
    first[1:] = owner[order][1:] != owner[order][:-1]
    kept = order[first]
    return kept[np.lexsort((op[kept], when[kept]))]
