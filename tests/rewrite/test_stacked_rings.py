"""Rings that stack their products along a dimension of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from syncopate_jax.rewrite.overlap import overlap
from tests.rewrite.compare import kinds, mesh_of, reasons, same, same_gradient
from tests.rewrite.test_rings import COLUMNS, NO_RING, RANKS, ROWS, arrays, shift, vary

Array = jax.Array


def mapped(body: Callable[..., Any], cut: Any = (ROWS, COLUMNS, COLUMNS)) -> Callable[..., Any]:
    return jax.shard_map(body, mesh=mesh_of(RANKS), in_specs=cut[:2], out_specs=cut[2])


def gather_rows_stacked(x: Array, w: Array) -> Array:
    """Products are written by which rank's they are, and put behind each other in the end."""
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
    out = vary(jnp.zeros((ranks, rows, w.shape[1]), x.dtype))
    for i in range(ranks):
        out = lax.dynamic_update_index_in_dim(out, x @ w, (me - i) % ranks, 0)
        x = shift(x)
    return out.reshape(rows * ranks, -1)


def gather_rows_stacked_inside(x: Array, w: Array) -> Array:
    """Halves go both ways; the dimension of ranks is the middle one, in a transposed result."""
    ranks, me, half = lax.axis_size("t"), lax.axis_index("t"), x.shape[0] // 2
    low, high = x[:half], x[half:]
    out = vary(jnp.zeros((w.shape[1], ranks, 2 * half), x.dtype))
    for i in range(ranks):
        product = (low @ w).T.reshape(w.shape[1], 1, half)
        out = lax.dynamic_update_slice(out, product, (0, (me - i) % ranks, 0))
        out = lax.dynamic_update_slice(out, (high @ w).T[:, None], (0, (me + i) % ranks, half))
        low, high = shift(low), shift(high, -1)
    return out.reshape(w.shape[1], -1).T


each_ring = pytest.mark.parametrize("body", [gather_rows_stacked, gather_rows_stacked_inside])


@each_ring
@pytest.mark.parametrize("backend", ["xla", pytest.param("remote_dma", marks=pytest.mark.slow)])
def test_a_stacked_ring_is_one_operator(body: Callable[..., Any], backend: str) -> None:
    x, w = arrays()
    fn = mapped(body)
    np.testing.assert_allclose(jax.jit(fn)(x, w), x @ w, atol=1e-4)  # the test's own ring is right
    report = same(fn, x, w, tolerance=1e-4, backend=backend)
    assert (kinds(report), reasons(report)) == (["all_gather"], [])
    text = jax.jit(overlap(fn, backend=backend)).lower(x, w).compile().as_text()
    assert "collective-permute" not in text


@each_ring
def test_gradient_of_a_stacked_ring(body: Callable[..., Any]) -> None:
    """Of a gradient as JAX made it, the forward ring is found; its calls have zeros as results too.

    The backward one is left: slices are multiplied that have lost their dimension of 1.
    """
    report = same_gradient(mapped(body), *arrays(), tolerance=1e-4)
    assert kinds(report) == ["all_gather"]
    assert reasons(report) and all(reason.startswith(NO_RING) for reason in reasons(report))


def stacked_one_off(x: Array, w: Array) -> Array:
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
    out = vary(jnp.zeros((ranks, rows, w.shape[1]), x.dtype))
    for i in range(ranks):
        out = lax.dynamic_update_index_in_dim(out, x @ w, (me - i + 1) % ranks, 0)
        x = shift(x)
    return out.reshape(rows * ranks, -1)


def stacked_halves_changed(x: Array, w: Array) -> Array:
    """The second half of a block is written before the first."""
    ranks, me, half = lax.axis_size("t"), lax.axis_index("t"), x.shape[0] // 2
    out = vary(jnp.zeros((ranks, 2 * half, w.shape[1]), x.dtype))
    for i in range(ranks):
        at = (me - i) % ranks
        out = lax.dynamic_update_slice(out, (x[:half] @ w)[None], (at, half, 0))
        out = lax.dynamic_update_slice(out, (x[half:] @ w)[None], (at, 0, 0))
        x = shift(x)
    return out.reshape(2 * half * ranks, -1)


