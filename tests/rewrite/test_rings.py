"""Collective matrix products written by hand, as rings of ``ppermute`` around dots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from syncopate_jax.rewrite.overlap import overlap
from tests.rewrite.compare import kinds, mesh_of, reasons, same, same_gradient

RANKS = 4
RNG = np.random.default_rng(8)
ROWS, COLUMNS, WHOLE = P("t"), P(None, "t"), P()
Array = jax.Array


def shift(x: Array, by: int = 1) -> Array:
    ranks = lax.axis_size("t")
    return lax.ppermute(x, "t", [(i, (i + by) % ranks) for i in range(ranks)])


def vary(x: Array) -> Array:
    return lax.pcast(x, "t", to="varying")


def gather_rows(x: Array, w: Array) -> Array:
    """x [M/W, K] goes around; each arrival's product is written to its rows."""
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
    out = vary(jnp.zeros((rows * ranks, w.shape[1]), x.dtype))
    for i in range(ranks):
        out = lax.dynamic_update_slice(out, x @ w, ((me - i) % ranks * rows, 0))
        x = shift(x)
    return out


def gather_rows_in_a_loop(x: Array, w: Array) -> Array:
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, out = carry
        at = jnp.where(me - i < 0, me - i + ranks, me - i)
        return shift(x), lax.dynamic_update_slice_in_dim(out, x @ w, at * rows, 0)

    out = vary(jnp.zeros((rows * ranks, w.shape[1]), x.dtype))
    return lax.fori_loop(0, ranks, step, (x, out))[1]


def gather_rows_both_ways(x: Array, w: Array) -> Array:
    """Halves of the rows go around in opposite directions."""
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0] // 2
    low, high = x[:rows], x[rows:]
    out = vary(jnp.zeros((2 * rows * ranks, w.shape[1]), x.dtype))
    for i in range(ranks):
        at = (me - i) % ranks * 2 * rows
        out = lax.dynamic_update_slice(out, low @ w, (at, 0))
        at = (me + i) % ranks * 2 * rows + rows
        out = lax.dynamic_update_slice(out, high @ w, (at, 0))
        low, high = shift(low), shift(high, -1)
    return out


def gather_contracted(x: Array, w: Array) -> Array:
    """w [K/W, N] goes around, as in JAX's own guide to shard_map."""
    ranks, me, size = lax.axis_size("t"), lax.axis_index("t"), w.shape[0]

    def columns(i: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, i * size, size, 1)

    out = columns(me) @ w
    for i in range(1, ranks):
        w = shift(w)
        out += columns((me - i) % ranks) @ w
    return out


def gather_contracted_from_zero(x: Array, w: Array) -> Array:
    """The sum starts as a number, which is zero."""
    ranks, me, size = lax.axis_size("t"), lax.axis_index("t"), w.shape[0]
    out: Any = 0.0
    for i in range(ranks):
        out += lax.dynamic_slice_in_dim(x, (me - i) % ranks * size, size, 1) @ w
        w = shift(w) if i < ranks - 1 else w
    return out


def gather_contracted_scan(x: Array, w: Array) -> Array:
    ranks, me, size = lax.axis_size("t"), lax.axis_index("t"), w.shape[0]

    def step(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], None]:
        w, out = carry
        part = lax.dynamic_slice_in_dim(x, (me + i) % ranks * size, size, 1)
        return (shift(w, -1), out + part @ w), None

    start = (w, vary(jnp.zeros((x.shape[0], w.shape[1]), x.dtype)))
    return lax.scan(step, start, jnp.arange(ranks))[0][1]


def scatter_rows(x: Array, w: Array) -> Array:
    """x [M, K/W]: a sum of products goes around and ends where its rows belong."""
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0] // lax.axis_size("t")

    def block(i: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, i % ranks * rows, rows, 0) @ w

    out = block(me - 1)
    for i in range(1, ranks):
        out = shift(out) + block(me - 1 - i)
    return out


def scatter_rows_from_zero(x: Array, w: Array) -> Array:
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0] // lax.axis_size("t")
    out: Any = 0
    for i in range(ranks):
        part = lax.dynamic_slice_in_dim(x, (me - 1 - i) % ranks * rows, rows, 0)
        out = part @ w + (shift(out) if i else out)
    return out


def scatter_rows_scan(x: Array, w: Array) -> Array:
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0] // lax.axis_size("t")

    def step(out: Array, i: Array) -> tuple[Array, None]:
        part = lax.dynamic_slice_in_dim(x, (me + ranks - 1 - i) % ranks * rows, rows, 0)
        return shift(out) + part @ w, None

    start = vary(jnp.zeros((rows, w.shape[1]), x.dtype))
    return lax.scan(step, start, jnp.arange(ranks))[0]


