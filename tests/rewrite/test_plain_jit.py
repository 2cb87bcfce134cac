"""``overlap`` on models under plain ``jit``: what shardings imply is found, and nothing changes."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from syncopate_jax.importers import shardings
from syncopate_jax.ops import auto_axes
from syncopate_jax.rewrite.overlap import Overlapped, overlap
from tests.rewrite import models, plain_models
from tests.rewrite.compare import kinds, reasons

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
GATHER, SCATTER = "all_gather", "reduce_scatter"
MODELS: dict[str, tuple[Callable[..., Any], dict[str, P], models.Params, tuple[int, ...]]] = {
    "megatron": (
        plain_models.megatron_block, models.MEGATRON, models.megatron_params(8, 4, 12), (6, 2, 8)
    ),
    "fsdp": (plain_models.fsdp_mlp, models.FSDP, models.fsdp_params(8, 12), (4, 8)),
    "sequence": (
        plain_models.sequence_attention, models.RING, models.ulysses_params(8, 4), (6, 2, 8)
    ),
}  # fmt: skip
FOUND = {
    "megatron": [GATHER, SCATTER] * 2,
    "fsdp": [GATHER] * 2,
    "sequence": [GATHER] * 4,
}


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((2,), ("t",), (kind,), devices=jax.devices()[:2])


def placed(mesh: Any, tree: Any, specs: Any) -> Any:
    def put(x: Any, spec: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree, specs)


def tokens(mesh: Any, *shape: int) -> jax.Array:
    x = np.random.default_rng(7).standard_normal(shape)
    return jax.device_put(jnp.asarray(x, jnp.float32), NamedSharding(mesh, P("t")))


def model(name: str, kind: AxisType) -> tuple[Callable[..., Any], Any, jax.Array]:
    fn, specs, params, shape = MODELS[name]
    mesh = mesh_of(kind)
    return functools.partial(fn, mesh), placed(mesh, params, specs), tokens(mesh, *shape)


def same(fn: Callable[..., Any], new: Overlapped, *args: Any) -> str:
    """Values and gradients of all arguments, with their shardings; the compiled program."""

    def run(fn: Callable[..., Any]) -> Any:
        loss = lambda *a: jnp.sum(jnp.sin(1.3 * fn(*a)))  # noqa: E731
        return jax.jit(lambda *a: (fn(*a), jax.grad(loss, tuple(range(len(args))))(*a)))

    compiled = run(new).lower(*args).compile()
    found, wanted = compiled(*args), run(fn)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 2e-5 * max(np.linalg.norm(b), 1.0)
    return compiled.as_text()


@pytest.mark.parametrize(
    "name", ["fsdp", *(pytest.param(m, marks=pytest.mark.slow) for m in ("megatron", "sequence"))]
)
def test_explicit_axes(name: str) -> None:
    fn, *args = model(name, EXPLICIT)
    new = overlap(fn, backend="xla")
    report = new.report(*args)
    assert kinds(report) == FOUND[name], str(report)
    assert all("reshard" in item.collective for item in report.left)
    same(fn, new, *args)


@pytest.mark.parametrize(
    "name", ["megatron", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fsdp", "sequence"))]
)
def test_auto_axes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dot is asked for, and is the product that the settled shardings imply."""
    fn, *args = model(name, AUTO)
    new = overlap(fn, backend="xla", auto_axes=True)
    report = new.report(*args)
    dots = str(jax.make_jaxpr(fn)(*args)).count("= dot_general")
    assert (len(report.asked), report.replaced, report.left) == (dots, (), ())
    seen: list[str] = []

    def spy(*given: Any, **more: Any) -> shardings.Derived:
        made = shardings.derive(*given, **more)
        seen.append(made.fused.kind if made.fused else "")
        return made

    monkeypatch.setattr(auto_axes, "derive", spy)
    text = same(fn, new, *args)
    assert len(seen) >= dots
    assert set(FOUND[name]) <= set(seen), Counter(seen)
    assert " all-gather(" in text or " all-reduce(" in text


