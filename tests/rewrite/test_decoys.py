"""What ``overlap`` must leave alone, each with its reason, and what lies just beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from syncopate_jax.errors import InputError
from syncopate_jax.ops import matmul_reduce_scatter
from syncopate_jax.rewrite.overlap import overlap
from tests.rewrite.compare import kinds, mesh_of, reasons, same


def gather(x: jax.Array, axis: int = 0, **options: Any) -> jax.Array:
    return lax.all_gather(x, "t", axis=axis, tiled=True, **options)


def scatter(x: jax.Array, axis: int = 0, **options: Any) -> jax.Array:
    return lax.psum_scatter(x, "t", scatter_dimension=axis, tiled=True, **options)


def used_twice(x: jax.Array, w: jax.Array) -> jax.Array:
    """The dot reads what cannot be got back from: the other reader would need a second gather."""
    h = gather(x)
    return jnp.tanh(h) @ w + h[:, :4]


def needed_by_the_weight(x: jax.Array, w: jax.Array) -> jax.Array:
    """What is multiplied with the gathered rows is made of them."""
    h = gather(x)
    return h @ jnp.sin(h[:, :4])


def many_readers_behind(x: jax.Array, w: jax.Array) -> jax.Array:
    h = gather(x)
    turned = h.T
    return turned @ jnp.ones((8, 4)) + turned[:, :4] + h[:, :4]


def dot_used_twice(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x.T @ x
    return scatter(y) + y[:4]


def groups(x: jax.Array, w: jax.Array) -> jax.Array:
    return gather(x, axis_index_groups=[[0], [1]]) @ w


def data_dependent(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.cumsum(gather(x), axis=0) @ w


def sliced(x: jax.Array, w: jax.Array) -> jax.Array:
    return gather(x)[2:6] @ w


def residual(x: jax.Array, w: jax.Array) -> jax.Array:
    full = jnp.sin(jnp.arange(64.0).reshape(8, 8))
    return (gather(x) + full) @ w


def rank_bias(x: jax.Array, w: jax.Array) -> jax.Array:
    return (gather(x) + x[0]) @ w


def bias_before_sum(x: jax.Array, w: jax.Array) -> jax.Array:
    return scatter(x.T @ x + 1.0)


def activation_before_sum(x: jax.Array, w: jax.Array) -> jax.Array:
    return scatter(jnp.tanh(x.T @ x))


def relu_before_sum(x: jax.Array, w: jax.Array) -> jax.Array:
    return scatter(jax.nn.relu(x.T @ x))


def squared_before_sum(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x.T @ x
    return scatter(y * y)


def inverted_before_sum(x: jax.Array, w: jax.Array) -> jax.Array:
    return scatter(1.0 / (x.T @ x))


def rank_factor(x: jax.Array, w: jax.Array) -> jax.Array:
    return scatter((x.T @ x) * x[0, 0])


def row_factor(x: jax.Array, w: jax.Array) -> jax.Array:
    return scatter((x.T @ x) * jnp.arange(8.0)[:, None])


def half_factor(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x.T.astype(jnp.float16) @ x.astype(jnp.float16)
    return scatter(y / 4).astype(jnp.float32)


def mean_of_a_loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * lax.pmean(jnp.log(jnp.mean(x**2)), "t")


def before_an_operator(x: jax.Array, w: jax.Array) -> jax.Array:
    return matmul_reduce_scatter(gather(x.T), x, axis_name="t")


def widening_after_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x.T.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)
    return scatter(y.astype(jnp.float32))


def widening_before_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return gather(x.astype(jnp.bfloat16)).astype(jnp.float32) @ w


def integers(x: jax.Array, w: jax.Array) -> jax.Array:
    return (gather(x.astype(jnp.int32)) @ w.astype(jnp.int32)).astype(jnp.float32) + x[0, 0]


def precise(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(gather(x), w, precision="highest")


def no_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return gather(x) * 2.0


def both_operands(x: jax.Array, w: jax.Array) -> jax.Array:
    h = gather(x)
    return h @ h.T


def permuted(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.ppermute(x, "t", [(0, 1), (1, 0)]) @ w


def largest(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.pmax(lax.stop_gradient(x @ w), "t") + x[0, 0]


def own_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
    @jax.custom_jvp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return gather(x) @ w

    product.defjvp(lambda given, dots: (product(*given), 2 * product(dots[0], given[1])))
    return product(x, w)


NO_DOT = "no dot that reads its result can be one operator with it; it is used"
DECOYS: dict[Callable[..., Any], str] = {
    used_twice: f"{NO_DOT} 2 times: tanh, slice",
    needed_by_the_weight: f"{NO_DOT} 2 times: slice, dot_general: the dot's other operand is "
    "made of the result too",
    many_readers_behind: f"{NO_DOT} 2 times: transpose, slice: what transpose makes of it has "
    "several readers; it is used 2 times: dot_general, slice",
    dot_used_twice: "the dot's result must go into it alone, but it is used 2 times",
    groups: "it runs in groups of ranks (axis_index_groups), which no operator does",
    data_dependent: "jit of cumsum stands between and is not elementwise",
    sliced: "slice stands between, which does not commute with it",
    residual: "add stands between, whose other operand differs along the moved dimension",
    rank_bias: "add stands between, whose other operand is not known to be the same on every rank",
    bias_before_sum: "add stands between, which does not commute with a sum",
    activation_before_sum: "tanh stands between, which does not commute with a sum",
    relu_before_sum: "relu stands between, which does not commute with a sum",
    squared_before_sum: "mul stands between, which does not commute with a sum",
    inverted_before_sum: "div stands between, which does not commute with a sum",
    rank_factor: "mul stands between, whose other operand is not known to be the same on every",
    row_factor: "mul stands between, whose other operand differs along the moved dimension",
    half_factor: "div stands between, without which the sum may overflow in float16",
    mean_of_a_loss: "what it moves is made by reduce_sum, not by a dot",
    before_an_operator: "an operator of this package stands between, which does not commute",
    widening_after_dot: "a cast from bfloat16 to float32 stands between, which does not commute",
    widening_before_dot: "a cast from bfloat16 to float32 stands between, which does not commute",
    integers: "no operator multiplies int32 by int32 into int32",
    precise: "its dot asks for precision",
    no_dot: f"{NO_DOT} once: the result of the function",
    both_operands: f"{NO_DOT} 2 times: transpose, dot_general: the dot's other operand is "
    "made of the result too",
    permuted: "it is no part of a ring that gathers or sums one product",
    largest: "no operator does a pmax",
    own_gradient: "it is inside a custom_jvp_call, whose gradient is a rule of its own",
}


def run_of(body: Callable[..., Any], check_vma: bool = True) -> Callable[..., Any]:
    return jax.shard_map(
        body,
        mesh=mesh_of(2),
        in_specs=(P("t"), P()),
        out_specs=P("t"),
        check_vma=check_vma,
    )


X = jnp.asarray(np.random.default_rng(3).standard_normal((8, 8)), jnp.float32)
W = jnp.asarray(np.random.default_rng(4).standard_normal((8, 4)), jnp.float32)


@pytest.mark.parametrize("body", DECOYS, ids=lambda body: body.__name__)
def test_decoy_is_left(body: Callable[..., Any]) -> None:
    report = overlap(run_of(body, body is not groups)).report(X, W)
    reason = reasons(report)[0]
    assert len(report.left) == 1 + (body is before_an_operator)
    assert report.replaced == ()
    assert reason.startswith(DECOYS[body])
    assert re.search(
        rf"test_decoys\.py:\d+ \((gather|scatter|{body.__name__})", report.left[0].source
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_factor_that_all_ranks_share_follows_the_sum(check_vma: bool) -> None:
    """Not a bias, which would be added once a rank; an array is known to be shared if tracked."""

    def body(x: jax.Array, w: jax.Array) -> Any:
        scaled = scatter(3 * (x.T @ x)), scatter(-(x.T @ x) / 7)
        return *scaled, lax.psum((x.T @ x) * w[:, 0], "t")

    fn = jax.shard_map(
        body,
        mesh=mesh_of(2),
        in_specs=(P("t"), P()),
        out_specs=(P("t"), P("t"), P()),
        check_vma=check_vma,
    )
    report = same(fn, X, W.repeat(2, axis=1))
    assert kinds(report) == ["reduce_scatter", "reduce_scatter", *["all_reduce"] * check_vma]
    assert all("is not known to be the same on every rank" in why for why in reasons(report))


def test_an_operator_is_where_it_is_called() -> None:
    report = overlap(run_of(before_an_operator)).report(X, W)
    inside = report.left[1]
    assert inside.reason == "it is inside an operator of this package"
    assert re.search(r"test_decoys\.py:\d+ \(before_an_operator\)", inside.source)


def test_values_are_kept_where_some_are_left() -> None:
    """A fused pair beside a decoy."""

    def body(x: jax.Array, w: jax.Array) -> Any:
        return used_twice(-x, w), scatter(gather(x) @ w), lax.psum(x[:4].T @ x[:4], "t")

    fn = jax.shard_map(
        body, mesh=mesh_of(2), in_specs=(P("t"), P()), out_specs=(P("t"), P("t"), P())
    )
    report = same(fn, X, W)
    assert kinds(report) == ["all_gather", "all_reduce"]
    taken = "is already one operator with another"
    assert [NO_DOT in reasons(report)[0], taken in reasons(report)[1]] == [True, True]
    assert str(report).startswith("replaced 2, left 2\n  replaced: all_gather over t at ")
    assert "all_reduce of out in mk,kn->mn" in str(report)


def test_wrong_axis() -> None:
    """A sum over an axis along which no operand is sharded is no part of the product."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum(x @ w, "u")

    fn = jax.shard_map(body, mesh=mesh_of(2, 2), in_specs=(P("t"), P()), out_specs=P("t"))
    report = same(fn, X, W)
    assert report.replaced == ()
    assert reasons(report) == [
        "what it moves is the same on every rank of u, so it is no part of a sharded product"
    ]