def scatter_columns(x: Array, w: Array) -> Array:
    """The weight is cut; both operands have a batch dimension and others of their own."""
    ranks, me = lax.axis_size("t"), lax.axis_index("t")
    size = w.shape[1] // ranks
    x = x.reshape(2, -1, x.shape[1])

    def block(i: Array) -> Array:
        part = lax.dynamic_slice_in_dim(w, i % ranks * size, size, 1)
        return jnp.einsum("abk,kn->nab", x, part)

    out = block(me + 1)
    for i in range(1, ranks):
        out = shift(out, -1) + block(me + 1 + i)
    return out.reshape(size, -1).T


GATHERED = (gather_rows, gather_rows_in_a_loop, gather_rows_both_ways)
SUMMED = (gather_contracted, gather_contracted_from_zero, gather_contracted_scan)
SCATTERED = (scatter_rows, scatter_rows_from_zero, scatter_rows_scan)


def shardings(body: Callable[..., Any]) -> tuple[tuple[P, P], P]:
    if body in GATHERED:
        return (ROWS, COLUMNS), COLUMNS
    if body in SUMMED:
        return (ROWS, ROWS), ROWS
    return (COLUMNS, ROWS), COLUMNS if body is scatter_columns else ROWS


def mapped(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    specs, out = shardings(body)
    return jax.shard_map(body, mesh=mesh_of(RANKS), in_specs=specs, out_specs=out, **options)


def arrays() -> tuple[Array, Array]:
    return tuple(jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((16, 24), (24, 8)))


@pytest.mark.parametrize(
    "body",
    [
        gather_rows_in_a_loop,
        gather_rows_both_ways,
        gather_contracted_from_zero,
        gather_contracted_scan,
        scatter_rows,
        scatter_rows_from_zero,
        *(
            pytest.param(body, marks=pytest.mark.slow)
            for body in (gather_rows, gather_contracted, scatter_rows_scan, scatter_columns)
        ),
    ],
)
def test_ring_is_one_operator(body: Callable[..., Any]) -> None:
    x, w = arrays()
    fn = mapped(body)
    np.testing.assert_allclose(jax.jit(fn)(x, w), x @ w, atol=1e-4)  # the test's own ring is right
    report = same(fn, x, w, tolerance=1e-4)
    wanted = "reduce_scatter" if body in (*SCATTERED, scatter_columns) else "all_gather"
    assert (kinds(report), reasons(report)) == ([wanted], [])
    assert report.replaced[0].collective == "ppermute"
    assert "test_rings.py" in report.replaced[0].source
    text = jax.jit(overlap(fn)).lower(x, w).compile().as_text()
    assert "collective-permute" not in text


def made_of_itself(x: Array, w: Array) -> Array:
    """What goes around is multiplied with what is made of what came before."""
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
    out = vary(jnp.zeros((rows * ranks, w.shape[1]), x.dtype))
    parts = [x, shift(x)]
    w = w + jnp.sum(parts[1])
    for i in range(ranks):
        out = lax.dynamic_update_slice(out, parts[i] @ w, ((me - i) % ranks * rows, 0))
        parts.append(shift(parts[-1]))
    return out


def used_elsewhere(x: Array, w: Array) -> Any:
    """What goes around is read on the way."""
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
    out, seen = vary(jnp.zeros((rows * ranks, w.shape[1]), x.dtype)), x * 0
    for i in range(ranks):
        out = lax.dynamic_update_slice(out, x @ w, ((me - i) % ranks * rows, 0))
        x = shift(x)
        seen = seen + x
    return out + jnp.tile(seen, (ranks, 1))[:, : w.shape[1]]


def wrong_order(x: Array, w: Array) -> Array:
    """The blocks are written one place off."""
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
    out = vary(jnp.zeros((rows * ranks, w.shape[1]), x.dtype))
    for i in range(ranks):
        out = lax.dynamic_update_slice(out, x @ w, ((me - i + 1) % ranks * rows, 0))
        x = shift(x)
    return out


def too_short(x: Array, w: Array) -> Array:
    """One rank's rows never arrive."""
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
    out = vary(jnp.zeros((rows * ranks, w.shape[1]), x.dtype))
    for i in range(ranks - 1):
        out = lax.dynamic_update_slice(out, x @ w, ((me - i) % ranks * rows, 0))
        x = shift(x)
    return out


def twice_the_same(x: Array, w: Array) -> Array:
    """Goes on for a second round: every rank's rows are added twice."""
    ranks, me, size = lax.axis_size("t"), lax.axis_index("t"), w.shape[0]
    out = vary(jnp.zeros((x.shape[0], w.shape[1]), x.dtype))
    for i in range(2 * ranks):
        out += lax.dynamic_slice_in_dim(x, (me - i) % ranks * size, size, 1) @ w
        w = shift(w) if i % 2 else w
    return out


def activation_on_the_way(x: Array, w: Array) -> Array:
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]
    out = vary(jnp.zeros((rows * ranks, w.shape[1]), x.dtype))
    for i in range(ranks):
        out = lax.dynamic_update_slice(out, jnp.tanh(x) @ w, ((me - i) % ranks * rows, 0))
        x = shift(x)
    return out


