"""``all_gather_matmul`` with ``return_gathered``: both results, their gradients, its refusals."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ops import all_gather_matmul
from tests.ops import cases

CASES = [
    ("x", "m", P(None, "t"), P()),
    ("x", "k", P(None, None, "t"), P()),
    ("w", "k", P(), P("t")),
    ("w", "n", P(), P(None, "t")),
]
RNG = np.random.default_rng(2)


def both(case: Any, ranks: int, **options: Any) -> Any:
    """Both results of every rank, one after the other, as a function of whole arrays."""
    gathered, dimension, x_spec, w_spec = case

    def body(x: jax.Array, w: jax.Array) -> Any:
        return all_gather_matmul(
            x,
            w,
            axis_name="t",
            gathered=gathered,
            dimension=dimension,
            return_gathered=True,
            **options,
        )

    return jax.shard_map(
        lambda x, w: [out[None] for out in body(x, w)],
        mesh=cases.ranks_mesh(ranks),
        in_specs=(x_spec, w_spec),
        out_specs=P("t"),
    )


def run(case: Any, x: jax.Array, w: jax.Array, **options: Any) -> Any:
    """Both results and the gradients of both operands, of a loss that reads both results."""
    fn = both(case, 2, **options)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y, whole = fn(x, w)
        return jnp.sum(jnp.sin(y[0])) + jnp.sum(jnp.cos(whole[1]))

    return jax.jit(lambda x, w: (fn(x, w), jax.grad(loss, (0, 1))(x, w)))(x, w)


def wanted(case: Any, x: jax.Array, w: jax.Array) -> Any:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x @ w)) + jnp.sum(jnp.cos(x if case[0] == "x" else w))

    return (x @ w, x if case[0] == "x" else w), jax.grad(loss, (0, 1))(x, w)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "xla") for case in CASES),
        *(pytest.param(case, "remote_dma", marks=pytest.mark.slow) for case in CASES),
    ],
    ids=str,
)
def test_both_results(case: Any, backend: str) -> None:
    x, w = (jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((2, 8, 6), (6, 4)))
    (y, whole), gradients = run(case, x, w, backend=backend)
    (want_y, want_whole), want_gradients = wanted(case, x, w)
    for rank in range(2):
        np.testing.assert_allclose(y[rank], want_y, atol=1e-5)
        np.testing.assert_array_equal(whole[rank], want_whole)
    for found, want in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case is CASES[1] else pytest.mark.slow) for case in CASES],
    ids=str,
)
def test_what_is_kept_of_several_ranks_and_chunks_is_in_order(case: Any) -> None:
    """Each rank's three rows or columns come as two and one."""
    x, w = (jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((1, 9, 9), (9, 9)))
    fn = both(case, 3, backend="remote_dma", split=2)
    y, whole = jax.jit(fn)(x, w)
    wanted = x if case[0] == "x" else w
    for rank in range(3):
        np.testing.assert_allclose(y[rank], x @ w, atol=1e-5)
        np.testing.assert_array_equal(whole[rank], wanted)


def unfused(x: jax.Array, w: jax.Array, *, gathered: str, dimension: str) -> Any:
    if gathered == "x":
        x = whole = lax.all_gather(x, "t", axis="mk".index(dimension), tiled=True)
    else:
        w = whole = lax.all_gather(w, "t", axis="kn".index(dimension), tiled=True)
    return x @ w, whole


def batch_of(
    fn: Any, case: Any, batches: tuple[int, int], *, check_vma: bool = True
) -> tuple[Any, Any]:
    """``fn`` in a ``shard_map`` under a ``vmap`` for every batch of ``x`` and ``w``; its loss."""
    gathered, dimension, x_spec, w_spec = case
    mesh = jax.make_mesh((2,), ("t",), (AxisType.Auto,), devices=jax.devices()[:2])
    one = functools.partial(fn, gathered=gathered, dimension=dimension)
    every = jax.shard_map(
        lambda x, w: [out[None] for out in one(x, w)],
        mesh=mesh,
        in_specs=(P(*x_spec[1:]), w_spec),
        out_specs=P("t"),
        check_vma=check_vma,
    )
    for level in range(max(batches), 0, -1):
        every = jax.vmap(every, tuple(0 if level <= count else None for count in batches))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        values = [v + jnp.arange(v.size).reshape(v.shape) for v in every(x, w)]
        return sum(jnp.sum(jnp.sin(v)) for v in values)

    return every, loss


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("batches", [(0, 1), (1, 0), (1, 2)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_batch_of_one_operand(case: Any, batches: tuple[int, int], check_vma: bool) -> None:
    """What a batch shares is kept once, and the cotangent of what is kept counts once."""
    shapes = zip(batches, ((8, 6), (6, 4)), strict=True)
    x, w = (jnp.asarray(RNG.standard_normal((3, 2)[:n] + s), jnp.float32) for n, s in shapes)
    keep = functools.partial(all_gather_matmul, axis_name="t", return_gathered=True)
    found, wanted = (
        jax.jit(lambda x, w, every=every, loss=loss: (every(x, w), jax.grad(loss, (0, 1))(x, w)))(
            x, w
        )
        for every, loss in (
            batch_of(fn, case, batches, check_vma=check_vma) for fn in (keep, unfused)
        )
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_batch_of_gradients() -> None:
    x, w = (jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((8, 6), (3, 6, 4)))
    keep = functools.partial(all_gather_matmul, axis_name="t", return_gathered=True)
    found, wanted = (
        jax.vmap(jax.grad(batch_of(fn, CASES[0], (0, 0))[1], (0, 1)), (None, 0))(x, w)
        for fn in (keep, unfused)
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_what_a_batch_shares_is_moved_once() -> None:
    """Neither the gather nor the exchange of its gradient has the batch in it."""
    keep = functools.partial(all_gather_matmul, axis_name="t", return_gathered=True)
    _, loss = batch_of(keep, CASES[0], (0, 1))
    text = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((8, 6)), jnp.ones((3, 6, 4))))
    moved = re.findall(r":f32\[([\d,]+)\]\S* = (all_gather|reduce_scatter)\[", text)
    assert moved == [("1,8,6", "all_gather"), ("1,4,6", "reduce_scatter")]


def test_nothing_in_it() -> None:
    mesh = cases.ranks_mesh(2)

    def body(x: jax.Array, w: jax.Array) -> Any:
        return all_gather_matmul(x, w, axis_name="t", return_gathered=True)

    fn = jax.shard_map(body, mesh=mesh, in_specs=(P("t"), P()), out_specs=P("t"))
    y, whole = jax.jit(fn)(jnp.ones((0, 6)), jnp.ones((6, 4)))
    assert (y.shape, whole.shape) == ((0, 4), (0, 6))


def test_a_backend_that_keeps_nothing() -> None:
    message = "all_gather: backend tma_dedicated does not give back what it gathered; use backend"
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        run(CASES[0], jnp.ones((2, 8, 6)), jnp.ones((6, 4)), backend="tma_dedicated")


def test_says_whether_to_keep_by_a_bool() -> None:
    with pytest.raises(InputError, match="return_gathered needs True or False, found 0"):
        all_gather_matmul(jnp.ones((8, 6)), jnp.ones((6, 4)), axis_name="t", return_gathered=0)
