"""Programs that NumPy computes as JAX does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend import core

from syncopate_jax.kernel.body_values import BY_NUMPY, Held, Machine, UntoldError

RNG = np.random.default_rng(5)
X, Y = RNG.uniform(0.5, 1.5, (2, 2, 3)).astype("f")
LEFT, RIGHT = RNG.integers(1, 9, (2, 2, 3), "i") * np.array([[[-1]], [[2]]], "i")


def elements(x: Any, y: Any, i: Any, j: Any) -> list[Any]:
    """Element by element."""
    unary = [jnp.negative, jnp.abs, jnp.sign, jnp.square, jnp.exp, jnp.exp2, jnp.expm1, jnp.log]
    unary += [jnp.log1p, jnp.sqrt, lax.rsqrt, jnp.tanh, jnp.sin, jnp.cos, lax.logistic]
    unary += [jnp.floor, jnp.ceil, jnp.isfinite, lambda z: z**3]
    binary = [lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min, lax.eq, lax.ne]
    binary += [lax.lt, lax.le, lax.gt, lax.ge]
    bits = [lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor]
    return [
        *(f(x - 1 if f in (jnp.abs, jnp.sign, jnp.floor) else x) for f in unary),
        *(f(x, y) for f in binary),
        *(f(i, j) for f in (*binary, *bits)),
        lax.pow(x, y),
        ~i,
        x**-2.0 + lax.integer_pow(x, -2),
        lax.clamp(jnp.float32(0.7), x, jnp.float32(1.2)),
        jnp.where(x > y, x, y),
        lax.select_n(i % 3, x, y, x + y),
        jnp.copy(x),
        lax.reduce_precision(x, 8, 23),
        jax.grad(lambda z: (z * z + jnp.sin(z)).sum())(x),
        x.astype(jnp.int32) + (y > 1),
    ]


def arrays(x: Any, y: Any, i: Any, j: Any) -> list[Any]:
    """What changes shapes, and what has programs of its own."""
    many = jnp.arange(24.0, dtype=jnp.float32).reshape(2, 3, 4)

    def turn(carry: Any, row: Any) -> tuple[Any, Any]:
        return carry * 0.5 + row, carry - row

    return [
        x[:, None, :] * many.transpose(0, 2, 1),
        jnp.concatenate([x, y], 1)[:, 1:6:2],
        lax.rev(x, (1,)),
        lax.broadcasted_iota(jnp.int32, (2, 3), 1) + i,
        jnp.squeeze(x[:1], 0),
        lax.dot_general(x, y, (((1,), (1,)), ((), ()))),
        jnp.einsum("bij,bi->bj", many, x),
        *(f(x, axis=1) for f in (jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.argmax, jnp.argmin)),
        (x > 1).all(0),
        (x > 1).any(0),
        lax.reduce_and(i, axes=(1,)),
        lax.reduce_or(i, axes=(1,)),
        lax.reshape(x, (x.shape[1], x.shape[0]), dimensions=(1, 0)),
        jnp.sort(x, axis=1),  # by JAX
        jnp.cumsum(x, axis=1),
        lax.erf(x),
        jax.nn.relu(x - 1),
        lax.cond(i[0, 0] < 0, lambda: x, lambda: y),
        lax.switch(j[0, 0], [lambda: x, lambda: y, lambda: x + y]),
        lax.scan(turn, x[:, 0], x.T),
        lax.scan(turn, x[:, 0], x.T, reverse=True),
        lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * y), (0, x)),
        lax.fori_loop(0, 3, lambda k, c: c + k * y, x),
    ]


@pytest.mark.parametrize("function", [elements, arrays])
def test_values(function: Callable[..., Any]) -> None:
    traced = jax.make_jaxpr(function)(X, Y, LEFT, RIGHT)
    found = Machine(1e9).run(
        traced.jaxpr, traced.consts, [X.astype("d"), Y.astype("d"), LEFT, RIGHT]
    )
    wanted = jax.tree.leaves(jax.jit(function)(X, Y, LEFT, RIGHT))
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert a.dtype == (np.float64 if b.dtype == np.float32 else b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_every_function_of_numpy_is_tried() -> None:
    names: set[str] = set()

    def read(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            names.add(eqn.primitive.name)
            for inner in core.jaxprs_in_params(eqn.params):
                read(inner)

    for function in (elements, arrays):
        read(jax.make_jaxpr(function)(X, Y, LEFT, RIGHT).jaxpr)
    assert sorted(set(BY_NUMPY) - names) == []


def run(body: Callable[..., None], left: float = 1e9) -> np.ndarray:
    """``body(x, y)`` on references to X and zeros; what is then in ``y``."""
    block = pltpu.VMEM(X.shape, jnp.float32)
    traced = jax.make_jaxpr(lambda: pl.run_scoped(body, block, block))()
    (eqn,) = traced.jaxpr.eqns
    inner = eqn.params["jaxpr"]
    x, y = Held(X.astype("d")), Held(np.zeros(X.shape))
    Machine(left).run(inner, [], [x, y])
    assert y.array is not None
    return y.array


def places(x: Any, y: Any) -> None:
    y[0, 1] = x[1, 2]
    y.at[pl.ds(1, 1)][0, pl.ds(pl.multiple_of(jnp.int32(1), 1), 2)] = x[0, 1:]
    y[:, 0] += x[:, 1]


def copies(x: Any, y: Any) -> None:
    pltpu.sync_copy(x.at[pl.ds(0, 1)], y.at[pl.ds(1, 1)])

    def part(kept: Any) -> None:
        kept[...] = x[...] * 2
        lax.fori_loop(0, 2, lambda k, _: y.__setitem__((0, k), kept[1, k]), None)

    pl.run_scoped(part, pltpu.VMEM(X.shape, jnp.float32))


def masks(x: Any, y: Any) -> None:
    pltpu.store(y, x[...], mask=x[...] > 1)


def test_references() -> None:
    wanted = np.zeros_like(X)
    wanted[0, 1], wanted[1, 1:] = X[1, 2], X[0, 1:]
    wanted[:, 0] += X[:, 1]
    np.testing.assert_allclose(run(places), wanted)
    np.testing.assert_allclose(run(copies), [[*(2 * X[1, :2]), 0], X[0]])
    np.testing.assert_allclose(run(masks), np.where(X > 1, X, 0))


def bits(x: Any, y: Any) -> None:
    y[...] = lax.bitcast_convert_type(x[...], jnp.int32).astype(jnp.float32)


def endless(x: Any, y: Any) -> None:
    y[...] = lax.while_loop(lambda z: z[0, 0] > 0, lambda z: z + 1, x[...])


def long(x: Any, y: Any) -> None:
    wide = jnp.broadcast_to(x[0, 0], (2000, 2000))
    y[...] = (wide @ wide)[:2, :3]


def picks(x: Any, y: Any) -> None:
    y[...] = x[1 - lax.iota(jnp.int32, 2)]


def noise(x: Any, y: Any) -> None:
    y[...] = x[...] + pltpu.prng_random_bits(X.shape).astype(jnp.float32)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (bits, "it uses bitcast_convert_type"),
        (endless, "it takes too much to compute"),
        (long, "it takes too much to compute on blocks of these sizes"),
        (picks, "it takes a reference at places that an array has"),
        (noise, "it uses prng_random_bits"),
    ],
)
def test_what_cannot_be_computed(body: Callable[..., None], why: str) -> None:
    with pytest.raises(UntoldError, match=why):
        run(body, left=1e7)
