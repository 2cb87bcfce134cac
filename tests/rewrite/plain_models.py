"""The same models on whole arrays, under plain ``jit``: explicit mesh axes, or auto ones.

On explicit axes shardings change where ``reshard`` or ``out_sharding`` says so; on auto axes
``with_sharding_constraint`` says what the partitioner must make of a value.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.rewrite import models
from tests.rewrite.models import Params

ROWS = P("t")


def is_explicit(mesh: Any) -> bool:
    return bool(mesh.axis_types[0] == AxisType.Explicit)


def place(mesh: Any, x: jax.Array, spec: P) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    if is_explicit(mesh):
        return jax.reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def einsum(mesh: Any, formula: str, x: jax.Array, w: jax.Array, spec: P) -> jax.Array:
    if is_explicit(mesh):
        return jnp.einsum(formula, x, w, out_sharding=NamedSharding(mesh, spec))
    return place(mesh, jnp.einsum(formula, x, w), spec)


def megatron_block(mesh: Any, p: Params, x: jax.Array) -> jax.Array:
    """x [sequence, batch, hidden], rows sharded."""
    h = place(mesh, models.norm(x, p["ln1"]), P())
    q, k, v = jnp.moveaxis(jnp.einsum("sbh,hcnd->sbcnd", h, p["qkv"]), 2, 0)
    x = x + einsum(mesh, "sbnd,ndh->sbh", models.attend(q, k, v), p["proj"], ROWS)
    h = place(mesh, models.norm(x, p["ln2"]), P())
    both = jnp.einsum("sbh,hci->csbi", h, p["up"]) + p["up_bias"][:, None, None]
    hidden = jax.nn.silu(both[0]) * both[1]
    return x + einsum(mesh, "sbi,ih->sbh", hidden, p["down"], ROWS) + p["down_bias"]


def fsdp_mlp(mesh: Any, p: Params, x: jax.Array) -> jax.Array:
    """x [batch, hidden], rows sharded, and so are the weights, gathered where they are used."""
    h = jax.nn.gelu(place(mesh, x @ place(mesh, p["up"], P()), ROWS) + p["up_bias"])
    return x + place(mesh, h @ place(mesh, p["down"], P()), ROWS)


def sequence_attention(mesh: Any, p: Params, x: jax.Array) -> jax.Array:
    """Ring attention's layout: queries stay, keys and values come from every rank."""
    qkv = jnp.einsum("sbh,hcnd->sbcnd", models.norm(x, p["ln"]), place(mesh, p["qkv"], P()))
    q, k, v = jnp.moveaxis(place(mesh, qkv, ROWS), 2, 0)
    scores = jnp.einsum("sbnd,tbnd->bnst", q, place(mesh, k, P())) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(scores, axis=-1)
    out = place(mesh, jnp.einsum("bnst,tbnd->sbnd", weights, place(mesh, v, P())), ROWS)
    return x + jnp.einsum("sbnd,ndh->sbh", out, place(mesh, p["proj"], P()))


def flax_module(mesh: Any) -> Any:
    """Dense layers around a gather and a scatter of the rows."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            whole = place(mesh, nn.LayerNorm()(x), P())
            h = nn.gelu(nn.Dense(12, name="up")(whole))
            scatter = None
            if is_explicit(mesh):
                sharding = NamedSharding(mesh, ROWS)
                scatter = functools.partial(lax.dot_general, out_sharding=sharding)
            out = nn.Dense(8, use_bias=False, dot_general=scatter, name="down")(h)
            return x + place(mesh, out, ROWS)

    return Block()
