"""Model code as it is written without this package: shard_map bodies with collectives and dots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

Params = dict[str, jax.Array]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-6) * scale


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention; all [sequence, batch, heads, head size]."""
    scores = jnp.einsum("sbnd,tbnd->bnst", q, k) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bnst,tbnd->sbnd", weights, v)


# Megatron: tensor parallel inside the layers, sequence parallel between them.

MEGATRON = {
    "ln1": P(),
    "qkv": P(None, None, "t"),
    "proj": P("t"),
    "ln2": P(),
    "up": P(None, None, "t"),
    "up_bias": P(None, "t"),
    "down": P("t"),
    "down_bias": P(),
}


def megatron_params(hidden: int, heads: int, inner: int, seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    size = hidden // heads
    shapes = {
        "qkv": (hidden, 3, heads, size),
        "proj": (heads, size, hidden),
        "up": (hidden, 2, inner),
        "down": (inner, hidden),
    }
    params = {k: jnp.asarray(rng.standard_normal(s) * 0.3, jnp.float32) for k, s in shapes.items()}
    for name, shape in (("up_bias", (2, inner)), ("down_bias", (hidden,))):
        params[name] = jnp.asarray(rng.standard_normal(shape) * 0.1, jnp.float32)
    return params | {"ln1": jnp.ones(hidden), "ln2": jnp.ones(hidden)}


def megatron_attention(p: Params, x: jax.Array) -> jax.Array:
    h = lax.all_gather(norm(x, p["ln1"]), "t", axis=0, tiled=True)
    q, k, v = jnp.moveaxis(jnp.einsum("sbh,hcnd->sbcnd", h, p["qkv"]), 2, 0)
    out = jnp.einsum("sbnd,ndh->sbh", attend(q, k, v), p["proj"])
    return x + lax.psum_scatter(out, "t", scatter_dimension=0, tiled=True)


def megatron_mlp(p: Params, x: jax.Array) -> jax.Array:
    h = lax.all_gather(norm(x, p["ln2"]), "t", axis=0, tiled=True)
    both = jnp.einsum("sbh,hci->csbi", h, p["up"]) + p["up_bias"][:, None, None]
    out = (jax.nn.silu(both[0]) * both[1]) @ p["down"]
    return x + lax.psum_scatter(out, "t", scatter_dimension=0, tiled=True) + p["down_bias"]


def megatron_block(p: Params, x: jax.Array) -> jax.Array:
    """x [sequence/W, batch, hidden]."""
    return megatron_mlp(p, megatron_attention(p, x))


# FSDP: every weight is gathered in a narrow type just before it is used.

FSDP = {"up": P("t"), "up_bias": P(), "down": P(None, "t")}


def fsdp_params(hidden: int, inner: int, seed: int = 1) -> Params:
    rng = np.random.default_rng(seed)
    shapes = {"up": (hidden, inner), "up_bias": (inner,), "down": (inner, hidden)}
    return {k: jnp.asarray(rng.standard_normal(s) * 0.3, jnp.float32) for k, s in shapes.items()}


def fsdp_mlp(p: Params, x: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """x [batch/W, hidden]."""
    up = lax.all_gather(p["up"], "t", axis=0, tiled=True).astype(dtype)
    h = jax.nn.gelu(x.astype(dtype) @ up + p["up_bias"].astype(dtype))
    down = lax.all_gather(p["down"].astype(dtype), "t", axis=1, tiled=True)
    return (x + (h @ down).astype(x.dtype)).astype(x.dtype)


# Ulysses: sequence parallel, resharded to heads around the attention.

ULYSSES = {"ln": P(), "qkv": P(), "proj": P()}


def ulysses_params(hidden: int, heads: int, seed: int = 2) -> Params:
    full = megatron_params(hidden, heads, heads, seed)
    return {"ln": full["ln1"], "qkv": full["qkv"], "proj": full["proj"]}


def ulysses_attention(p: Params, x: jax.Array) -> jax.Array:
    """x [sequence/W, batch, hidden]."""
    qkv = jnp.einsum("sbh,hcnd->sbcnd", norm(x, p["ln"]), p["qkv"])
    qkv = lax.all_to_all(qkv, "t", split_axis=3, concat_axis=0, tiled=True)
    out = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
    out = lax.all_to_all(out, "t", split_axis=0, concat_axis=2, tiled=True)
    s, b, n, d = out.shape
    return x + out.reshape(s, b, n * d) @ p["proj"].reshape(n * d, -1)


# Ring attention: keys and values go around the ring, weights are gathered as in FSDP.

RING = {"ln": P(), "qkv": P("t"), "proj": P(None, None, "t")}


def ring_attention(p: Params, x: jax.Array) -> jax.Array:
    """x [sequence/W, batch, hidden]; not causal."""
    ranks = lax.axis_size("t")
    weight = lax.all_gather(p["qkv"], "t", axis=0, tiled=True)
    q, k, v = jnp.moveaxis(jnp.einsum("sbh,hcnd->sbcnd", norm(x, p["ln"]), weight), 2, 0)
    s, b, n, d = q.shape
    ring = [(i, (i + 1) % ranks) for i in range(ranks)]

    def step(carry: Any, _: None) -> tuple[Any, None]:
        k, v, top, total, out = carry
        scores = jnp.einsum("sbnd,tbnd->bnst", q, k) / np.sqrt(d)
        new = jnp.maximum(top, scores.max(-1))
        weights, old = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
        out = out * old[..., None] + jnp.einsum("bnst,tbnd->bnsd", weights, v)
        total = total * old + weights.sum(-1)
        return (lax.ppermute(k, "t", ring), lax.ppermute(v, "t", ring), new, total, out), None

    zeros = lax.pcast(jnp.zeros((b, n, s)), "t", to="varying")
    start = (k, v, zeros - jnp.inf, zeros, zeros[..., None] * jnp.ones(d))
    _, _, _, total, out = lax.scan(step, start, None, length=ranks)[0]
    out = (out / total[..., None]).transpose(2, 0, 1, 3).reshape(s * b, n * d)
    proj = lax.all_gather(p["proj"], "t", axis=2, tiled=True).reshape(n * d, -1)
    return x + (out @ proj).reshape(x.shape)


def layers(p: Params, x: jax.Array, remat: bool) -> jax.Array:
    """``p`` has a leading dimension of layers."""
    block = jax.checkpoint(megatron_block) if remat else megatron_block

    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        return block(p, x), None

    return lax.scan(layer, x, p)[0]
