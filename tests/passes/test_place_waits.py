"""Where tiles wait, and which waits are left out."""

from __future__ import annotations

import numpy as np

from syncopate_jax.passes.build_depgraph import build_depgraph
from syncopate_jax.passes.order_tiles import order_tiles
from syncopate_jax.passes.place_waits import TileWaits, place_waits
from tests.passes.matmul_cases import Case, gather, scatter


def placed(case: Case, **options) -> TileWaits:
    graph = build_depgraph(*case.given)
    return place_waits(graph, order_tiles(graph), **options)


def of_rank(waits: TileWaits, rank: int, tiles: int) -> list[tuple[int, int, int]]:
    """(position, place, operation) of a rank's waits."""
    mine = waits.at // tiles == rank
    found = np.stack([waits.at % tiles, waits.place, waits.op])[:, mine]
    return [tuple(entry) for entry in found.T.tolist()]


def test_one_worker_waits_once_for_each_operation() -> None:
    case = gather("all_gather_swizzle", 3, m=12, tiles=(2, 2, 6))
    waits = placed(case)
    assert of_rank(waits, 0, 12) == [(4, 0, 4), (8, 0, 3)]


def test_every_worker_waits_for_itself() -> None:
    case = gather("all_gather_swizzle", 2, m=8, tiles=(2, 2, 6))
    assert of_rank(placed(case, workers=3), 0, 8) == [(4, 0, 1), (5, 0, 1), (6, 0, 1)]
    assert of_rank(placed(case, workers=9), 0, 8) == [(p, 0, 1) for p in (4, 5, 6, 7)]


def test_all_waits() -> None:
    case = gather("all_gather_swizzle", 2, m=8, tiles=(2, 2, 6))
    assert of_rank(placed(case, minimal=False), 0, 8) == [(p, 0, 1) for p in (4, 5, 6, 7)]


def test_waits_inside_the_reduction() -> None:
    case = gather("all_gather_swizzle", 3, m=4, k=6, axis=1, tiles=(2, 4, 1))
    # Both tiles need everything; the second finds it there. Own steps 0, 1, then r2's, then r1's.
    assert of_rank(placed(case), 0, 2) == [(0, 2, 4), (0, 4, 3)]
    assert of_rank(placed(case, workers=2), 0, 2) == [(0, 2, 4), (0, 4, 3), (1, 2, 4), (1, 4, 3)]


def test_a_step_that_spans_two_chunks_waits_for_both() -> None:
    case = gather("all_gather_swizzle", 3, m=4, k=6, axis=1, tiles=(4, 4, 3))
    # Steps 0:3 and 3:6 of chunks 0:2 (rank 0), 2:4 and 4:6.
    assert of_rank(placed(case), 0, 1) == [(0, 0, 3), (0, 1, 4)]


def test_landings_are_awaited_before_the_epilogue() -> None:
    case = scatter("reduce_scatter_direct", 3, m=6)
    steps = case.space.num_steps
    waits = placed(case)
    assert of_rank(waits, 0, 6) == [(4, steps, 3), (4, steps, 4)]
    assert waits.position.reshape(3, 6)[0].tolist() == [4, 5, 0, 1, 2, 3]
