"""``custom_vjp`` functions: rewritten inside, forward rule too; the backward rule stays theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from syncopate_jax import overlap
from tests.ops.cases import ranks_mesh

P = jax.P
X = jnp.asarray(np.random.default_rng(1).standard_normal((8, 8)), jnp.float32)
W = jnp.asarray(np.random.default_rng(2).standard_normal((8, 4)), jnp.float32)


def gathered(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.all_gather(x, "t", tiled=True) @ w


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Its gradient is three times what it should be, so that one sees whose rule it is."""
    return gathered(x, w)


def _backward(kept: Any, ct: jax.Array) -> Any:
    return tuple(3 * g for g in jax.vjp(gathered, *kept)[1](ct))


product.defvjp(lambda x, w: (gathered(x, w), (x, w)), _backward)


def closed(x: jax.Array, w: jax.Array) -> jax.Array:
    """Reads an array from around it (no traced one: JAX cannot), and takes what is no array."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def scaled(times: float, x: jax.Array) -> jax.Array:
        return gathered(x, W) * times

    def forward(times: float, x: jax.Array) -> Any:
        return scaled(times, x), jnp.tanh(x)

    scaled.defvjp(forward, lambda times, kept, ct: (times * kept * ct.sum(),))
    return scaled(2.0, x) + w.sum()


def in_a_scan(x: jax.Array, w: jax.Array) -> jax.Array:
    def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = jax.checkpoint(product)(carry, w)
        return carry + y[: carry.shape[0], :1], None

    return lax.scan(step, x, None, length=2)[0]


def mapped(body: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    fn = jax.shard_map(
        body, mesh=ranks_mesh(2), in_specs=(P("t"), P()), out_specs=P("t"), check_vma=False
    )
    return lambda x, w: (fn(x, w) ** 2).sum()


@pytest.mark.parametrize("body", [product, closed, in_a_scan], ids=lambda f: f.__name__)
def test_values_and_gradients_stay(body: Callable[..., jax.Array]) -> None:
    fn = mapped(body)
    report = overlap(fn).report(X, W)
    assert [len(report.replaced), len(report.left)] == [1, 0], report
    for made in (jax.value_and_grad(overlap(fn), (0, 1)), overlap(jax.value_and_grad(fn, (0, 1)))):
        found, wanted = made(X, W), jax.value_and_grad(fn, (0, 1))(X, W)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), found, wanted)


def test_the_forward_rule_is_rewritten_too() -> None:
    """Nothing is left of the collective that it was written with."""
    fn = mapped(product)
    assert "all_gather" in str(jax.make_jaxpr(lambda x, w: jax.vjp(fn, x, w)[0])(X, W))
    fused = overlap(fn, backend="remote_dma")
    text = str(jax.make_jaxpr(lambda x, w: jax.vjp(fused, x, w)[0])(X, W))
    assert "all_gather[" not in text


class Scaled:
    """A function that is an object, as modules are."""

    def __call__(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return 2 * gathered(x, w)


def test_a_function_that_is_an_object() -> None:
    own = jax.custom_vjp(Scaled())
    own.defvjp(lambda x, w: (2 * gathered(x, w), (x, w)), _backward)
    fn = mapped(own)
    assert len(overlap(fn).report(X, W).replaced) == 1
    np.testing.assert_allclose(overlap(fn)(X, W), fn(X, W), rtol=2e-5)
