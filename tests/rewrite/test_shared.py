"""One collective whose result several operations read: one dot is fused, the others read it too."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from syncopate_jax.rewrite.overlap import overlap
from tests.rewrite.compare import kinds, loss_of, mesh_of, reasons, same, same_gradient

RNG = np.random.default_rng(5)
X, W, V = (
    jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((8, 6), (6, 4), (6, 12))
)


def gather(x: jax.Array, axis: int = 0) -> jax.Array:
    return lax.all_gather(x, "t", axis=axis, tiled=True)


def mapped(body: Callable[..., Any], **options: Any) -> Any:
    specs = (P("t"), P(None, "t"), P(None, "t"))
    return jax.shard_map(body, mesh=mesh_of(2), in_specs=specs, out_specs=P("t"), **options)


def gate_and_up(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    h = gather(x)
    return jax.nn.silu(h @ w) * (h @ v)[:, :2]


def read_before(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """The largest dot is not the first reader."""
    h = gather(jnp.tanh(x))
    top = h.max(0)
    return (h @ w).sum(1, keepdims=True) + h @ v + top[0]


def other_orders(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Reshapes and transposes on the way to the dot are undone for the other readers."""
    h = gather(x)
    split = jnp.swapaxes(h, 0, 1).reshape(2, 3, 8)
    return jnp.einsum("abm,abn->mn", split, v.reshape(2, 3, -1)) + h.sum(1, keepdims=True)


def in_halves(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """The shared gather is of a narrow type and of the contracted dimension."""
    h = gather(x.astype(jnp.bfloat16).T, axis=1)
    small = h.astype(jnp.float32)
    return (h.T @ w.astype(jnp.bfloat16)).astype(jnp.float32) + small.sum(0)[:, None]


def one_feeds_a_sum(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """The larger dot is left for the sum that its result goes into."""
    h = gather(x)
    return (h @ w)[:4] + lax.psum_scatter(h @ v, "t", tiled=True)[:, :2]


def exchanged(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    h = lax.all_to_all(x, "t", split_axis=1, concat_axis=0, tiled=True)
    return h @ w[:3] + h @ v[:3, :2]


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (gate_and_up, ["all_gather"]),
        (read_before, ["all_gather"]),
        (other_orders, ["all_gather"]),
        (in_halves, ["all_gather"]),
        (one_feeds_a_sum, ["all_gather", "reduce_scatter"]),
        (exchanged, ["all_to_all"]),
    ],
)
def test_one_dot_is_fused(body: Callable[..., Any], wanted: list[str], check_vma: bool) -> None:
    tolerance = 2e-2 if body is in_halves else 2e-5
    report = same(mapped(body, check_vma=check_vma), X, W, V, tolerance=tolerance)
    assert (kinds(report), reasons(report)) == (wanted, [])
    assert len(report.replaced[0].readers) >= 1


def test_also_a_result() -> None:
    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        h = gather(x)
        return h, h @ w, (h, h)

    report = same(mapped(body), X, W, V)
    assert report.replaced[0].readers == ("the result of the function",) * 3
    assert str(report).endswith(f"kept for {', '.join(['the result of the function'] * 3)}")


def test_the_dot_that_hides_most_is_taken() -> None:
    report = overlap(mapped(read_before)).report(X, W, V)
    (item,) = report.replaced
    assert item.readers == ("reduce_max", "dot_general")
    shapes = [value.shape for value in (W, V)]
    assert shapes[1][1] > shapes[0][1]
    lines = [int(re.search(r":(\d+) ", text)[1]) for text in (item.source, item.dot_source)]
    assert lines[1] - lines[0] > 0


@pytest.mark.parametrize(
    "body",
    [gate_and_up, one_feeds_a_sum, pytest.param(exchanged, marks=pytest.mark.slow)],
)
def test_nothing_is_sent_twice(body: Callable[..., Any]) -> None:
    """Program and gradient have as many collectives as before."""

    def count(fn: Callable[..., Any]) -> list[str]:
        text = jax.jit(jax.grad(loss_of(fn), (0, 1, 2))).lower(X, W, V).compile().as_text()
        names = r" (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\("
        return sorted(re.findall(names, text))

    before, after = (count(f(mapped(body))) for f in (lambda f: f, overlap))
    assert len(before) > 1
    assert after == before


def test_gradient_is_overlapped() -> None:
    """What the backward pass reads again is kept; its gather has two dots of its own."""
    fn = mapped(gate_and_up)
    report = same_gradient(fn, X, W, V)
    assert kinds(report) == ["all_gather"]
    assert reasons(report) == ["add_any stands between: it sums several dots, an operator has one"]


@pytest.mark.slow
@pytest.mark.parametrize("body", [gate_and_up, other_orders, exchanged])
def test_fused_kernels_keep_too(body: Callable[..., Any]) -> None:
    report = same(mapped(body), X, W, V, backend="remote_dma")
    assert (len(report.replaced), reasons(report)) == (1, [])


def test_a_fused_backend_that_keeps_nothing() -> None:
    report = overlap(mapped(gate_and_up), backend="copy_engine", target="mosaic_gpu").report(
        X, W, V
    )
    assert reasons(report) == [
        "others read its result too (dot_general), and backend copy_engine does not give back "
        "what it gathered; use backend 'xla'"
    ]


def test_what_is_needed_is_made_before() -> None:
    """The weights of both dots are made after other readers, one of them of another gather."""

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        h, k = gather(x), gather(w.T)
        total = h.sum() + k.sum()
        both = h @ k.T + h @ (jnp.cos(k.T) + 1.0)
        return both + total + (k @ v).sum()

    report = same(mapped(body), X, W, V)
    assert kinds(report) == ["all_gather", "all_gather"]


def test_operators_do_not_wait_for_each_other() -> None:
    """Each gather's only dot needs what is made of the other gather."""

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        h, k = gather(x), gather(jnp.sin(x))
        return h.T @ jnp.sin(k) + k.T @ jnp.sin(h) + h.sum()

    report = same(mapped(body), X, W, V)
    assert kinds(report) == ["all_gather"]
    assert reasons(report)[0].endswith("the dot's other operand is made of the result too")


def test_a_side_effect_stays_where_it_is() -> None:
    seen: list[str] = []

    def note(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        def tell() -> np.ndarray:
            seen.append(name)
            return np.ones(shape.shape, shape.dtype)

        return io_callback(tell, shape, ordered=False)

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        h = gather(x)
        return h[:, :2] + h @ note("w", w)

    report = overlap(mapped(body, check_vma=False)).report(X, W, V)
    (reason,) = reasons(report)
    assert reason.endswith("made by io_callback, whose side effect would come too early")
    assert seen == []


def test_a_batch_that_shares_what_is_kept() -> None:
    """The cotangent of what is kept counts once, whatever the batch of the other operand."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        h = gather(x)
        return lax.psum(jnp.sum(jnp.tanh(h @ w) ** 2) + jnp.sum(h), "t")

    fn = jax.shard_map(body, mesh=mesh_of(2), in_specs=(P("t"), P()), out_specs=P())
    batch = jnp.asarray(RNG.standard_normal((3, 6, 4)), jnp.float32)
    assert kinds(overlap(fn).report(X, W)) == ["all_gather"]
    loss = lambda fn: lambda *a: jnp.sum(jax.vmap(fn, (None, 0))(*a))  # noqa: E731
    found, wanted = (jax.grad(loss(f), (0, 1))(X, batch) for f in (overlap(fn), fn))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
