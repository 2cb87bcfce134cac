"""The last tiles of a product are divided so that each k step is computed once and added once."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from syncopate_jax.pallas_kernels import tile_loop_mosaic_gpu as tile_loop
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_split import First, Split, divided_tiles


@pytest.mark.parametrize(
    ("tiles", "workers", "divided"),
    [(1792, 132, 76), (4096, 132, 136), (264, 132, 0), (44, 132, 44), (43, 132, 0)],
)
def test_what_is_over_is_divided_and_a_wave_more_where_that_is_little(
    tiles: int, workers: int, divided: int
) -> None:
    assert divided_tiles(tiles, workers) == divided


@pytest.mark.parametrize(("tiles", "workers", "k_steps"), [(6, 4, 5), (5, 4, 6), (7, 8, 9)])
def test_each_k_step_is_computed_once_and_handed_to_who_completes_its_tile(
    tiles: int, workers: int, k_steps: int
) -> None:
    order = tile_loop.NaturalOrder((tiles, 1))
    divided = divided_tiles(tiles, workers)
    assert divided
    steps: list[tuple[int, int]] = []
    completed: dict[int, set[int]] = {}
    handed: dict[int, int] = {}
    for worker in range(workers):
        split = Split(order, divided, k_steps, jnp.int32(worker), workers, None, None)
        for index in range(split.pieces):
            tile, first, end = split.piece(jnp.int32(index))
            m, first, end = int(tile.m), int(first), int(end)
            steps += [(m, k) for k in range(first, end)]
            if first > 0:
                assert worker not in handed and end > first
                handed[worker] = m
            elif end > 0:
                assert m not in completed
                count = int(split.sharers(jnp.int32(index)))
                completed[m] = {worker + 1 + n for n in range(count)}
    over = range(tiles - divided, tiles)
    assert sorted(steps) == [(m, k) for m in over for k in range(k_steps)]
    assert set(completed) == set(over)
    for m, sharers in completed.items():
        assert sharers == {worker for worker, of in handed.items() if of == m}


def test_the_loop_takes_the_other_tiles() -> None:
    order = tile_loop.NaturalOrder((6, 1))
    first = First(order, 4)
    taken = [first.decode(first.fetch(jnp.int32(p)))[0] for p in range(first.size)]
    assert [int(m) for m in taken] == [0, 1, 2, 3]