def no_ring(x: Array, w: Array) -> Array:
    """Swaps neighbours."""
    return jnp.tile(lax.ppermute(x, "t", [(0, 1), (1, 0), (2, 3), (3, 2)]) @ w, (4, 1))


NO_RING = "it is no part of a ring that gathers or sums one product"
DECOYS = {
    made_of_itself: (gather_rows, "its ring, which ends at "),
    wrong_order: (gather_rows, NO_RING),
    too_short: (gather_rows, NO_RING),
    twice_the_same: (gather_contracted, NO_RING),
    activation_on_the_way: (gather_rows, f"{NO_RING}: what went around t goes into tanh, at "),
    no_ring: (gather_rows, NO_RING),
}


@pytest.mark.parametrize("body", DECOYS, ids=lambda body: body.__name__)
def test_decoy_is_left(body: Callable[..., Any]) -> None:
    like, reason = DECOYS[body]
    shapes = (ROWS, COLUMNS, COLUMNS) if like in GATHERED else (ROWS, ROWS, ROWS)
    fn = jax.shard_map(
        body, mesh=mesh_of(RANKS), in_specs=shapes[:2], out_specs=shapes[2], check_vma=True
    )
    report = overlap(fn).report(*arrays())
    assert report.replaced == ()
    assert all(found.startswith(reason) for found in reasons(report))
    assert reasons(report)


def back_home(x: Array, w: Array) -> Array:
    """What has gone all the way round is read behind the loop, and so is what each step saw."""
    ranks, me, rows = lax.axis_size("t"), lax.axis_index("t"), x.shape[0]

    def step(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], tuple[Array, Any]]:
        x, out = carry
        at = (me - i) % ranks * rows
        return (shift(x), lax.dynamic_update_slice_in_dim(out, x @ w, at, 0)), (x, at)

    zeros = vary(jnp.zeros((rows * ranks, w.shape[1]), x.dtype))
    (back, out), (seen, at) = lax.scan(step, (x, zeros), jnp.arange(ranks))
    weights = jnp.arange(1.0, ranks + 1)[:, None, None] + at[:, None, None]
    return out + back.sum() + (seen * weights).sum()


@pytest.mark.parametrize("body", [used_elsewhere, pytest.param(back_home, marks=pytest.mark.slow)])
def test_what_goes_around_is_kept_for_others(body: Callable[..., Any]) -> None:
    """The operator gives back what it gathered, and parts of that are what was read."""
    fn = jax.shard_map(body, mesh=mesh_of(RANKS), in_specs=(ROWS, COLUMNS), out_specs=COLUMNS)
    report = same(fn, *arrays(), tolerance=1e-4)
    assert (kinds(report), reasons(report)) == (["all_gather"], [])
    assert set(report.replaced[0].readers) == {"dynamic_slice"}
    refused = overlap(fn, backend="copy_engine", target="mosaic_gpu").report(*arrays())
    assert refused.replaced == ()
    assert "does not give back what it gathered" in reasons(refused)[0]


@pytest.mark.slow
def test_a_fused_kernel_keeps_what_goes_around() -> None:
    fn = jax.shard_map(
        used_elsewhere, mesh=mesh_of(RANKS), in_specs=(ROWS, COLUMNS), out_specs=COLUMNS
    )
    report = same(fn, *arrays(), tolerance=1e-4, backend="remote_dma")
    assert (kinds(report), reasons(report)) == (["all_gather"], [])


@pytest.mark.slow
def test_two_rings_of_one_array_gather_it_once() -> None:
    def body(x: Array, w: Array) -> Array:
        return gather_rows(x, w) + gather_rows_in_a_loop(x, w * 2)

    fn = jax.shard_map(body, mesh=mesh_of(RANKS), in_specs=(ROWS, COLUMNS), out_specs=COLUMNS)
    report = same(fn, *arrays(), tolerance=1e-4)
    assert [item.readers for item in report.replaced] == [("dot_general",)]
    assert reasons(report) == []
    text = jax.jit(overlap(fn)).lower(*arrays()).compile().as_text()
    assert (text.count(" all-gather("), text.count(" collective-permute(")) == (1, 0)


