"""How wide tiles are: by the turns that executors take."""

from __future__ import annotations

import pytest

from syncopate_jax.pallas_kernels.tile_columns import columns

TURNS = [
    # m, n, workers, columns: how many wide tiles in how many turns, how many narrow ones
    (512, 4096, 132, 128),  # 64 in 1, 128 in 1
    (1024, 4096, 132, 128),  # 128 in 1, beside which nothing could arrive, 256 in 2
    (2048, 4096, 132, 256),  # 256 in 2, 512 in 4
    (1024, 4096, 124, 128),  # 128 in 2, 256 in 3
    (4096, 4096, 124, 256),  # 512 in 5, 1024 in 9: too little is won
    (4096, 4096, 132, 256),  # 512 in 4, 1024 in 8
    (512, 4096, 1, 256),  # as many turns as tiles
    (512, 300, 1, 128),  # 512 columns in wide tiles, 384 in narrow ones
    (512, 128, 132, 128),  # no more columns than that
]


@pytest.mark.parametrize("m,n,workers,expected", TURNS)
def test_columns_by_turns(m: int, n: int, workers: int, expected: int) -> None:
    assert columns("mn", {"m": m, "n": n}, 128, workers) == expected


def test_tiles_are_counted_in_every_block_and_batch() -> None:
    """Rows are cut by block, so that 8 blocks of 65 rows are 8 tiles high, not 5."""
    sizes = {"m": 65, "n": 4096, "S": 8, "b": 1}
    assert columns("Sbmn", sizes, 128, 64) == 256  # 128 wide tiles in 2 turns, 256 in 4
    assert columns("b(Sm)n", sizes, 128, 64) == 256
    assert columns("Sbmn", sizes | {"S": 4}, 128, 64) == 128
    assert columns("Sbmn", sizes | {"S": 4, "b": 2}, 128, 64) == 256
    # The rows of a transposed result are its first letter, whichever that is.
    assert columns("Snm", {"n": 512, "m": 4096, "S": 1}, 128, 132) == 128
