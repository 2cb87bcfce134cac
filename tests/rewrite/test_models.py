"""``overlap`` on model code it was not written for: same values and gradients, pairs found."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from syncopate_jax.rewrite.overlap import overlap
from tests.rewrite import models
from tests.rewrite.compare import kinds, loss_of, mesh_of, reasons, same, same_gradient

GATHER, SCATTER = "all_gather", "reduce_scatter"


def mapped(
    body: Callable[..., jax.Array], specs: Any, ranks: int, check_vma: bool = True
) -> Callable[..., jax.Array]:
    return jax.shard_map(
        body,
        mesh=mesh_of(ranks),
        in_specs=(specs, P("t")),
        out_specs=P("t"),
        check_vma=check_vma,
    )


def tokens(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_megatron_block(check_vma: bool) -> None:
    fn = mapped(models.megatron_block, models.MEGATRON, 2, check_vma)
    report = same(fn, models.megatron_params(8, 4, 12), tokens(6, 2, 8))
    assert kinds(report) == [GATHER, SCATTER] * 2
    assert report.left == ()
    assert "models.py" in report.replaced[0].source


MODELS = {
    "megatron": (models.megatron_block, models.MEGATRON, models.megatron_params(8, 4, 12), (6, 2)),
    "fsdp": (models.fsdp_mlp, models.FSDP, models.fsdp_params(8, 12), (4,)),
    "ulysses": (models.ulysses_attention, models.ULYSSES, models.ulysses_params(8, 4), (6, 2)),
}
BOTH_WAYS = {
    "megatron": [GATHER, SCATTER] * 4,
    "fsdp": [GATHER, GATHER, SCATTER, SCATTER],
    "ulysses": ["all_to_all", "all_to_all", "all_reduce", "all_to_all", "all_to_all", "all_reduce"],
}


@pytest.mark.parametrize(
    "model", ["fsdp", *(pytest.param(m, marks=pytest.mark.slow) for m in ("megatron", "ulysses"))]
)
def test_gradient_is_overlapped(model: str) -> None:
    """Of the gradient's collectives all are replaced but sums of what no dot made: biases, norms.

    The gather that the backward pass reads again, and the gather of a cotangent that two dots
    read, are kept by the operator.
    """
    body, specs, params, shape = MODELS[model]
    fn = mapped(body, specs, 2)
    report = same_gradient(fn, params, tokens(*shape, 8))
    assert kinds(report) == BOTH_WAYS[model]
    assert set(reasons(report)) == {"what it moves is made by reduce_sum, not by a dot"}


@pytest.mark.slow
def test_megatron_block_fused() -> None:
    """Every pair is one that the fused kernels can do as well."""
    fn = mapped(models.megatron_mlp, models.MEGATRON, 2)
    report = same(fn, models.megatron_params(8, 4, 12), tokens(4, 2, 8), backend="remote_dma")
    assert kinds(report) == [GATHER, SCATTER]


def test_fsdp_mlp() -> None:
    fn = mapped(models.fsdp_mlp, models.FSDP, 4)
    report = same(fn, models.fsdp_params(8, 12), tokens(4, 8))
    assert kinds(report) == ["all_gather"] * 2
    assert report.left == ()


def test_fsdp_mlp_gathers_the_narrow_type() -> None:
    body = functools.partial(models.fsdp_mlp, dtype=jnp.bfloat16)
    report = same(
        mapped(body, models.FSDP, 2), models.fsdp_params(8, 12), tokens(4, 8), tolerance=2e-2
    )
    assert kinds(report) == ["all_gather"] * 2


@pytest.mark.slow
def test_ulysses_attention() -> None:
    fn = mapped(models.ulysses_attention, models.ULYSSES, 2)
    report = same(fn, models.ulysses_params(8, 4), tokens(6, 2, 8))
    assert kinds(report) == ["all_to_all", "all_to_all"]
    assert report.left == ()


@pytest.mark.slow
def test_ring_attention() -> None:
    """The ring stays; the gathered weights around it are fused."""
    fn = mapped(models.ring_attention, models.RING, 2)
    report = same(fn, models.ulysses_params(8, 4), tokens(6, 2, 8), tolerance=1e-4)
    assert kinds(report) == [GATHER, GATHER]
    assert len(report.left) == 2
    for reason in reasons(report):
        assert (
            "no part of a ring that gathers or sums one product: what went around t goes" in reason
        )
        assert "into div, at " in reason


@pytest.mark.parametrize("check_vma", [True, False])
def test_body_of_a_shard_map(check_vma: bool) -> None:
    """Applied inside: the arrays are one rank's already."""
    params, x = models.megatron_params(8, 4, 12), tokens(4, 2, 8)
    body = overlap(models.megatron_mlp, backend="xla")
    fn, new = (mapped(body, models.MEGATRON, 2, check_vma) for body in (models.megatron_mlp, body))
    reports = []
    jax.eval_shape(
        mapped(lambda p, x: reports.append(body.report(p, x)) or x, models.MEGATRON, 2), params, x
    )
    assert kinds(reports[0]) == [GATHER, SCATTER]
    found, wanted = (jax.jit(jax.grad(loss_of(f)))(params, x) for f in (new, fn))
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=2e-4)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.slow
def test_scan_over_layers(remat: bool) -> None:
    each = [models.megatron_params(8, 4, 12, seed) for seed in range(2)]
    params = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
    specs = jax.tree.map(lambda s: P(None, *s), models.MEGATRON, is_leaf=lambda s: isinstance(s, P))
    fn = mapped(functools.partial(models.layers, remat=remat), specs, 2)
    report = same(fn, params, tokens(4, 2, 8))
    assert kinds(report) == [GATHER, SCATTER] * 2


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_gradient_of_a_scan_over_layers(remat: bool) -> None:
    """Under remat the backward pass also computes the first three pairs again."""
    each = [models.megatron_params(8, 4, 12, seed) for seed in range(2)]
    params = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
    specs = jax.tree.map(lambda s: P(None, *s), models.MEGATRON, is_leaf=lambda s: isinstance(s, P))
    fn = mapped(functools.partial(models.layers, remat=remat), specs, 2)
    report = same_gradient(fn, params, tokens(4, 2, 8))
    again = [GATHER, SCATTER, GATHER] if remat else []
    assert kinds(report) == [GATHER, SCATTER] * 2 + again + [GATHER, SCATTER] * 2
    assert set(reasons(report)) == {"what it moves is made by reduce_sum, not by a dot"}