# The rings of a gradient, by kind, of the whole function and of a body with its gradient in it.
LEFT_STRIDED = "what went around t goes into pad, at "
GRADIENTS = {
    gather_rows: ["all_gather", "reduce_scatter"],
    gather_rows_in_a_loop: ["all_gather", "reduce_scatter"],
    gather_contracted: ["all_gather"],
    gather_contracted_scan: ["all_gather"],
    scatter_rows: ["reduce_scatter", "all_gather"],
    scatter_rows_scan: ["reduce_scatter", "all_gather"],
    scatter_columns: ["reduce_scatter", "all_gather"],
}


def all_but(quick: Callable[..., Any]) -> list[Any]:
    """Every ring with a gradient, slow but for one."""
    return [b if b is quick else pytest.param(b, marks=pytest.mark.slow) for b in GRADIENTS]


@pytest.mark.parametrize("body", all_but(gather_rows_in_a_loop))
def test_gradient_of_a_ring(body: Callable[..., Any]) -> None:
    """The backward pass of ``shard_map`` is a body of its own, which gets what was kept.

    Where it gets slices of an array one by one, the ring that sums products of them is left.
    """
    fn = mapped(body)
    report = same_gradient(fn, *arrays(), tolerance=1e-4)
    assert kinds(report) == GRADIENTS[body]
    left = RANKS - 1 if body is gather_contracted else body is gather_contracted_scan
    assert len(report.left) == left
    assert all(reason.startswith(NO_RING) for reason in reasons(report))


@pytest.mark.parametrize("body", all_but(scatter_rows))
def test_gradient_inside_a_body(body: Callable[..., Any]) -> None:
    """All three products are found: one gathers for two of them."""

    def step(x: Array, w: Array) -> Any:
        y, back = jax.vjp(body, x, w)
        return y, *back(jnp.sin(y) + 1.0)

    specs, out = shardings(body)
    fn = jax.shard_map(step, mesh=mesh_of(RANKS), in_specs=specs, out_specs=(out, *specs))
    new = overlap(fn, backend="xla")
    report = new.report(*arrays())
    wanted = ["all_gather", "reduce_scatter"]
    wanted = wanted if GRADIENTS[body][0] == "all_gather" else wanted[::-1]
    assert (kinds(report), reasons(report)) == (wanted, [])
    assert sorted(item.readers for item in report.replaced) == [(), ("dot_general",)]
    x, w = arrays()
    for found, right in zip(jax.jit(new)(x, w), jax.jit(fn)(x, w), strict=True):
        np.testing.assert_allclose(found, right, atol=1e-3)


@pytest.mark.slow
def test_gradient_of_halves_both_ways_is_left() -> None:
    """Halves of a rank's rows scattered are strides of the whole, which no operator scatters."""
    report = same_gradient(mapped(gather_rows_both_ways), *arrays(), tolerance=1e-4)
    assert kinds(report) == ["all_gather"]
    assert all(LEFT_STRIDED in reason for reason in reasons(report))


@pytest.mark.slow
def test_rings_in_a_row_inside_a_scan() -> None:
    """A layer of two rings, in a scan over layers under remat, untracked."""

    def layer(x: Array, w: tuple[Array, Array]) -> tuple[Array, None]:
        h = jax.nn.gelu(gather_rows(x, w[0]))
        return x + scatter_rows(h, w[1]), None

    def body(x: Array, ups: Array, downs: Array) -> Array:
        return lax.scan(jax.checkpoint(layer), x, (ups, downs))[0]

    specs = (ROWS, P(None, None, "t"), P(None, "t"))
    fn = jax.shard_map(body, mesh=mesh_of(RANKS), in_specs=specs, out_specs=ROWS)
    up, down = RNG.standard_normal((2, 6, 8)), RNG.standard_normal((2, 8, 6))
    x = RNG.standard_normal((8, 6))
    report = same(fn, *(jnp.asarray(a * 0.3, jnp.float32) for a in (x, up, down)), tolerance=1e-4)
    assert (kinds(report), reasons(report)) == (["all_gather", "reduce_scatter"], [])


def test_a_fused_backend_is_asked_first() -> None:
    """Where it refuses the ring runs as it was written."""
    fn = mapped(gather_rows)
    report = overlap(fn, backend="remote_dma", target="mosaic_gpu").report(*arrays())
    assert report.replaced == ()
    assert reasons(report)[0].startswith("backend remote_dma does not take it: ")
