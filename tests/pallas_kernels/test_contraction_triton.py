"""Contractions as annotated Triton kernels: what they read and write, and their texts."""

from __future__ import annotations

import functools

import pytest

from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.pallas_kernels import contraction_triton
from tests.pallas_kernels.examples import Example

SIZES = {"m": 40, "n": 24, "k": 20, "b": 2, "G": 2}


def small(lhs: str, rhs: str, out: str) -> PallasKernel:
    tiles = {"m": 16, "n": 16, "k": 16}
    return contraction_triton.contraction(
        lhs, rhs, out, SIZES, tiles=tiles, dtype="float32", out_dtype="float32"
    )


EXAMPLES = (
    Example(
        "ragged",
        contraction_triton.contraction,
        functools.partial(small, "bmk", "kn", "bmn"),
        {"lhs": (2, 40, 20), "rhs": (20, 24)},
    ),
    Example(
        "blocks of what is summed over",
        contraction_triton.contraction,
        functools.partial(small, "Gbmk", "Gkn", "bmn"),
        {"lhs": (2, 2, 40, 20), "rhs": (2, 20, 24)},
    ),
)


def test_tiles_of_a_contraction() -> None:
    sizes = {"m": 5, "n": 512, "k": 40}
    choose = functools.partial(contraction_triton.choose_tiles, "mn", sizes)
    assert choose({}, workers=1) == {"m": 16, "n": 256, "k": 64}
    assert choose({}, workers=8) == {"m": 16, "n": 128, "k": 64}
    assert choose({"k": 16, "n": 256}, workers=8) == {"m": 16, "n": 256, "k": 16}
    text = contraction_triton.source("Gmk", "Gkn", "mn")
    assert "for step in range(SIZE_G * tl.cdiv(SIZE_k, BLOCK_k)):" in text


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "tiles", "stages", "flat"),
    [
        ("bfloat16", "bfloat16", (128, 256, 64), 3, True),
        ("float16", "float32", (128, 256, 64), 4, False),  # the store has the stages' room
        ("float32", "float32", (128, 256, 64), 2, False),
        ("float32", "float32", (128, 128, 32), 3, True),
    ],
)
def test_a_loop_over_tiles_is_flat_where_memory_is_enough(
    dtype: str, out_dtype: str, tiles: tuple[int, ...], stages: int, flat: bool
) -> None:
    cut = dict(zip("mnk", tiles, strict=True))
    kernel = contraction_triton.contraction(
        "bmk", "kn", "bmn", SIZES, tiles=cut, dtype=dtype, out_dtype=out_dtype
    )
    body = kernel.triton_body
    assert (body.num_stages, body.arguments["FLAT"]) == (stages, flat)