def test_data_and_tensor_parallel_in_nested_jit() -> None:
    """Two mesh axes, a jit inside the body and a jit around it, keyword arguments and a dict."""

    @jax.jit
    def product(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(h @ w)

    def body(x: jax.Array, w: jax.Array) -> dict[str, jax.Array]:
        h = lax.all_gather(x, "u", axis=1, tiled=True)
        return {"h": product(h, w), "sum": lax.psum(jnp.sum(x), ("t", "u"))}

    fn = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh_of(2, 2),
            in_specs=(P("t", "u"), P(None, "u")),
            out_specs={"h": P("t", None, "u"), "sum": P()},
        )
    )
    report = same(fn, tokens(4, 6, 8), tokens(8, 4))
    assert kinds(report) == [GATHER]
    assert report.replaced[0].axis_names == ("u",)
    (reason,) = reasons(report)
    assert reason == "what it moves is made by reduce_sum, not by a dot"


def test_cond_and_while() -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        def double(x: jax.Array) -> jax.Array:
            return lax.psum_scatter(x @ w, "t", scatter_dimension=0, tiled=True)

        def once(x: jax.Array) -> jax.Array:
            return lax.all_gather(x, "t", axis=1, tiled=True)[: x.shape[0] // 2]

        y = lax.cond(jnp.sum(w) > 1e9, once, double, x)
        return lax.fori_loop(0, 2, lambda _, y: y + lax.psum(y[:, :3] @ w, "t"), y)

    fn = jax.shard_map(
        body, mesh=mesh_of(2), in_specs=(P(None, "t"), P("t")), out_specs=P("t"), check_vma=False
    )
    report = same(fn, tokens(4, 6), tokens(6, 6)[:, :6])
    assert sorted(kinds(report)) == ["all_reduce", SCATTER]


@pytest.mark.skipif(importlib.util.find_spec("equinox") is None, reason="equinox is not installed")
def test_equinox_module() -> None:
    import equinox as eqx

    class Mlp(eqx.Module):
        up: jax.Array
        down: jax.Array
        act: Callable[[jax.Array], jax.Array]

        def __call__(self, x: jax.Array) -> jax.Array:
            def body(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
                h = self.act(lax.all_gather(x, "t", tiled=True) @ up)
                return lax.psum_scatter(h @ down, "t", tiled=True)

            specs = (P(None, "t"), P("t"), P("t"))
            run = jax.shard_map(body, mesh=mesh_of(2), in_specs=specs, out_specs=P("t"))
            return run(self.up, self.down, x)

    module = Mlp(tokens(8, 12), tokens(12, 8), jax.nn.gelu)
    arrays, static = eqx.partition(module, eqx.is_array)
    report = same(lambda arrays, x: eqx.combine(arrays, static)(x), arrays, tokens(4, 8))
    assert kinds(report) == [GATHER, SCATTER]
    backward = same_gradient(lambda arrays, x: eqx.combine(arrays, static)(x), arrays, tokens(4, 8))
    assert (kinds(backward), reasons(backward)) == ([GATHER, SCATTER] * 2, [])

    # The module itself as an argument: its activation is a leaf that is no array.
    apply = overlap(lambda module, x: (module(x), module))
    y, same_module = apply(module, tokens(4, 8))
    assert same_module.act is jax.nn.gelu
    np.testing.assert_allclose(y, module(tokens(4, 8)), rtol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="flax is not installed")
def test_flax_module() -> None:
    from flax import linen as nn

    class Block(nn.Module):
        """One rank's part: dense layers around gather and scatter of the rows."""

        features: int

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            h = lax.all_gather(nn.LayerNorm()(x), "t", tiled=True)
            h = nn.gelu(nn.Dense(6)(h))
            out = nn.Dense(self.features, use_bias=False)(h)
            return x + lax.psum_scatter(out, "t", tiled=True)

    mesh = mesh_of(2)
    module = Block(8)
    init = jax.shard_map(
        lambda x: jax.tree.map(lambda p: p[None], module.init(jax.random.key(0), x)),
        mesh=mesh,
        in_specs=P("t"),
        out_specs=P("t"),
        check_vma=False,
    )
    fn = jax.shard_map(
        lambda params, x: module.apply(jax.tree.map(lambda p: p[0], params), x),
        mesh=mesh,
        in_specs=(P("t"), P("t")),
        out_specs=P("t"),
        check_vma=False,
    )
    x = tokens(4, 8)
    params = jax.jit(init)(x)
    report = same(fn, params, x)
    assert kinds(report) == [GATHER, SCATTER]
    backward = same_gradient(fn, params, x)
    assert (kinds(backward), reasons(backward)) == ([GATHER, SCATTER] * 2, [])


@pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="flax is not installed")
def test_nnx_module() -> None:
    """Queries, keys and values are three layers that read one gather; the state is an argument."""
    from flax import nnx

    class Attention(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.RMSNorm(8, rngs=rngs)
            self.q, self.k, self.v = (nnx.Linear(8, 4, rngs=rngs) for _ in range(3))
            self.out = nnx.Linear(4, 8, use_bias=False, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            h = lax.all_gather(self.norm(x), "t", tiled=True)
            q, k, v = self.q(h), self.k(h), self.v(h)
            return lax.psum_scatter(self.out(jax.nn.softmax(q @ k.T) @ v), "t", tiled=True)

    graph, state = nnx.split(Attention(nnx.Rngs(0)))
    fn = jax.shard_map(
        lambda state, x: x + nnx.merge(graph, state)(x),
        mesh=mesh_of(2),
        in_specs=(P(), P("t")),
        out_specs=P("t"),
        check_vma=False,
    )
    report = same(fn, state, tokens(4, 8), tolerance=1e-4)
    assert kinds(report) == [GATHER, SCATTER]
    assert report.replaced[0].readers == ("dot_general", "dot_general")
    backward = same_gradient(fn, state, tokens(4, 8), tolerance=1e-4)
    assert kinds(backward)[:3] == [GATHER, SCATTER, GATHER]
