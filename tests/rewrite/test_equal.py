"""Equal collectives that a program writes several times: one operator, which the others read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from syncopate_jax.options import Launch
from syncopate_jax.rewrite.overlap import overlap
from tests.rewrite.compare import kinds, mesh_of, reasons, same, same_gradient

RNG = np.random.default_rng(11)
X, W, V = (
    jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((8, 6), (6, 4), (6, 12))
)


def gather(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, "t", tiled=True)


def mapped(body: Callable[..., Any]) -> Any:
    specs = (P("t"), P(None, "t"), P(None, "t"))
    return jax.shard_map(body, mesh=mesh_of(2), in_specs=specs, out_specs=P("t"))


def two(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return gather(x) @ w + gather(x) @ v[:, :2]


def three(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Queries, keys and values; one of them in a call of its own."""
    q, k = gather(x) @ w, jax.jit(lambda x: gather(x) @ v[:, :2])(x)
    return jnp.tanh(q @ k.T) @ (gather(x) @ v)


def casts(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """What is gathered was cast and transposed each time."""

    def once(w: jax.Array) -> jax.Array:
        h = lax.all_gather(x.astype(jnp.bfloat16).T, "t", axis=1, tiled=True)
        return (h.T @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    return once(w) + once(v[:, :2])


def a_result_too(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return gather(x) @ w + gather(x).sum(1, keepdims=True)


def exchanged(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    def once(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, "t", split_axis=1, concat_axis=0, tiled=True)

    return once(x) @ w[:3] + once(x) @ v[:3, :2]


def summed(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    y = x @ w
    return lax.psum(y, "t") * jnp.tanh(lax.psum(y, "t"))


def scattered(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    y = x @ w

    def once(y: jax.Array) -> jax.Array:
        return lax.psum_scatter(y, "t", tiled=True)

    return once(y) * jnp.tanh(once(y))


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (two, ["all_gather"]),
        (three, ["all_gather"]),
        (casts, ["all_gather"]),
        (a_result_too, ["all_gather"]),
        (exchanged, ["all_to_all"]),
        (summed, ["all_reduce"]),
        (scattered, ["reduce_scatter"]),
    ],
)
def test_they_are_one(body: Callable[..., Any], wanted: list[str]) -> None:
    tolerance = 2e-2 if body is casts else 2e-5
    report = same(mapped(body), X, W, V, tolerance=tolerance)
    assert (kinds(report), reasons(report)) == (wanted, [])
    (item,) = report.replaced
    assert len(item.equals) == (2 if body is three else 1)
    assert f" (and at {', '.join(item.equals)}), with the dot at " in str(item)


def test_one_fused_exchange() -> None:
    """Kernels are not merged by XLA; as many as are put into the program run."""
    new = overlap(mapped(three), backend="remote_dma")
    assert str(jax.make_jaxpr(new)(X, W, V)).count("fused_call[") == 1
    np.testing.assert_allclose(jax.jit(new)(X, W, V), mapped(three)(X, W, V), rtol=1e-4, atol=1e-4)


def test_in_a_gradient_as_jax_made_it() -> None:
    report = same_gradient(mapped(two), X, W, V)
    assert [len(item.equals) for item in report.replaced] == [1, 0, 0]


def test_each_is_fused_by_itself_where_one_cannot_serve_all() -> None:
    """An activation is moved before its own gather, and cannot be undone for other readers."""

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(gather(x)) @ w + jnp.sin(gather(x)) @ v[:, :2]

    report = same(mapped(body), X, W, V)
    assert (kinds(report), reasons(report)) == (["all_gather"] * 2, [])
    x, w, v = (jnp.ones(n, jnp.bfloat16) for n in ((256, 128), (128, 256), (128, 1024)))
    given = {"backend": "copy_engine", "target": "mosaic_gpu", "launch": Launch(sms=132)}

    def wide(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return gather(x) @ w + gather(x) @ v[:, :128]

    report = overlap(mapped(wide), **given).report(x, w, v)
    assert (kinds(report), reasons(report)) == (["all_gather"] * 2, [])


def test_what_differs_is_not_merged() -> None:
    """Another array, other parameters, another body."""

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        def step(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            return total + gather(x) @ w, None

        y = gather(x) @ w + gather(-x) @ w
        y += lax.all_gather(x, "t").reshape(8, 6) @ w
        return lax.scan(step, y, None, length=2)[0]

    report = same(mapped(body), X, W, V)
    assert kinds(report) == ["all_gather"] * 4
    assert [item.equals for item in report.replaced] == [()] * 4


@pytest.mark.parametrize("waits", [False, True])
def test_what_an_earlier_operator_reads(waits: bool) -> None:
    """The first gather's dot reads the third; the second, which equals it, may need that dot."""

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        first, second, third = gather(jnp.sin(x)), gather(x), gather(x)
        y = first.T @ third
        return second @ (y[:, :4] if waits else w) + y[0, 0]

    report = same(mapped(body), X, W, V)
    assert kinds(report) == ["all_gather"] * 2
    assert [len(item.equals) for item in report.replaced] == [0, 0 if waits else 1]
    assert len(report.left) == (1 if waits else 0)