def test_wrong_dimension() -> None:
    """Three ranks' blocks of two rows, read as two groups of three rows, belong to no rank."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        h = gather(x).reshape(2, 3, 4)
        return jnp.einsum("abk,kn->ban", h, w)

    fn = jax.shard_map(body, mesh=mesh_of(3), in_specs=(P("t"), P()), out_specs=P("t"))
    report = same(fn, X.reshape(-1)[:24].reshape(6, 4), W[:4])
    assert reasons(report) == [
        "the moved dimension does not survive the reshape from (6, 4) to (2, 3, 4) as a whole "
        "block a rank"
    ]


def test_one_rank() -> None:
    fn = jax.shard_map(
        lambda x, w: gather(x) @ w, mesh=mesh_of(1), in_specs=(P("t"), P()), out_specs=P("t")
    )
    assert reasons(overlap(fn).report(X, W)) == ["there is a single rank along t"]


def test_bias_is_not_known_to_be_the_same_without_tracking() -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return (gather(x) + w[0, 0]) @ w

    assert kinds(same(run_of(body), X, W)) == ["all_gather"]
    (reason,) = reasons(same(run_of(body, check_vma=False), X, W))
    assert "is not known to be the same on every rank of t" in reason


def test_a_fused_backend_needs_every_axis_to_be_manual() -> None:
    fn = jax.shard_map(
        lambda x, w: gather(x) @ w,
        mesh=mesh_of(2, 2),
        in_specs=(P("t"), P()),
        out_specs=P("t"),
        axis_names={"t"},
    )
    assert kinds(overlap(fn).report(X, W)) == ["all_gather"]
    assert reasons(overlap(fn, backend="remote_dma").report(X, W)) == [
        "a fused launch spans all devices, and shard_map left u to the compiler"
    ]


def test_what_a_fused_backend_does_not_take() -> None:
    """It says so when the program is read, not when it runs."""
    fn = run_of(lambda x, w: gather(x) @ w)
    report = overlap(fn, backend="remote_dma", target="mosaic_gpu").report(X, W)
    assert reasons(report)[0].startswith("backend remote_dma does not take it: ")
    with jax.enable_x64(True):
        wide = overlap(fn, backend="remote_dma").report(X.astype("float64"), W.astype("float64"))
    assert "would lose half of float64's digits" in reasons(wide)[0]


def test_outside_shard_map_nothing_is_looked_at() -> None:
    report = same(lambda x, w: jnp.tanh(x @ w), X, W)
    assert (report.replaced, report.left) == ((), ())


def test_arrays_of_one_sum_are_looked_at_one_by_one() -> None:
    fn = run_of(lambda x, w: sum(lax.psum((x @ w, x[:, :4]), "t")), check_vma=False)
    report = same(fn, X, W)
    assert kinds(report) == ["all_reduce"]
    assert reasons(report) == ["what it moves is made by slice, not by a dot"]


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="overlap: fn must be a function, found int"):
        overlap(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="overlap: auto_axes must be True or False, found 't'"):
        overlap(jnp.sin, auto_axes="t")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no backend is called 'tin'"):
        overlap(jnp.sin, backend="tin")
