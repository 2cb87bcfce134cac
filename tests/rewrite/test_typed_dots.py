"""``overlap`` under plain jit on explicit mesh axes: shardings in types say what to move."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from syncopate_jax.ops import explicit_axes
from syncopate_jax.rewrite.overlap import overlap
from tests.rewrite.compare import kinds, reasons

ROWS, COLUMNS = P(None, "t"), P(None, None, "t")


def mesh_of(ranks: int) -> jax.sharding.Mesh:
    devices = jax.devices()[:ranks]
    return jax.make_mesh((ranks,), ("t",), (AxisType.Explicit,), devices=devices)


def arrays(mesh: Any, *given: tuple[tuple[int, ...], P]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [
        jax.device_put(
            jnp.asarray(rng.standard_normal(shape) * 0.5, jnp.float32), NamedSharding(mesh, spec)
        )
        for shape, spec in given
    ]


def same(fn: Callable[..., Any], *args: jax.Array) -> Any:
    """Values, gradients and their shardings as without; the report."""
    new = overlap(fn, backend="xla")
    every = tuple(range(len(args)))

    def run(fn: Callable[..., Any]) -> Any:
        loss = lambda *a: jnp.sum(jnp.sin(1.3 * fn(*a)))  # noqa: E731
        return jax.jit(lambda *a: (fn(*a), jax.grad(loss, every)(*a)))(*args)

    for a, b in zip(jax.tree.leaves(run(new)), jax.tree.leaves(run(fn)), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_allclose(a, b, atol=2e-5)
    return new.report(*args)


def layer(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    """Tensor and sequence parallel, as it is written with types that say so."""
    h = jax.nn.gelu(jnp.einsum("bsh,hf->bsf", jax.reshard(x, P()), w1))
    return x + jnp.einsum("bsf,fh->bsh", h, w2, out_sharding=ROWS)


def layer_args(mesh: Any) -> list[jax.Array]:
    return arrays(mesh, ((2, 4, 8), ROWS), ((8, 12), P(None, "t")), ((12, 8), P("t")))


def test_tensor_parallel_layer() -> None:
    mesh = mesh_of(2)
    with jax.set_mesh(mesh):
        args = layer_args(mesh)
        report = same(layer, *args)
        text = jax.jit(overlap(layer, backend="xla")).lower(*args).compile().as_text()
    assert kinds(report) == ["all_gather", "reduce_scatter"]
    assert [item.collective for item in report.replaced] == ["reshard", "dot_general"]
    assert report.left == ()
    found = re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", text)
    assert sorted(found) == ["all-gather", "reduce-scatter"]


def gated(x: jax.Array, w: jax.Array, up: jax.Array) -> jax.Array:
    """A ``reshard`` that could go with the dot before it or with the one after, then a gate."""
    h = jax.reshard(jnp.einsum("mk,kn->mn", x, w, out_sharding=P()), ROWS)
    h = jnp.tanh(jnp.einsum("mk,kn->mn", h, w, out_sharding=P()))
    return jax.nn.silu(jnp.einsum("mk,kn->mn", h, up)) * jnp.einsum("mk,kn->mn", h, up)


def gated_args(mesh: Any) -> list[jax.Array]:
    return arrays(mesh, ((4, 8), ROWS), ((8, 8), P("t")), ((8, 8), ROWS))


def test_a_reshard_between_dots_goes_with_one_of_them() -> None:
    mesh = mesh_of(2)
    with jax.set_mesh(mesh):
        report = same(gated, *gated_args(mesh))
    assert kinds(report) == ["reduce_scatter", "all_reduce"]
    assert [item.collective for item in report.replaced] == ["dot_general", "dot_general"]
    assert report.left == ()


def test_layers_are_traced_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, product, calls = mesh_of(2), explicit_axes.product, 0

    def counted(*args: Any) -> jax.Array:
        nonlocal calls
        calls += 1
        assert calls < 100
        return product(*args)

    def traced(layers: int, *args: jax.Array) -> tuple[int, int]:
        """Products made of a value and of a value with its gradients."""

        def loss(x: jax.Array, w: jax.Array, up: jax.Array) -> jax.Array:
            for _ in range(layers):
                x = gated(x, w, up)
            return jnp.sum(jnp.sin(x))

        nonlocal calls
        found = []
        for fn in overlap(loss), jax.grad(overlap(loss), (0, 1, 2)):
            calls = 0
            jax.make_jaxpr(fn)(*args)
            found.append(calls)
        return found[0], found[1]

    monkeypatch.setattr(explicit_axes, "product", counted)
    with jax.set_mesh(mesh):
        args = gated_args(mesh)
        # Two products a layer, each with a gradient for either operand.
        assert traced(1, *args) == (2, 6)
        assert traced(8, *args) == (16, 48)


def test_a_fused_backend_is_asked_first() -> None:
    mesh = mesh_of(2)
    with jax.set_mesh(mesh):
        args = layer_args(mesh)
        taken = overlap(layer, backend="remote_dma").report(*args)
        refused = overlap(layer, backend="remote_dma", target="mosaic_gpu").report(*args)
    assert kinds(taken) == ["all_gather", "reduce_scatter"]
    refusals = [r.startswith("backend remote_dma does not take it") for r in reasons(refused)]
    assert refusals == [True, True, False]  # the last is the reshard of what the first would take


def test_in_scan_and_remat() -> None:
    mesh = mesh_of(2)

    def layers(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        step = jax.checkpoint(lambda x, w: (layer(x, *w), None))
        return lax.scan(step, x, (w1, w2))[0]

    with jax.set_mesh(mesh):
        args = arrays(
            mesh, ((2, 4, 8), ROWS), ((2, 8, 12), P(None, None, "t")), ((2, 12, 8), P(None, "t"))
        )
        report = same(layers, *args)
    assert kinds(report) == ["all_gather", "reduce_scatter"]


def test_what_needs_nothing_is_not_looked_at() -> None:
    mesh = mesh_of(2)
    with jax.set_mesh(mesh):
        x, w = arrays(mesh, ((4, 8), P("t")), ((8, 6), P()))
        report = same(lambda x, w: x @ w, x, w)
    assert (report.replaced, report.left) == ((), ())


def test_what_is_left_says_why() -> None:
    mesh = mesh_of(2)

    def twice(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = jax.reshard(x, P())
        return jnp.dot(whole, w) + whole[:, :6]

    def whole_result(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x, w, out_sharding=P())

    with jax.set_mesh(mesh):
        x, w = arrays(mesh, ((4, 8), P("t")), ((8, 6), P()))
        (resharded,) = overlap(twice).report(x, w).left
        assert resharded.collective == "reshard"
        assert resharded.reason == (
            "its result must be read by one dot alone, but it is used 2 times: dot_general, slice"
        )
        alone = overlap(lambda x, w: jax.reshard(jax.reshard(x, P()), P("t")) + w.sum())
        assert reasons(alone.report(x, w)) == [
            "its result is not read by a dot that takes it over; it is used once: reshard"
        ]
        np.testing.assert_allclose(jax.jit(overlap(twice))(x, w), twice(x, w), atol=1e-5)
        report = overlap(whole_result).report(x, w)
        summed = overlap(lambda x, w: jnp.dot(x, w, out_sharding=P(), precision="highest"))
        narrow = arrays(mesh, ((4, 8), P(None, "t")), ((8, 6), P("t")))
        assert reasons(summed.report(*narrow))[0].startswith("its dot asks for precision")
    assert reasons(report) == ["nothing overlaps what it needs: dot; all_gather out m over t"]


@pytest.mark.parametrize("formula", ["bmk,bkn->bmn", "mk,nk->nm", "bmck,kcn->bmn", "k,kn->n"])
def test_products_of_many_shapes(formula: str) -> None:
    """The contracted letter is sharded, so that partial results are summed."""
    mesh = mesh_of(2)
    sizes = {"b": 4, "m": 6, "k": 8, "n": 10, "c": 2}
    operands, out = formula.split("->")
    given = [
        (tuple(sizes[x] for x in own), P(*("t" if x == "k" else None for x in own)))
        for own in operands.split(",")
    ]
    with jax.set_mesh(mesh):
        args = arrays(mesh, *given)
        report = same(lambda x, w: jnp.einsum(formula, x, w, out_sharding=P()), *args)
        scattered = P(*("t" if x == "n" else None for x in out))
        again = same(lambda x, w: jnp.einsum(formula, x, w, out_sharding=scattered), *args)
    assert kinds(report) == ["all_reduce"]
    assert kinds(again) == ["reduce_scatter"]


def test_gradient_is_overlapped() -> None:
    """The backward pass has dots whose types imply the mirrored collectives."""
    mesh = mesh_of(2)
    loss = lambda *a: jnp.sum(jnp.sin(layer(*a)))  # noqa: E731
    with jax.set_mesh(mesh):
        args = layer_args(mesh)
        gradient = jax.grad(loss, (0, 1, 2))
        new = overlap(gradient, backend="xla")
        report = new.report(*args)
        for a, b in zip(jax.jit(new)(*args), jax.jit(gradient)(*args), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
    # The dot whose cotangent is whole and resharded behind it scatters its sum at once.
    assert kinds(report) == ["reduce_scatter", "all_gather", "all_gather", "reduce_scatter"]
    assert [(item.collective, "is used 2 times" in item.reason) for item in report.left] == [
        ("reshard", True)
    ]


def test_auto_axes_are_left() -> None:
    """Under plain jit on auto axes the partitioner puts collectives in later."""
    mesh = jax.make_mesh((2,), ("t",), (AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = NamedSharding(mesh, P("t")), NamedSharding(mesh, P())
    x, w = arrays(mesh, ((4, 8), P("t")), ((8, 6), P()))

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, whole) @ w

    new = overlap(jax.jit(fn, out_shardings=rows))
    report = new.report(x, w)
    (reason,) = reasons(report)
    assert (report.replaced, report.asked) == ((), ())
    assert reason.startswith("its mesh axes are auto ones; overlap(…, auto_axes=True)")
    assert new(x, w).sharding.is_equivalent_to(rows, 2)
