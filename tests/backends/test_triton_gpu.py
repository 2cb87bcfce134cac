"""Triton kernels on one GPU: folded ranks against float32, and the local kernels alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from syncopate_jax.backends import triton_call
from syncopate_jax.options import Launch
from tests.backends.test_gpu_folded import error, exact, over_rows, poison, rows
from tests.ops.cases import CASES, Case

pytestmark = pytest.mark.gpu
CALLS = 4


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("backend", ["ldst_dedicated", "ldst_colocated"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_folded_ranks(case: Case, backend: str, ranks: int) -> None:
    fn = jax.jit(over_rows(case, backend=backend, target="triton", launch=Launch()))
    reference = exact(case)
    for seed in range(CALLS):
        x, w = rows(case, ranks, 200 * ranks, 136 * ranks, 192 * ranks, seed)
        wanted = reference(x, w)
        poison()
        assert error(fn(x, w), wanted) < 5e-3


@pytest.mark.parametrize(
    "kind", ["plain", "persistent", "flat", "described", "described flat", "late"]
)
@pytest.mark.parametrize(("m", "k", "n"), [(1024, 512, 768), (1000, 456, 776)])
def test_products_alone(kind: str, m: int, k: int, n: int) -> None:
    from syncopate_jax.pallas_kernels import matmul_triton

    chosen: dict[str, Any] = {
        "plain": {"persistent": False},
        "persistent": {"flat": False},
        "described": {"described": True, "flat": False},
        "flat": {},
        "described flat": {"described": True},
        "late": {"described": True, "late": 2},
    }
    config = matmul_triton.MatmulConfig(**chosen[kind])
    rows_, columns = config.tiles(m, n)
    grid = min(jax.devices()[0].core_count, rows_ * columns) if config.walks else rows_ * columns
    kernel = matmul_triton.matmul(m, k, n, "bfloat16", config, grid)
    keys = jax.random.split(jax.random.key(0))
    x, w = (
        jax.random.normal(s, d, jnp.bfloat16) for s, d in zip(keys, ((m, k), (k, n)), strict=True)
    )
    (y,) = jax.jit(lambda x, w: triton_call.run_alone(kernel, x, w, grid=grid))(x, w)
    assert error(y, jnp.dot(x, w, preferred_element_type=jnp.float32)) < 5e-3
