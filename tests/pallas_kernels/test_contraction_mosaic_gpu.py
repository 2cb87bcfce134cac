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
    _, config = choose_config(lhs, out, SIZES, {}, "bfloat16")
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


def test_operands_of_three_matrix_letters() -> None:
    with pytest.raises(InputError, match="contraction: lhs 'mkn' needs two of the letters m, n, k"):
        small("mkn", "kn", "mn")


def test_tiles_that_reach_into_the_next_block() -> None:
    text = "letter m of (Gm) has extent 192, which its tile 128 does not divide; give every letter"
    with pytest.raises(InputError, match=re.escape(text)):
        small("Gbmk", "kn", "b(Gm)n")
