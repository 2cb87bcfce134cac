"""Local Triton kernels alone, in Triton's interpreter, against NumPy; ragged sizes too."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from syncopate_jax.kernel import directives_tree
from syncopate_jax.pallas_kernels import attention_triton, contraction_triton, matmul_triton
from syncopate_jax.pallas_kernels.matmul_triton import MatmulConfig
from tests.triton_interpret import run_alone

CONFIGS = {
    "one tile a program": MatmulConfig(16, 16, 16, group=2),
    "persistent": MatmulConfig(16, 16, 16, group=2, persistent=True),
    "descriptors": MatmulConfig(16, 16, 16, group=2, described=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("m", "k", "n"), [(32, 32, 32), (40, 20, 24)])
def test_matmul(config: MatmulConfig, m: int, k: int, n: int) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    y = np.full((m, n), np.nan, np.float32)
    rows, columns = config.tiles(m, n)
    grid = 4 if config.walks else rows * columns
    arguments = config.arguments(m, k, n, grid)
    run_alone(config.kernel, grid, {"x_ptr": x, "w_ptr": w, "y_ptr": y}, **arguments)
    np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)
    kernel = matmul_triton.matmul(m, k, n, "float32", config, grid)
    assert kernel.grid == (rows, columns, -(-k // 16)) and kernel.reference is not None
    np.testing.assert_allclose(kernel.reference(x, w), x @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    heads, queries, keys, width = 2, 24, 40, 16
    kernel = attention_triton.attention(
        heads, queries, keys, width, "float32", causal=causal, block_q=16, block_k=16
    )
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((heads, n, width)).astype(np.float32) for n in (queries, keys, keys)
    )
    out = np.full(q.shape, np.nan, np.float32)
    arrays = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out}
    body = kernel.triton_body
    run_alone(attention_triton.attention_kernel, heads * 2, arrays, **dict(body.arguments))
    scores = np.einsum("bmd,bnd->bmn", q, k, dtype=np.float64) / np.sqrt(width)
    if causal:
        visible = np.arange(queries)[:, None] >= np.arange(keys)
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("bmn,bnd->bmd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    assert kernel.reference is not None
    np.testing.assert_allclose(kernel.reference(*map(jnp.asarray, (q, k, v))), wanted, 1e-4, 1e-5)


def test_every_kernel_has_directives() -> None:
    for kernel in (
        matmul_triton.matmul_kernel,
        matmul_triton.persistent_matmul_kernel,
        matmul_triton.described_matmul_kernel,
        attention_triton.attention_kernel,
    ):
        assert directives_tree.read(kernel).epilogue is not None


def test_tiles_of_a_contraction() -> None:
    sizes = {"m": 5, "n": 300, "k": 40}
    assert contraction_triton.choose_tiles("mn", sizes, {}) == {"m": 16, "n": 256, "k": 64}
    assert contraction_triton.choose_tiles("mn", sizes, {"k": 16})["k"] == 16
    text = contraction_triton.source("Gmk", "Gkn", "mn")
    assert "for step in range(SIZE_G * tl.cdiv(SIZE_k, BLOCK_k)):" in text
