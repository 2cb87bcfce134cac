"""Flash attention in Triton, forward, written as for one device.

``out[b, m, :] = softmax(scale * q[b, m, :] @ k[b].T) @ v[b]``, ``b`` being batch and heads in one.
Keys and values are walked in blocks whose order does not matter, so that the blocks of a peer can
be taken when they arrive. The directives say how; without a rewriter they are comments.
"""

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.triton_kernel import triton_kernel

LOG2_E = 1.4426950408889634
LEAST = -1.0e30  # below every score; finite, so that a block without a visible key changes nothing


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of queries of one head a program; ``SCALE`` includes log2(e)."""
    # syncopate: axis b: count=HEADS
    # syncopate: axis m: extent=QUERIES, tile=BLOCK_Q
    # syncopate: axis n: extent=KEYS, tile=BLOCK_K
    # syncopate: reads q_ptr[b, m, :] as q
    # syncopate: reads k_ptr[b, n, :] as k
    # syncopate: reads v_ptr[b, n, :] as v
    # syncopate: writes out_ptr[b, m, :] as out
    # syncopate: tiles one per program
    # syncopate: dispatch tile -> b=head, m=block
    tile = tl.program_id(0)
    blocks = tl.cdiv(QUERIES, BLOCK_Q)
    head = tile // blocks
    block = tile % blocks
    # syncopate: end dispatch
    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, WIDTH)
    q_ptrs = q_ptr + head * (QUERIES * WIDTH) + (rows[:, None] * WIDTH + columns[None, :])
    q = tl.load(q_ptrs, mask=rows[:, None] < QUERIES, other=0.0)
    keys = tl.arange(0, BLOCK_K)
    block_at = head * (KEYS * WIDTH) + (keys[:, None] * WIDTH + columns[None, :])
    k_ptrs = k_ptr + block_at
    v_ptrs = v_ptr + block_at
    total = tl.zeros((BLOCK_Q, WIDTH), dtype=tl.float32)
    weight = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    top = tl.full((BLOCK_Q,), LEAST, dtype=tl.float32)
    # syncopate: reduce n=step
    for step in range(tl.cdiv(KEYS, BLOCK_K)):
        left = KEYS - step * BLOCK_K
        inside = keys < left
        if KEYS % BLOCK_K == 0:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        else:
            k = tl.load(k_ptrs, mask=inside[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * SCALE
        if KEYS % BLOCK_K != 0:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        if CAUSAL:
            visible = rows[:, None] >= (step * BLOCK_K + keys)[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.math.exp2(scores - new_top[:, None])
        shrink = tl.math.exp2(top - new_top)
        total = total * shrink[:, None]
        total = tl.dot(weights.to(v.dtype), v, total)
        weight = weight * shrink + tl.sum(weights, 1)
        top = new_top
        k_ptrs += BLOCK_K * WIDTH
        v_ptrs += BLOCK_K * WIDTH
    # syncopate: epilogue
    total = total / weight[:, None]
    out_ptrs = out_ptr + head * (QUERIES * WIDTH) + (rows[:, None] * WIDTH + columns[None, :])
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=rows[:, None] < QUERIES)
    # syncopate: end epilogue


def attention(
    heads: int,
    queries: int,
    keys: int,
    width: int,
    out_dtype: jax.typing.DTypeLike,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_q: int = 128,
    block_k: int = 64,
    num_warps: int = 8,
    num_stages: int = 3,
) -> PallasKernel:
    """Attention of ``heads`` heads (times batch) as a local kernel.

    Args:
      queries, keys: rows of q, and of k and v.
      width: of a head; a power of two from 16 on.
      causal: query i sees keys 0 to i.
      scale: of the scores; by default ``width ** -0.5``.
      block_q, block_k: of a tile, and of a step.
    """
    scale = width**-0.5 if scale is None else scale
    whole = {"q": (heads, queries, width), "out": (heads, queries, width)}
    whole |= {name: (heads, keys, width) for name in ("k", "v")}
    return triton_kernel(
        attention_kernel,
        {
            "HEADS": heads,
            "QUERIES": queries,
            "KEYS": keys,
            "WIDTH": width,
            "SCALE": scale * LOG2_E,
            "CAUSAL": causal,
            "LEAST": LEAST,
            "BLOCK_Q": block_q,
            "BLOCK_K": block_k,
        },
        out_dtypes={"out": out_dtype},
        shapes=whole,
        reference=functools.partial(_reference, scale=scale, causal=causal, out_dtype=out_dtype),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    scores = jnp.einsum("bmd,bnd->bmn", q, k, preferred_element_type=jnp.float32) * scale
    if causal:
        visible = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])[None, :]
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    found = jnp.einsum("bmn,bnd->bmd", weights, v, preferred_element_type=jnp.float32)
    return found.astype(out_dtype)
