"""Pass: the order in which each rank computes its tiles and walks their reduction steps.

::

    graph   on rank 0: tiles 4..7 need r1.0, tiles 8..11 need r2.0, which comes before r1.0
    order   0 1 2 3  8 9 10 11  4 5 6 7

Operations get estimated times, in elements moved: each port (rank and channel) moves one chunk
after another, and computation costs nothing. A tile is *ready* when the last operation it needs or
adds has finished, and *due* when the first operation that needs it starts. Tiles are sorted by
(due, ready): producers by due, tiles that no operation needs last; consumers and a rank's own
share of a reduction by ready.

This order cannot deadlock, whatever the number of workers: ready <= due for every tile, an
operation finishes after it starts, so whatever a tile or an operation waits for has a smaller time
than the tile or operation has, and so has each tile ahead of it or the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.report import Report
from syncopate_jax.errors import PlanError
from syncopate_jax.ir.arguments import integer, one_of
from syncopate_jax.ir.comm import ComputeDep, Dependency
from syncopate_jax.kernel.tiles import TileSpace
from syncopate_jax.passes.build_depgraph import DepGraph
from syncopate_jax.passes.tile_sets import Sets, join_sets

Array = np.ndarray
INTRA = ("natural", "grouped", "snake")
INTER = ("arrival", "natural")
NEVER = np.iinfo(np.int64).max
"""Due time of a tile that no operation needs."""
_SHOWN = 3
"""Operations of a circle that a message lists; the others are like them."""


@dataclass(frozen=True, slots=True, eq=False)
class TileOrder:
    """Orders, and the estimates they come from.

    Attributes:
      order: [ranks, tiles] linear tile by position. k_order: [ranks, steps] step by position.
      ready, due: [ranks, tiles] by linear tile. start, finish: [ops]. In elements moved.
    """

    order: Array
    k_order: Array
    ready: Array
    due: Array
    start: Array
    finish: Array


def order_tiles(
    graph: DepGraph, *, intra: str = "natural", group: int = 8, inter: str = "arrival"
) -> TileOrder:
    """Orders tiles by arrival and deadline, and within one chunk as ``intra`` says.

    Args:
      intra: order of tiles with equal times. ``natural``: row-major; ``grouped``: in each group
        of ``group`` rows, down the rows first; ``snake``: every other row backwards. Rows and
        columns are the last two parallel axes; rows are counted from the chunk's first.
      inter: ``natural`` ignores times and orders all tiles as one chunk; it may deadlock.

    Raises:
      InputError: an argument is not one of those above, or ``group`` is below 1.
      PlanError: operations and tiles wait for each other in a circle, as when tiles of a
        reduction straddle chunks.
    """
    where = f"schedule of {graph.plan.name}"
    one_of(where, "intra", intra, INTRA)
    one_of(where, "inter", inter, INTER)
    integer(where, "group", group, 1)
    bundles = _bundles(graph)
    start, finish, event_due = _estimate(graph, bundles)
    ranks, tiles = graph.plan.num_ranks, graph.space.num_tiles
    ready: Array = np.zeros(ranks * tiles, np.int64)
    arrived = np.zeros(bundles.tiles.count, np.int64)
    np.maximum.at(arrived, bundles.of_op, finish[bundles.op])
    np.maximum.at(ready, bundles.tiles.items, arrived[bundles.tiles.owner])
    due: Array = np.full(ranks * tiles, NEVER)
    np.minimum.at(due, graph.events.items, event_due[graph.events.owner])
    ready, due = ready.reshape(ranks, tiles), due.reshape(ranks, tiles)
    chunk = np.zeros((ranks, tiles), np.int64) if inter == "natural" else _dense(ready, due)
    order = _sorted_tiles(graph.space, chunk, intra, group).astype(np.int32)
    k_order = _step_order(graph, finish, inter)
    return TileOrder(order, k_order, ready, due, start, finish)


@dataclass(frozen=True, slots=True, eq=False)
class _Bundles:
    """Tiles of one rank that wait for the same data, so that they are looked at once.

    Attributes:
      tiles: of each bundle.
      of_op, op: the tiles of the bundle need or add what the operation brings.
    """

    tiles: Sets
    of_op: Array
    op: Array


def _bundles(graph: DepGraph) -> _Bundles:
    sets, tiles = graph.tile_sets.count, graph.space.num_tiles
    known, which = np.unique(graph.need_rank * sets + graph.need_tiles, return_inverse=True)
    rank, chosen = np.divmod(known, max(sets, 1))
    owner, tile = graph.tile_sets.expand(chosen)
    needed = Sets.of(owner, rank[owner] * tiles + tile, len(known))
    landed, adding = np.unique(graph.addend_op, return_inverse=True)
    added = Sets.of(adding, graph.addend_tile, len(landed))
    return _Bundles(
        join_sets([needed, added]),
        np.concatenate([which, len(known) + np.arange(len(landed))]),
        np.concatenate([graph.need_op, landed]),
    )


def _estimate(graph: DepGraph, bundles: _Bundles) -> tuple[Array, Array, Array]:
    """Start and finish of every operation, and when each event is first needed.

    The longest path through operations, their ports and the events between them; an event is
    over once the last operation that one of its tiles needs has finished.
    """
    c, n = graph.plan.columns, graph.plan.num_ops
    size = np.maximum(c.dst_size(), 1).tolist()
    count = n + graph.events.count
    edges = np.concatenate(
        [
            np.stack([graph.after_dep, graph.after_op]),
            np.stack([graph.event + n, graph.event_op]),
            np.stack([bundles.op, bundles.of_op + count]),
            _feeds(graph, bundles) + np.array([[count], [n]]),
            _ports(graph),
        ],
        axis=1,
    )
    count += bundles.tiles.count
    waiting = np.bincount(edges[1], minlength=count).tolist()
    by_source = edges[:, np.argsort(edges[0], kind="stable")]
    row = np.searchsorted(by_source[0], np.arange(count + 1)).tolist()
    following = by_source[1].tolist()
    start, finish = [0] * count, [0] * count
    ready = [node for node in range(count) if waiting[node] == 0]
    for node in ready:  # grows while it is walked
        done = start[node] + (size[node] if node < n else 0)
        finish[node] = done
        for other in following[row[node] : row[node + 1]]:
            start[other] = max(start[other], done)
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    if len(ready) < count:
        _refuse_circle(graph, waiting)
    starts = np.array(start[:n], np.int64)
    event_due = np.full(graph.events.count, NEVER)
    np.minimum.at(event_due, graph.event, starts[graph.event_op])
    return starts, np.array(finish[:n], np.int64), event_due


def _feeds(graph: DepGraph, bundles: _Bundles) -> Array:
    """[2, pairs] bundle and event that have a tile in common."""
    if not bundles.tiles.count or not graph.events.count:
        return np.zeros((2, 0), np.int64)
    by_tile = np.argsort(bundles.tiles.items, kind="stable")
    total = graph.plan.num_ranks * graph.space.num_tiles
    of_tile = Sets.of(bundles.tiles.items[by_tile], bundles.tiles.owner[by_tile], total)
    owner, bundle = of_tile.expand(graph.events.items)
    event = graph.events.owner[owner]
    return np.stack(np.divmod(np.unique(bundle * graph.events.count + event), graph.events.count))


def _ports(graph: DepGraph) -> Array:
    """[2, pairs] each operation and the next one of the same rank and channel."""
    c = graph.plan.columns
    order = np.lexsort((np.arange(c.n), c.channel, c.rank))
    same = (c.rank[order][1:] == c.rank[order][:-1]) & (
        c.channel[order][1:] == c.channel[order][:-1]
    )
    return np.stack([order[:-1][same], order[1:][same]])


def _refuse_circle(graph: DepGraph, waiting: list[int]) -> None:
    """Raises PlanError that names the operations which cannot start."""
    report = Report(graph.plan)
    stuck = np.array([row for row in range(graph.plan.num_ops) if waiting[row] > 0], np.int64)
    own = {int(row): deps for row in stuck if (deps := _waits_for_itself(graph, int(row)))}
    if own:
        report.rows(
            "circular-wait", np.array(list(own)), lambda row: _own_wait(graph, row, own[row])
        )
        advice = (
            "operations that add to tiles wait for these very tiles, which take in what they bring "
            "before they are done: leave out the dependencies that are named; reductions need "
            "none on the destination's tiles nor on each other"
        )
        raise PlanError(graph.plan.name, report.findings, limit=_SHOWN, advice=advice)
    events: dict[int, list[int]] = {}
    for row, event in zip(graph.event_op.tolist(), graph.event.tolist(), strict=True):
        events.setdefault(row, []).append(event)

    def text(row: int) -> str:
        shown = []
        for event in events.get(row, []):
            tiles = graph.events.row(event)
            rank, first = divmod(int(tiles[0]), graph.space.num_tiles)
            shown.append(f"{len(tiles)} tiles of rank {rank} from tile {first} on")
        after = graph.after_dep[graph.after_op == row].tolist()
        shown += [report.name(dep) for dep in after]
        return (
            f"waits for {', '.join(shown) or 'the operation before it'} in a circle of operations "
            f"and tiles"
        )

    report.rows("circular-wait", stuck, text)
    advice = (
        "operations and tiles wait for each other, since tiles make parts of several chunks: "
        "choose tiles that end where chunks end, or a plan whose chunks end where tiles end; else "
        "verify the plan"
    )
    raise PlanError(graph.plan.name, report.findings, limit=_SHOWN, advice=advice)


def _waits_for_itself(graph: DepGraph, row: int) -> list[Dependency]:
    """The dependencies of an operation on what it adds to: its tiles, or other sums into them."""
    if not graph.lands[row]:
        return []
    into, rank, first = (
        graph.plan.row(row).dst,
        graph.plan.columns.dst_rank,
        graph.plan.columns.rank,
    )

    def is_into(dep: Dependency) -> bool:
        if isinstance(dep, ComputeDep):
            return dep.rank == rank[row] and dep.chunk.meets(into)
        other = int(np.searchsorted(first, dep.rank)) + dep.index
        meets = rank[other] == rank[row] and graph.plan.row(other).dst.meets(into)
        return bool(graph.lands[other] and meets)

    return [dep for dep in graph.plan.row(row).deps if is_into(dep)]


def _own_wait(graph: DepGraph, row: int, deps: list[Dependency]) -> str:
    into = f"{graph.plan.row(row).dst} of rank {graph.plan.columns.dst_rank[row]}"
    return (
        f"adds to {into} and waits for {', '.join(map(str, deps))}, which, fused, is done once the "
        f"tiles that take in the sum are"
    )


def _dense(ready: Array, due: Array) -> Array:
    """[ranks, tiles] number of each tile's (due, ready) among those of its rank, in that order."""
    ranks, tiles = ready.shape
    rank = np.repeat(np.arange(ranks), tiles)
    order = np.lexsort((ready.ravel(), due.ravel(), rank))
    keys = np.stack([rank, due.ravel(), ready.ravel()])[:, order]
    fresh = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
    dense = np.zeros(ranks * tiles, np.int64)
    dense[order[1:]] = np.cumsum(fresh)
    return dense.reshape(ranks, tiles)


