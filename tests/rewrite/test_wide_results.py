"""Dots whose result is wider than the operands: ``overlap`` keeps the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from syncopate_jax.rewrite.overlap import overlap
from syncopate_jax.rewrite.report import Report
from syncopate_jax.runtime import device
from tests.ops import cases
from tests.rewrite.compare import kinds

SLOW = pytest.mark.slow
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=SLOW)])
BY_XLA = (
    "; of its gradients: xla computes them, as they multiply {} in float32, and the kernels of "
    "target mosaic_gpu multiply bfloat16 or float16"
)


def dot(x: jax.Array, w: jax.Array, **given: Any) -> jax.Array:
    return jnp.einsum("mk,kn->mn", x, w, preferred_element_type=jnp.float32, **given)


def gather(x: jax.Array, w: jax.Array) -> jax.Array:
    return dot(lax.all_gather(x, "t", tiled=True), w)


def gather_and_keep(x: jax.Array, w: jax.Array) -> jax.Array:
    """What is gathered is read by two dots: one is fused, the other reads what it kept."""
    whole = lax.all_gather(x, "t", tiled=True)
    return dot(whole, w) + dot(whole, 2 * w)


def scatter(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.psum_scatter(dot(x, w), "t", tiled=True)


def total(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.psum(dot(x, w), "t")


GATHERED = (P("t"), P(None, "t"), P(None, "t"))
SUMMED = (P(None, "t"), P("t"))
BODIES = {
    gather: GATHERED,
    gather_and_keep: GATHERED,
    scatter: (*SUMMED, P("t")),
    total: (*SUMMED, P()),
}
each_body = pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)


def mapped(body: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    *given, out = BODIES[body]
    return jax.shard_map(body, mesh=cases.ranks_mesh(2), in_specs=tuple(given), out_specs=out)


def check(fn: Callable[..., jax.Array], *args: jax.Array, **options: Any) -> Report:
    """Gradients of ``overlap`` are those of ``fn``, where a rounded cotangent would give zeros."""
    x, w, ct = args
    new = overlap(fn, **({"backend": "xla"} | options))

    def run(fn: Callable[..., jax.Array]) -> Any:
        return jax.jit(lambda x, w, ct: jax.vjp(fn, x, w)[1](ct))(x, w, ct)

    for found, wanted in zip(run(new), run(fn), strict=True):
        assert found.dtype == wanted.dtype
        found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
        assert np.linalg.norm(wanted) > 0
        assert np.linalg.norm(found - wanted) < 2.0**-7 * np.linalg.norm(wanted)
    return new.report(x, w)


def arrays(dtype: str, m: int = 8, k: int = 4, n: int = 8) -> list[jax.Array]:
    x, w, ct = cases.cancelling(m, k, n, dtype)
    return [x[0], w, ct[0]]


@each_dtype
@each_body
def test_in_shard_map(body: Callable[..., jax.Array], dtype: str) -> None:
    report = check(mapped(body), *arrays(dtype))
    assert len(kinds(report)) == 1 and "gradients" not in str(report)


@each_dtype
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("out", [P("t"), P()], ids=str)
def test_outside(kind: AxisType, out: P, dtype: str) -> None:
    mesh = cases.ranks_mesh(2, kind)
    auto = kind == AxisType.Auto
    with jax.set_mesh(mesh):
        x, w, ct = (
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip(arrays(dtype), (*SUMMED, out), strict=True)
        )
        given = {} if auto else {"out_sharding": out}
        report = check(lambda x, w: dot(x, w, **given), x, w, ct, auto_axes=auto)
    assert len(report.asked if auto else report.replaced) == 1


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "core_count", lambda: device.HOPPER_CORES)


@pytest.mark.parametrize(
    "body", [gather, pytest.param(scatter, marks=SLOW), total], ids=lambda body: body.__name__
)
@pytest.mark.usefixtures("hopper")
def test_on_tensor_cores(body: Callable[..., jax.Array]) -> None:
    """Gradients that no kernel multiplies are ``xla``'s, and the report says which these are."""
    report = check(mapped(body), *arrays("bfloat16", 256, 128, 256), backend="tma_dedicated")
    (found,) = report.replaced
    said = "" if body is total else BY_XLA.format("bfloat16 by float32")
    assert str(found).endswith(said) and bool(found.gradients) == bool(said)


@pytest.mark.parametrize("out", [P("t"), P()], ids=str)
@pytest.mark.usefixtures("hopper")
def test_on_tensor_cores_and_explicit_axes(out: P) -> None:
    mesh = cases.ranks_mesh(2, AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, w, ct = (
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip(arrays("bfloat16", 256, 128, 256), (*SUMMED, out), strict=True)
        )
        fn = lambda x, w: dot(x, w, out_sharding=out)  # noqa: E731
        report = check(fn, x, w, ct, backend="tma_dedicated")
    (found,) = report.replaced
    said = "" if out == P() else BY_XLA.format("float32 by bfloat16")
    assert str(found).endswith(said) and bool(found.gradients) == bool(said)


@pytest.mark.usefixtures("hopper")
def test_a_backend_without_gradients_is_named() -> None:
    """The value is fused all the same: not every program is differentiated."""
    fn = jax.shard_map(
        lambda x, w: lax.psum_scatter(x @ w, "t", tiled=True),
        mesh=cases.ranks_mesh(2), in_specs=SUMMED, out_specs=P("t"),
    )  # fmt: skip
    x, w, _ = arrays("bfloat16", 256, 128, 256)
    for backend, said in (("ldst_colocated", "brings data to tiles"), ("tma_colocated", "")):
        (found,) = overlap(fn, backend=backend, target="mosaic_gpu").report(x, w).replaced
        assert said in found.gradients
        assert found.gradients.startswith("one is refused: no backend can fuse" if said else "")
        assert bool(found.gradients) == bool(said)
