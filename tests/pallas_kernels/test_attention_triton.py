"""Attention in Triton alone, in its interpreter, against NumPy; ragged sizes too."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from syncopate_jax.pallas_kernels import attention_triton
from tests.pallas_kernels.examples import Example
from tests.triton_interpret import run_alone

EXAMPLES = (
    Example(
        "ragged",
        attention_triton.attention,
        functools.partial(
            attention_triton.attention, 2, 24, 40, 16, "float32", block_q=16, block_k=16
        ),
        {"q": (2, 24, 16), "k": (2, 40, 16), "v": (2, 40, 16)},
    ),
)


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
