"""Folded ranks on one GPU: every operator and in-kernel backend against float32 at full precision.

Outputs and scratch are memory that was filled with NaN before each call, so what is read before it
was written shows. Sizes cut tiles raggedly in both dimensions of the result and in the contraction.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.options import Launch
from syncopate_jax.runtime.folded import fold
from tests.backends.test_gpu_lowering import brings
from tests.ops.cases import BY_NAME, CASES, Case

pytestmark = pytest.mark.gpu
BACKENDS = ("tma_dedicated", "ldst_dedicated", "tma_colocated", "ldst_colocated")
AXIS = "ranks"
POISON = 2**28  # elements of float32: more than a test's buffers
CALLS = 4


def poison() -> None:
    """Leaves NaN in the memory that the next call gets."""
    filled = jnp.full((POISON,), jnp.nan, jnp.float32)
    filled.block_until_ready()
    filled.delete()


def shape(whole: tuple[int, ...], dimension: int | None, ranks: int) -> tuple[int, ...]:
    """One rank's part."""
    return tuple(n // ranks if d == dimension else n for d, n in enumerate(whole))


def rows(case: Case, ranks: int, m: int, k: int, n: int, seed: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed))
    wholes = ((1, m, k), case.x), ((k, n), case.w)
    return [
        jax.random.normal(key, (ranks, *shape(whole, dimension, ranks)), jnp.bfloat16)
        for key, (whole, dimension) in zip(keys, wholes, strict=True)
    ]


def over_rows(case: Case, **given: Any) -> Any:
    return fold(lambda x, w: case.operator(x, w, axis_name=AXIS, **case.options, **given), AXIS)


def exact(case: Case) -> Any:
    fn = over_rows(case, backend="xla")

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return fn(x.astype(jnp.float32), w.astype(jnp.float32))

    return jax.jit(run)


def fused(case: Case, backend: str, **launch: Any) -> Any:
    return jax.jit(over_rows(case, backend=backend, target="mosaic_gpu", launch=Launch(**launch)))


def error(found: jax.Array, wanted: jax.Array) -> float:
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def check(case: Case, backend: str, ranks: int, m: int, k: int, n: int, **launch: Any) -> None:
    fn, reference = fused(case, backend, **launch), exact(case)
    for seed in range(CALLS):
        x, w = rows(case, ranks, m, k, n, seed)
        wanted = reference(x, w)
        poison()
        assert error(fn(x, w), wanted) < 5e-3


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_right(case: Case, backend: str, ranks: int) -> None:
    if backend == "ldst_colocated":
        if brings(case):
            with pytest.raises(UnsupportedError, match="brings data to tiles"):
                check(case, backend, ranks, 128 * ranks, 128 * ranks, 128 * ranks)
        else:
            check(case, backend, ranks, 256 * ranks, 136 * ranks, 256 * ranks)
        return
    check(case, backend, ranks, 200 * ranks, 136 * ranks, 192 * ranks)


@pytest.mark.parametrize("backend", ["tma_dedicated", "tma_colocated"])
def test_two_operators_alternate_in_a_scan(backend: str) -> None:
    ranks, calls = 4, 2000
    gather, scatter = BY_NAME["gather_x_m"], BY_NAME["scatter_m"]
    given = {"backend": backend, "target": "mosaic_gpu"}
    first, second = over_rows(gather, **given), over_rows(scatter, **given)
    first_exact, second_exact = exact(gather), exact(scatter)

    def worse(so_far: jax.Array, found: jax.Array, wanted: jax.Array) -> jax.Array:
        off = jnp.linalg.norm(found.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
        return jnp.maximum(so_far, jnp.where(jnp.isnan(off), jnp.inf, off))

    def step(so_far: tuple[jax.Array, jax.Array], key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (ranks, 1, 200, 256), jnp.bfloat16)
        up = jax.random.normal(keys[1], (ranks, 256, 384), jnp.bfloat16)
        down = jax.random.normal(keys[2], (ranks, 384, 256), jnp.bfloat16)
        hidden = first(x, up)
        out = second(hidden, down)
        return (
            worse(so_far[0], hidden, first_exact(x, up)),
            worse(so_far[1], out, second_exact(hidden, down)),
        ), None

    start = (jnp.float32(0), jnp.float32(0))
    keys = jax.random.split(jax.random.key(0), calls)
    found, _ = jax.jit(lambda keys: jax.lax.scan(step, start, keys))(keys)
    assert max(map(float, found)) < 5e-3


def test_the_watchdog_names_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncopate_jax.backends import gpu_copy

    class Silent(gpu_copy.Copier):
        def run(self) -> None:
            """Copies nothing and raises nothing."""

    monkeypatch.setattr("syncopate_jax.backends.gpu_kernel.Copier", Silent)
    case = BY_NAME["gather_x_m"]
    fn = fused(case, "tma_dedicated", watchdog_us=20_000)
    text = r"rank [01]: tile \d+ \(position \d+\) waited in vain for signal 0 to reach 12"
    with pytest.raises(Exception, match=text):
        jax.block_until_ready(fn(*rows(case, 2, 256, 256, 256, 0)))
        jax.effects_barrier()
