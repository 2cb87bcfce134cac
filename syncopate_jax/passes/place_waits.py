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
from syncopate_jax.passes.tile_sets import Sets

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
    walkers = workers if minimal else max(tiles, 1)
    parts = (_needs(graph, order, position, walkers), _addends(graph, position))
    op, at, place = np.concatenate(parts, axis=1)
    kept = _first_places(op, at * (graph.space.num_steps + 1) + place, at % max(tiles, 1) % walkers)
    return TileWaits(at[kept], place[kept], op[kept], position, workers)


def _needs(graph: DepGraph, order: TileOrder, position: Array, walkers: int) -> Array:
    """[3, waits] operation, tile row and step position: of each tile set each walker's first."""
    sets, tiles = graph.tile_sets.count, max(graph.space.num_tiles, 1)
    known, which = np.unique(graph.need_rank * sets + graph.need_tiles, return_inverse=True)
    rank, chosen = np.divmod(known, max(sets, 1))
    owner, tile = graph.tile_sets.expand(chosen)
    at = position[rank[owner] * tiles + tile]
    kept = _first_places(owner, at, at % tiles % walkers)
    kept = kept[np.argsort(owner[kept], kind="stable")]
    firsts = Sets.of(owner[kept], at[kept], len(known))
    entry, row = firsts.expand(which)
    return np.stack([graph.need_op[entry], row, _first_step(graph, order)[entry]])


def _addends(graph: DepGraph, position: Array) -> Array:
    """[3, waits] operation, tile row and the place before the epilogue."""
    place = np.full(len(graph.addend_op), graph.space.num_steps)
    return np.stack([graph.addend_op, position[graph.addend_tile], place])


def _first_step(graph: DepGraph, order: TileOrder) -> Array:
    """[needs] first position in the rank's step order at which the tiles read the data."""
    if not len(graph.need_op):
        return np.zeros(0, np.int64)
    sets = len(graph.step_sets)
    known, which = np.unique(graph.need_rank * sets + graph.need_steps, return_inverse=True)
    rank, chosen = np.divmod(known, sets)
    walked = order.k_order[rank].astype(np.int64)
    return np.argmax(np.take_along_axis(graph.step_sets[chosen], walked, axis=1), axis=1)[which]


def _first_places(thing: Array, when: Array, walker: Array) -> Array:
    """Entries to keep, by when: the first of each thing and walker."""
    owner = thing * (walker.max(initial=0) + 1) + walker
    order = np.lexsort((when, owner))
    first = np.ones(len(order), bool)
    first[1:] = owner[order][1:] != owner[order][:-1]
    kept = order[first]
    return kept[np.lexsort((thing[kept], when[kept]))]