def _sorted_tiles(space: TileSpace, chunk: Array, intra: str, group: int) -> Array:
    """[ranks, tiles] linear tiles by chunk, and within a chunk as ``intra`` says."""
    ranks, tiles = chunk.shape
    counts = [axis.count for axis in space.parallel]
    if intra == "natural" or len(counts) < 2 or not tiles:
        return np.argsort(chunk, axis=1, kind="stable")
    # Numbered rows: the leading axes (a batch, say) and the second to last one, row-major.
    row, column = np.divmod(np.arange(tiles), counts[-1])
    batch, row = np.divmod(row, counts[-2])
    row, column, batch = (np.tile(part, ranks) for part in (row, column, batch))
    flat = np.unique(chunk.ravel(), return_inverse=True)[1]
    if chunk.max(initial=0) == 0:  # one chunk a rank
        flat = np.repeat(np.arange(ranks), tiles)
    first = np.full(flat.max(initial=0) + 1, counts[-2])
    np.minimum.at(first, flat, row)
    row = row - first[flat]
    rank = np.repeat(np.arange(ranks), tiles)
    keys: tuple[Array, ...]
    if intra == "grouped":
        keys = (row % group, column, row // group, batch, chunk.ravel(), rank)
    else:
        backwards = (row + batch) % 2 == 1
        keys = (np.where(backwards, -column, column), row, batch, chunk.ravel(), rank)
    return (np.lexsort(keys) % max(tiles, 1)).reshape(ranks, tiles)


def _step_order(graph: DepGraph, finish: Array, inter: str) -> Array:
    """[ranks, steps] reduction steps by when the last tile has all that it reads at them."""
    ranks, steps = graph.plan.num_ranks, graph.space.num_steps
    ready = np.zeros((ranks, steps), np.int64)
    if inter == "arrival" and len(graph.need_op):
        sets = len(graph.step_sets)
        op, chosen = np.divmod(np.unique(graph.need_op * sets + graph.need_steps), sets)
        at = np.where(graph.step_sets[chosen], finish[op][:, None], 0)
        np.maximum.at(ready, graph.plan.columns.dst_rank[op], at)
    return np.argsort(ready, axis=1, kind="stable").astype(np.int32)
