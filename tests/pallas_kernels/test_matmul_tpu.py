"""The blocked product for TPU: sums in float32, rounded once, in the kernel and its reference."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.pallas_kernels.matmul_tpu import matmul
from tests.pallas_kernels.examples import Example

SIZES = {"m": 6, "n": 4, "k": 4, "b": 2, "G": 3}
TILES = {"m": 2, "n": 4, "k": 2}


def small(lhs: str, rhs: str, out: str, dtype: str = "float32", **tiles: int) -> PallasKernel:
    return matmul(lhs, rhs, out, SIZES, tiles=TILES | tiles, dtype=dtype, out_dtype=dtype)


EXAMPLES = (
    Example(
        "ragged rows",
        matmul,
        functools.partial(small, "bmk", "kn", "bmn", m=4),
        {"lhs": (2, 6, 4), "rhs": (4, 4)},
    ),
    Example(
        "blocks of rows",
        matmul,
        functools.partial(small, "Gbmk", "kn", "b(Gm)n"),
        {"lhs": (3, 2, 6, 4), "rhs": (4, 4)},
    ),
    Example(
        "blocks of what is summed over",
        matmul,
        functools.partial(small, "Gbmk", "(Gk)n", "bmn"),
        {"lhs": (3, 2, 6, 4), "rhs": (12, 4)},
    ),
    Example(
        "bfloat16",
        matmul,
        functools.partial(small, "bmk", "kn", "bmn", "bfloat16"),
        {"lhs": (2, 6, 4), "rhs": (4, 4)},
        "bfloat16",
        2.0**-8,
    ),
)


@pytest.mark.parametrize("how", ["kernel", "reference"])
@pytest.mark.parametrize("dtype,bits", [("bfloat16", 8), ("float16", 11)])
def test_narrow_results_are_rounded_once(dtype: str, bits: int, how: str) -> None:
    """A long sum of one sign, which a narrow accumulator would stop adding to half way."""
    k = 1024
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.uniform(0.5, 1.5, s), dtype) for s in ((8, k), (k, 8)))
    kernel = matmul(
        "mk", "kn", "mn", {"m": 8, "n": 8, "k": k}, tiles={"m": 8, "n": 8, "k": 256},
        dtype=dtype, out_dtype=dtype,
    )  # fmt: skip
    run: Any = kernel.reference if how == "reference" else functools.partial(kernel, interpret=True)
    found = jnp.reshape(jnp.asarray(run(x, w)), (8, 8))
    chex.assert_type(found, dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    # Half a unit in the last place, and what float32 loses on the way.
    chex.assert_trees_all_close(
        np.asarray(found, np.float64), exact, rtol=2.0**-bits * (1 + 2.0**-6), atol=0
    )