def summed_with_an_added_dimension(x: Array, w: Array) -> Array:
    """As a scattered sum, of another shape."""
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0] // lax.axis_size("t")

    def block(i: Array) -> Array:
        return (lax.dynamic_slice_in_dim(x, i % ranks * rows, rows, 0) @ w)[None]

    out = block(me - 1)
    for i in range(1, ranks):
        out = shift(out) + block(me - 1 - i)
    return out[0]


@pytest.mark.parametrize(
    ("body", "cut"),
    [
        (stacked_one_off, (ROWS, COLUMNS, COLUMNS)),
        (stacked_halves_changed, (ROWS, COLUMNS, COLUMNS)),
        (summed_with_an_added_dimension, (COLUMNS, ROWS, ROWS)),
    ],
)
def test_decoy_is_left(body: Callable[..., Any], cut: Any) -> None:
    report = overlap(mapped(body, cut)).report(*arrays())
    assert report.replaced == ()
    assert reasons(report) and all(reason.startswith(NO_RING) for reason in reasons(report))


def stacked_twice(x: Array, w: Array) -> Array:
    """One ring sends for both, in a loop; each step's product is kept besides."""
    ranks, me, rows, twice = lax.axis_size("t"), lax.axis_index("t"), x.shape[0], w * 2

    def step(carry: Any, i: Array) -> tuple[Any, Array]:
        x, one, other = carry
        at, product = (me - i) % ranks, (x @ w)[:, None]
        one = lax.dynamic_update_slice(one, product, (0, at, 0))
        other = lax.dynamic_update_index_in_dim(other, x @ twice, at, 0)
        return (shift(x), one, other), product

    one, other = ((rows, ranks, w.shape[1]), (ranks, rows, w.shape[1]))
    start = (x, *(vary(jnp.zeros(shape, x.dtype)) for shape in (one, other)))
    (_, one, other), products = lax.scan(step, start, jnp.arange(ranks))
    weights = jnp.arange(1.0, ranks + 1)[:, None, None, None]
    both = one.transpose(1, 0, 2) * 3 + other + (products * weights).sum()
    return both.reshape(rows * ranks, -1)


def test_stacked_rings_share_what_goes_around() -> None:
    fn = mapped(stacked_twice)
    report = same(fn, *arrays(), tolerance=1e-4)
    assert (kinds(report), reasons(report)) == (["all_gather"], [])
    text = jax.jit(overlap(fn)).lower(*arrays()).compile().as_text()
    assert "collective-permute" not in text


def test_a_reshape_that_transposes_is_no_added_dimension() -> None:
    def body(x: Array, w: Array) -> Array:
        ranks, me = lax.axis_size("t"), lax.axis_index("t")
        out = vary(jnp.zeros((ranks, 4, 4), x.dtype))
        for i in range(ranks):
            turned = lax.reshape(x @ w, (1, 4, 4), dimensions=(1, 0))
            out = lax.dynamic_update_slice(out, turned, ((me - i) % ranks, 0, 0))
            x = shift(x)
        return out

    x = jnp.arange(16.0 * RANKS).reshape(4 * RANKS, 4)
    report = same(mapped(body, (ROWS, COLUMNS, ROWS)), x, x.T, tolerance=1e-4)
    assert kinds(report) == []


def test_stacked_rings_of_weights_that_all_ranks_have() -> None:
    """Which do not vary over the ranks, as what goes around does."""

    def body(x: Array, w: Array, v: Array) -> Array:
        ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
        one = other = vary(jnp.zeros((ranks, rows, w.shape[1]), x.dtype))
        for i in range(ranks):
            one = lax.dynamic_update_index_in_dim(one, x @ w, (me - i) % ranks, 0)
            other = lax.dynamic_update_index_in_dim(other, x @ v, (me - i) % ranks, 0)
            x = shift(x)
        return one + 2 * other

    specs = {"in_specs": (ROWS, jax.P(), jax.P()), "out_specs": ROWS}
    fn = jax.shard_map(body, mesh=mesh_of(RANKS), **specs)
    x, w = arrays()
    report = same(fn, x, w, w + 1, tolerance=1e-4)
    assert (kinds(report), reasons(report)) == (["all_gather"], [])
