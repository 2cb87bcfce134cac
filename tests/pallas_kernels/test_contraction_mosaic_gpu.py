"""Contractions for Hopper as local kernels: what they read and write, and what they refuse."""

from __future__ import annotations

import functools
import re

import pytest

from syncopate_jax.errors import InputError
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.pallas_kernels.contraction_mosaic_gpu import choose_config, contraction
from tests.pallas_kernels.examples import Example

SIZES = {"m": 192, "n": 128, "k": 128, "b": 2, "G": 2}


def small(lhs: str, rhs: str, out: str) -> PallasKernel:
    _, config = choose_config(out, SIZES, {}, "bfloat16", workers=1)
    return contraction(lhs, rhs, out, SIZES, config=config, dtype="bfloat16", out_dtype="bfloat16")


EXAMPLES = (
    Example(
        "ragged rows",
        contraction,
        functools.partial(small, "bmk", "kn", "bmn"),
        {"lhs": (2, 192, 128), "rhs": (128, 128)},
        "bfloat16",
        2.0**-8,
    ),
    Example(
        "blocks of what is summed over",
        contraction,
        functools.partial(small, "Gbmk", "(Gk)n", "bmn"),
        {"lhs": (2, 2, 192, 128), "rhs": (256, 128)},
        "bfloat16",
        2.0**-8,
    ),
)


def tile(sizes: dict[str, int], workers: int = 132, **asked: int) -> tuple[int, int, str]:
    """Rows and columns of a tile, and how two warpgroups share it."""
    tiles, config = choose_config("mn", sizes, asked, "bfloat16", workers=workers)
    assert (config.tile_m, config.tile_n) == (tiles["m"], tiles["n"])
    assert config.problem() is None and config.stages >= 4
    return config.tile_m, config.tile_n, config.split


def test_the_usual_tiles() -> None:
    assert tile({"m": 4096, "n": 4096, "k": 64}) == (128, 256, "m")
    assert tile({"m": 512, "n": 4096, "k": 64}) == (128, 128, "m")
    assert tile({"m": 65, "n": 4096, "k": 64}) == (128, 128, "m")
    assert tile({"m": 64, "n": 4096, "k": 64}) == (64, 128, "n")
    assert tile({"m": 64, "n": 4096, "k": 64}, workers=8) == (64, 256, "n")


def test_tiles_that_are_asked_for_win() -> None:
    assert tile({"m": 512, "n": 4096, "k": 64}, n=256) == (128, 256, "m")
    assert tile({"m": 4096, "n": 4096, "k": 64}, n=128) == (128, 128, "m")
    assert tile({"m": 4096, "n": 4096, "k": 64}, m=64) == (64, 256, "n")
    assert tile({"m": 64, "n": 4096, "k": 64}, m=128) == (128, 128, "m")
    # Two warpgroups cannot share 64x64 elements in output stores of 64 columns.
    assert tile({"m": 64, "n": 4096, "k": 64}, n=64) == (128, 64, "m")


def test_operands_of_three_matrix_letters() -> None:
    with pytest.raises(InputError, match="contraction: lhs 'mkn' needs two of the letters m, n, k"):
        small("mkn", "kn", "mn")


def test_tiles_that_reach_into_the_next_block() -> None:
    text = "letter m of (Gm) has extent 192, which its tile 128 does not divide; give every letter"
    with pytest.raises(InputError, match=re.escape(text)):
        small("Gbmk", "kn", "b(Gm)n")
