"""Elementwise functions between a collective and a dot: moved if one value goes in and one out."""

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
from tests.rewrite.compare import mesh_of, reasons, same

Function = Callable[[jax.Array], jax.Array]
RNG = np.random.default_rng(5)
X = jnp.asarray(RNG.standard_normal((4, 6)), jnp.float32)
W = jnp.asarray(RNG.standard_normal((6, 4)), jnp.float32)
FUNCTIONS = {
    "gelu": jax.nn.gelu,
    "gelu exact": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
    "leaky relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "where": lambda x: jnp.where(x > 0, x, jnp.sin(x) * x),
}


@jax.custom_jvp
def own_rule(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


own_rule.defjvp(lambda given, dots: (own_rule(*given), 3 * dots[0] * given[0]))


def gathered(function: Function) -> Callable[..., Any]:
    return lambda x, w: function(lax.all_gather(x, "t", tiled=True)) @ w


def exchanged_before(function: Function) -> Callable[..., Any]:
    return lambda x, w: function(lax.all_to_all(x, "t", 1, 0, tiled=True)) @ w[:3]


def rows_for_columns(function: Function) -> Callable[..., Any]:
    return lambda x, w: function(lax.all_to_all(function(x @ w[:, :2]), "t", 1, 0, tiled=True))


def mapped(body: Callable[..., Any], check_vma: bool = True) -> Any:
    specs = {"in_specs": (P("t"), P()), "out_specs": P("t")}
    return jax.shard_map(body, mesh=mesh_of(2), check_vma=check_vma, **specs)


def together(functions: Any, **options: bool) -> Any:
    """All functions at all places in one program."""
    places = (gathered, exchanged_before, rows_for_columns)
    bodies = [place(function) for function in functions for place in places]
    return mapped(lambda x, w: [body(x, w) for body in bodies], **options), len(bodies)


@pytest.mark.parametrize("check_vma", [True, False])
def test_values_and_gradients_are_kept(check_vma: bool) -> None:
    functions = FUNCTIONS | {"own rule": own_rule}
    if check_vma:  # JAX 0.12.0.1 does not take erfc there, with or without overlap
        functions.pop("gelu exact")
    fn, count = together(functions.values(), check_vma=check_vma)
    report = same(fn, X, W)
    assert len(report.replaced) == count and reasons(report) == []


def test_a_bias_that_is_the_same_on_every_rank() -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return gathered(lambda y: y * (y + w[:, 0]))(x, w)

    assert len(same(mapped(body), X, W).replaced) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda y, w: jnp.where(w[None, :, 0] > 0, y, 0.0),
        lambda y, w: jax.jit(lambda y, row: y * row + 1.0)(y, w[:, 0]),
        lambda y, w: jax.jit(lambda y: (y * 2, jnp.sin(y)))(y)[1],
        lambda y, w: jax.jit(lambda y: jnp.tanh(y).T)(y).T,
    ],
    ids=["mask", "row", "two results", "transposed"],
)
def test_calls_of_several_shapes_are_seen_through(function: Callable[..., Any]) -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return gathered(lambda y: function(y, w))(x, w)

    report = same(mapped(body), X, W)
    assert len(report.replaced) == 1 and reasons(report) == []
    whole = overlap(jax.grad(lambda x, w: jnp.sum(mapped(body)(x, w) ** 2))).report(X, W)
    assert not any("goes into" in reason for reason in reasons(whole))


def test_a_mask_that_differs_along_what_is_moved() -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return gathered(lambda y: jnp.where(w[:4, :1] > 0, y, 0.0))(x, w)

    wanted = "select_n stands between, whose other operand differs along the moved dimension"
    report = same(mapped(body), X, W)
    assert (report.replaced, reasons(report)) == ((), [wanted])
    whole = overlap(jax.grad(lambda x, w: jnp.sum(mapped(body)(x, w) ** 2))).report(X, W)
    assert reasons(whole)[0] == wanted


def test_a_call_with_several_results_that_is_not_elementwise() -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jax.jit(lambda y: (jnp.cumsum(y, 0), y.sum()))(lax.all_gather(x, "t", tiled=True))
        return y[0] @ w

    report = same(mapped(body), X, W)
    assert reasons(report) == ["its result goes into jit, which has 2 results"]


def test_second_derivatives_follow_the_rule_too() -> None:
    fn, _ = together([own_rule])

    def second(fn: Any) -> Any:
        slope = jax.grad(lambda x: sum(jnp.sum(y**2) for y in fn(x, W)))
        return jax.jit(jax.grad(lambda x: jnp.sum(slope(x) ** 2)))(X)

    np.testing.assert_allclose(second(overlap(fn)), second(fn), rtol=1e-4, atol=1e-4)


def test_within_another_shard_map() -> None:
    def inner(x: jax.Array, w: jax.Array) -> Any:
        body = gathered(jax.nn.relu)
        specs = {"in_specs": (P("t"), P()), "out_specs": P("t")}
        return jax.shard_map(body, axis_names={"t"}, **specs)(x, w)

    fn = jax.shard_map(
        inner, mesh=mesh_of(2, 2), in_specs=(P("u"), P()), out_specs=P("u"), axis_names={"u"}
    )
    new, x = overlap(fn), jnp.concatenate([X, X])
    assert len(new.report(x, W).replaced) == 1
    np.testing.assert_allclose(jax.jit(new)(x, W), jax.jit(fn)(x, W), rtol=1e-5, atol=1e-5)


def closes_over(x: jax.Array) -> jax.Array:
    """Its rule multiplies by an array of the original shape."""
    weights = np.arange(24, dtype=np.float32).reshape(4, 6)
    function = jax.custom_jvp(lambda x: x)
    function.defjvp(lambda given, dots: (given[0], dots[0] * weights))
    return function(x)


@jax.custom_jvp
def sums_in_its_rule(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


sums_in_its_rule.defjvp(lambda given, dots: (jnp.tanh(given[0]), dots[0] * given[0].sum()))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (closes_over, "custom_jvp_call of <lambda> stands between and is not elementwise"),
        (sums_in_its_rule, "custom_jvp_call of sums_in_its_rule stands between and is not"),
        (lambda x: x * x.sum(), "it is used 2 times: "),
        (lambda x: x * jnp.arange(24.0).reshape(4, 6), "mul stands between, whose other operand"),
        (jax.nn.softmax, "it is used 2 times: reduce_max, sub"),
    ],
)
def test_what_is_not_elementwise_is_left(function: Function, reason: str) -> None:
    report = same(mapped(gathered(function)), X, W)
    assert report.replaced == ()
    assert reason in reasons(report)[0]


def test_what_comes_from_two_dots_is_left() -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return lax.all_to_all(jax.nn.silu(y[:, :2]) * jnp.tanh(x @ w[:, 2:]), "t", 1, 0, tiled=True)

    report = same(mapped(body), X, W)
    assert report.replaced == ()
    assert "whose other operand differs along the moved dimension" in reasons(report)[0]


def test_what_comes_from_no_dot_is_left() -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        made = jnp.sin(jnp.full((2, 4), 2.0))
        return lax.all_to_all(made, "t", 1, 0, tiled=True) + x[0, 0]

    report = overlap(mapped(body, check_vma=False)).report(X, W[:, :2])
    assert reasons(report)[0].startswith("after a dot: what it moves is made by sin, not by a dot")