def test_auto_axes_are_asked_for_only_if_wanted() -> None:
    fn, *args = model("fsdp", AUTO)
    report = overlap(fn).report(*args)
    wanted = "its mesh axes are auto ones; overlap(…, auto_axes=True) has their partitioner ask"
    assert (report.asked, report.replaced, reasons(report)) == ((), (), [wanted] * 2)
    _, line = str(overlap(fn).report(*args)).splitlines()
    place = r".*plain_models\.py:\d+ \(\w+\)"
    assert re.fullmatch(
        rf"  left: 2 dots outside shard_map, at {place}, {place}, each because {re.escape(wanted)}",
        line,
    )
    refused = overlap(fn, backend="remote_dma", auto_axes=True).report(*args)
    assert (
        reasons(refused)
        == ["backend remote_dma is interpreted on the CPU, where no partitioner asks"] * 2
    )
    asked = overlap(fn, auto_axes=True).report(*args)
    assert re.search(
        r"the partitioner asks for: the dot mk,kn->mn at .*plain_models\.py:\d+", str(asked)
    )


def test_dots_of_auto_axes_come_last() -> None:
    def within(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.psum(jax.nn.softmax(x @ w), "t")

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        x = x * jnp.vdot(x, x)
        mapped = jax.shard_map(within, mesh=mesh_of(AUTO), in_specs=(P("t"), P()), out_specs=P())
        return mapped(x, w).sum()

    args = placed(mesh_of(AUTO), (jnp.ones((4, 8)), jnp.ones((8, 4))), (P("t"), P()))
    report = overlap(fn).report(*args)
    assert [item.collective for item in report.left] == ["dot_general", "psum_invariant"]
    lines = str(report).splitlines()
    assert lines[0] == "replaced 0, left 2"
    assert lines[1].startswith("  left: psum_invariant at ")
    assert lines[2].startswith("  left: dot_general at ")


@pytest.mark.slow
def test_auto_axes_that_do_not_divide_an_extent() -> None:
    rows = NamedSharding(mesh_of(AUTO), P("t"))

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return (jax.lax.with_sharding_constraint(x, rows) @ w).sum()

    args = placed(rows.mesh, (jnp.ones((3, 8)), jnp.ones((8, 4))), (P(), P()))
    assert jax.jit(overlap(fn, auto_axes=True))(*args) == jax.jit(fn)(*args) == 96


def test_auto_axes_in_a_scan_under_remat() -> None:
    fn, params, x = model("fsdp", AUTO)
    stacked = jax.tree.map(lambda p: jnp.stack([p, p * 0.5]), params)

    def layers(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(lambda x, p: (fn(p, x), None)), x, p)[0]

    new = overlap(layers, backend="xla", auto_axes=True)
    assert len(new.report(stacked, x).asked) == 2
    same(layers, new, stacked, x)


@pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="flax is not installed")
@pytest.mark.parametrize("kind", [EXPLICIT, pytest.param(AUTO, marks=pytest.mark.slow)], ids=str)
def test_flax_module(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    module = plain_models.flax_module(mesh)
    rng = np.random.default_rng(3)
    shapes = {
        "LayerNorm_0": {"scale": ((8,), P()), "bias": ((8,), P())},
        "up": {"kernel": ((8, 12), P(None, "t")), "bias": ((12,), P("t"))},
        "down": {"kernel": ((12, 8), P("t"))},
    }
    params = jax.tree.map(
        lambda of: jax.device_put(
            jnp.asarray(rng.standard_normal(of[0]) * 0.3, jnp.float32), NamedSharding(mesh, of[1])
        ),
        shapes,
        is_leaf=lambda of: isinstance(of, tuple),
    )
    x = tokens(mesh, 4, 8)
    fn = lambda params, x: module.apply({"params": params}, x)  # noqa: E731
    new = overlap(fn, backend="xla", auto_axes=True)
    report = new.report(params, x)
    if kind == EXPLICIT:
        assert (kinds(report), reasons(report)) == ([GATHER, SCATTER], [])
    assert len(report.asked) == (0 if kind == EXPLICIT else 2)
    same(fn, new, params, x)
