"""Programs for eight devices, as JAX prints them: partitioned HLO and StableHLO.

Model code is that of ``tests/rewrite/models.py``, on a mesh of two data-parallel groups of four.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.rewrite import models


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("d", "t"), (AxisType.Auto,) * 2)


def sharded(fn: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
    return jax.shard_map(fn, mesh=mesh(), in_specs=specs, out_specs=out, check_vma=False)


def megatron() -> tuple[Any, ...]:
    fn = sharded(models.megatron_block, (models.MEGATRON, P("t", "d")), P("t", "d"))
    return fn, models.megatron_params(16, 4, 8), jnp.ones((8, 2, 16))


def fsdp() -> tuple[Any, ...]:
    fn = sharded(models.fsdp_mlp, (models.FSDP, P(("d", "t"))), P(("d", "t")))
    return fn, models.fsdp_params(16, 32), jnp.ones((16, 16))


def ulysses() -> tuple[Any, ...]:
    fn = sharded(models.ulysses_attention, (models.ULYSSES, P("t", "d")), P("t", "d"))
    return fn, models.ulysses_params(16, 4), jnp.ones((8, 2, 16))


def ring() -> tuple[Any, ...]:
    """Keys and values around the ring, weights gathered, in a scan."""
    fn = sharded(models.ring_attention, (models.RING, P("t", "d")), P("t", "d"))
    params = models.megatron_params(16, 4, 8)
    return fn, {k: params[k if k != "ln" else "ln1"] for k in models.RING}, jnp.ones((8, 2, 16))


def experts() -> tuple[Any, ...]:
    """Tokens to the experts' devices and back, each expert a product."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:  # x [experts, tokens, hidden]
        x = lax.all_to_all(x, "t", split_axis=0, concat_axis=1, tiled=True)
        y = jax.nn.relu(jnp.einsum("ekh,ehf->ekf", x, w))
        return lax.all_to_all(y, "t", split_axis=1, concat_axis=0, tiled=True)

    fn = sharded(layer, (P(None, ("d", "t")), P("t")), P(None, ("d", "t")))
    return fn, jnp.ones((4, 16, 8)), jnp.ones((4, 8, 12))


def exchanges() -> tuple[Any, ...]:
    """All-to-all of what is multiplied, and of what was."""

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        before = lax.all_to_all(x, "t", split_axis=1, concat_axis=0, tiled=True) @ w
        return before, lax.all_to_all(x @ v, "t", split_axis=0, concat_axis=1, tiled=True)

    fn = sharded(body, (P("t"), P(), P()), P("t"))
    return fn, jnp.ones((16, 8)), jnp.ones((2, 12)), jnp.ones((8, 12))


def reductions() -> tuple[Any, ...]:
    def loss(x: jax.Array, w: jax.Array) -> Any:
        y = lax.psum(x @ w, "t")
        return lax.pmax(jnp.max(y), ("d", "t")), lax.psum(y, "d"), lax.pmin(y, "d")

    return sharded(loss, (P("d", "t"), P("t")), (P(), P(), P())), jnp.ones((4, 8)), jnp.ones((8, 6))


def partitioned() -> tuple[Any, ...]:
    """No shard_map: the partitioner finds the collectives."""

    def keep(x: jax.Array, *spec: Any) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh(), P(*spec)))

    def mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        h = jax.nn.gelu(keep(keep(x, "d", "t") @ keep(w, None, "t"), "d", "t"))
        return keep(keep(h, "d", "t") @ keep(v, "t"), "d")

    return mlp, jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones((16, 12))


def explicit() -> tuple[Any, ...]:
    """Explicit axes: layers with a jit of their own, in a scan under remat."""
    mesh = jax.make_mesh((2, 4), ("d", "t"), (AxisType.Explicit,) * 2)

    def on(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    @jax.jit
    def up(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum("bsh,hf->bsf", x, w))

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h = up(jax.reshard(x, on("d")), w[0])
        return x + jnp.einsum("bsf,fh->bsh", h, w[1], out_sharding=on("d", "t")), None

    def layers(x: jax.Array, *w: jax.Array) -> jax.Array:
        return lax.scan(jax.checkpoint(layer), x, w)[0]

    x = jax.device_put(jnp.ones((4, 8, 16)), on("d", "t"))
    w1 = jax.device_put(jnp.ones((3, 16, 32)), on(None, None, "t"))
    return layers, x, w1, jax.device_put(jnp.ones((3, 32, 16)), on(None, "t"))


def explicit_gradient() -> tuple[Any, ...]:
    fn, *args = explicit()
    return jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), (1, 2)), *args


def automatic() -> tuple[Any, ...]:
    """Auto axes, sharded arguments and a sharded result; what is between is the partitioner's."""

    def on(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh(), P(*spec))

    fn = jax.jit(lambda x, w, v: ((x @ w), jnp.tanh(x @ v)), out_shardings=(on("d"), None))
    x, w = jax.device_put(jnp.ones((8, 16)), on("d", "t")), jnp.ones((16, 32))
    return fn, x, jax.device_put(w, on("t")), jax.device_put(w, on(None, "d"))


def partly_manual() -> tuple[Any, ...]:
    """One axis is shard_map's, the other the partitioner's."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum_scatter(lax.all_gather(x, "t", tiled=True) @ w, "t", tiled=True)

    fn = jax.shard_map(
        body, mesh=mesh(), in_specs=(P("t"), P()), out_specs=P("t"), axis_names={"t"}
    )
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh(), P("t", "d")))
    return fn, x, jax.device_put(jnp.ones((16, 12)), NamedSharding(mesh(), P("d")))


PROGRAMS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "megatron": megatron, "fsdp": fsdp, "ulysses": ulysses, "ring": ring, "experts": experts,
    "exchanges": exchanges,
    "reductions": reductions, "partitioned": partitioned,
    "explicit": explicit, "explicit_gradient": explicit_gradient,
    "automatic": automatic, "partly_manual": partly_manual,
}  # fmt: skip


@functools.cache
def texts(name: str) -> tuple[str, str]:
    """HLO and StableHLO of the program called ``name``, compiled by the JAX installed."""
    fn, *args = PROGRAMS[name]()
    lowered = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args)
    return lowered.compile().as_text(), lowered.as_text()
