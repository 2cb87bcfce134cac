"""Fused operators under ``jax_enable_x64``, where Python's integers are int64 unless told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ops.stream_matmul import BACKENDS as stream_backends
from syncopate_jax.ops.stream_matmul import stream_matmul
from syncopate_jax.options import Launch
from tests.backends import own_kernels
from tests.ops import cases
from tests.ops.cases import BY_NAME
from tests.ops.test_stream_matmul import needs_compiler, normal, on_host

P = jax.P
GPU = [
    ("gather_x_m", "tma_dedicated"),
    ("gather_x_m", "tma_colocated"),
    ("scatter_m", "ldst_dedicated"),
    ("scatter_m", "ldst_colocated"),
    ("gather_x_m", "copy_engine"),
]


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_values_and_gradients(ranks: int) -> None:
    """A gather forwards, a scatter backwards."""
    x, w, ct = (jnp.asarray(a, jnp.float32) for a in cases.operands(1, 4, 4, 4))
    fn = cases.sharded(BY_NAME["gather_x_m"], cases.ranks_mesh(ranks), backend="remote_dma")
    found, back = jax.vjp(jax.jit(fn), x, w)
    assert found.dtype == jnp.float32
    wanted = (jnp.einsum("bmn,kn->bmk", ct, w), jnp.einsum("bmk,bmn->kn", x, ct))
    for a, b in zip((found, *back(ct)), (jnp.einsum("bmk,kn->bmn", x, w), *wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "backend"), GPU)
def test_gpu_kernels_lower(name: str, backend: str) -> None:
    options = {"target": "mosaic_gpu", "backend": backend, "launch": Launch(sms=132)}
    fn = cases.sharded(BY_NAME[name], cases.ranks_mesh(2), **options)
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 512, 256), (256, 512))]
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu_v2", text)) == 1


@needs_compiler
@pytest.mark.parametrize("backend", stream_backends)
def test_a_streamed_product_lowers(backend: str) -> None:
    x, w = on_host(normal((512, 256), 0)), normal((256, 512), 1)
    run = jax.jit(lambda x, w: stream_matmul(x, w, num_sms=8, backend=backend))
    text = run.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu_v2" in text


def call_own(operator: Any, *arrays: Any) -> Any:
    fn = jax.shard_map(
        lambda *args: operator(*args)[0], mesh=cases.ranks_mesh(2), in_specs=(P("t"), P()),
        out_specs=P("t"),
    )  # fmt: skip
    return jax.jit(fn)(*arrays)


def test_a_kernel_of_the_users() -> None:
    """Values of 32 bits are those of the kernel; wider ones are refused, but by ``xla``."""
    plan = own_kernels.gather_plan(2, t=(4, 4))
    x, s = jnp.arange(16, dtype=jnp.float32).reshape(4, 4), jnp.arange(4.0)[:, None]
    kernel, axis_map = own_kernels.scale(4, 4), {"t": "x"}
    for backend in ("remote_dma", "xla"):
        operator = fuse(kernel, plan, axis_map, axis_name="t", backend=backend)
        found = call_own(operator, x, s.astype(jnp.float32))
        np.testing.assert_array_equal(found, jnp.concatenate([x * s, x * s]))
    operator = fuse(kernel, plan, axis_map, axis_name="t", backend="remote_dma")
    with pytest.raises(UnsupportedError, match=r"operand s is float64, .* backend 'xla'"):
        call_own(operator, x, s)
    wide = own_kernels.scale(4, 4, dtype="float64")
    for backend in ("remote_dma", "tma_dedicated"):
        target = "tpu" if backend == "remote_dma" else "mosaic_gpu"
        with pytest.raises(UnsupportedError, match=f"{backend}: result out is float64, and"):
            fuse(wide, plan, axis_map, axis_name="t", backend=backend, target=target,
                 launch=Launch(sms=4))  # fmt: skip
