"""Products that stream an operand from host memory: values, chunks, errors; lowering for CUDA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.native import build, copies
from syncopate_jax.ops import stream_matmul as op
from syncopate_jax.ops.stream_chunks import Rates
from syncopate_jax.ops.stream_matmul import stream_matmul
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig

needs_compiler = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


def on_host(x: jax.Array) -> jax.Array:
    device = jax.devices()[0]
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))


def normal(shape: tuple[int, int], seed: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@needs_compiler
@pytest.mark.parametrize("chunks", [1, 100, None])
@pytest.mark.parametrize("side", ["x", "w", "w transposed"])
def test_values(side: str, chunks: int) -> None:
    x, w = normal((300, 96), 0), normal((96, 520), 1)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    given = {"x": (on_host(x), w), "w": (x, on_host(w)), "w transposed": (x, on_host(w.T))}[side]
    run = jax.jit(
        lambda x, w: stream_matmul(
            x,
            w,
            chunks=chunks,
            w_transposed=side == "w transposed",
            preferred_element_type=jnp.float32,
        )
    )
    got = run(*given)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize(("side", "transposed"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("config", [MatmulConfig(), MatmulConfig(cluster_m=2)])
def test_it_lowers_for_cuda(side: int, transposed: bool, config: MatmulConfig) -> None:
    operands = [normal((512, 256), 0), normal((1024, 256) if transposed else (256, 1024), 1)]
    operands[side] = on_host(operands[side])
    run = jax.jit(
        lambda x, w: stream_matmul(x, w, chunks=2, w_transposed=transposed, config=config)
    )
    text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @syncopate_start") == 1
    assert text.count("custom_call @mosaic_gpu_v2") == 1
    assert text.index("@syncopate_start") < text.index("@mosaic_gpu_v2")


def test_the_walk_is_by_chunk_and_turns_round() -> None:
    table = op.tile_table((3, 2), [0, 2, 3], 0)
    assert table.tolist() == [
        [0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [2, 1, 1], [2, 0, 1],
    ]  # fmt: skip
    across = op.tile_table((2, 3), [0, 2, 3], 1)
    np.testing.assert_array_equal(across[:, [1, 0, 2]], table)


def test_a_chunk_is_one_copy_behind_one_flag() -> None:
    call = op.stream_call((300, 96), 2, [0, 1, 3], 128, 0)
    assert [(c.src_offset, c.width, c.rows, c.slot) for c in call.copies] == [
        (0, 128 * 192, 1, 0),
        (128 * 192, 172 * 192, 1, 1),
    ]
    strided = op.stream_call((96, 520), 2, [0, 2, 3], 256, 1)
    assert [(c.src_offset, c.src_pitch, c.width, c.rows) for c in strided.copies] == [
        (0, 1040, 1024, 96),
        (1024, 1040, 16, 96),
    ]
    assert call.wanted().tolist() == [[1, 1]]


@needs_compiler
@pytest.mark.parametrize(("chunks", "bands"), [(None, [2, 1]), (3, [1, 1, 1])])
def test_sizes_reach_the_handler(
    chunks: int | None, bands: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[copies.Call] = []
    start = copies.start
    monkeypatch.setattr(copies, "start", lambda call, *a: (seen.append(call), start(call, *a))[1])
    x, w = on_host(normal((300, 96), 0)), normal((96, 512), 1)
    rates = Rates(link=1e9, gap=0)  # a slow link: the tail is one band
    run = functools.partial(stream_matmul, chunks=chunks, rates=rates, num_sms=2)
    jax.jit(run).trace(x, w).lower(lowering_platforms=("cpu",))
    (call,) = seen
    edges = np.minimum(np.cumsum([0, *bands]) * 128, 300)
    assert [c.width // 192 for c in call.copies] == np.diff(edges).tolist()


def test_operands_that_do_not_fit_are_refused() -> None:
    x, w = normal((64, 32), 0), normal((32, 64), 1)
    with pytest.raises(InputError, match=r"needs x \[M, K\] and w \[K, N\], found \(64, 32\) and"):
        stream_matmul(on_host(x), x)
    with pytest.raises(InputError, match=r"needs x \[M, K\] and w \[N, K\], found .* \(32, 64\)"):
        stream_matmul(on_host(x), w, w_transposed=True)
    with pytest.raises(InputError, match="x is bfloat16 and w is float32; cast one"):
        stream_matmul(on_host(x), w.astype(jnp.float32))
    with pytest.raises(InputError, match=r"chunks must be in 1\.\.2147483647, found 0"):
        stream_matmul(on_host(x), w, chunks=0)
    for given, message in (
        ({"chunks": 1.5}, "chunks must be an integer, found 1.5"),
        ({"num_sms": 0}, "num_sms must be in 1..2147483647, found 0"),
        ({"w_transposed": 3}, "w_transposed needs True or False, found 3"),
        ({"rates": 5e10}, "rates needs Rates or None, found 50000000000.0"),
        ({"config": 3}, "config needs the mosaic_gpu MatmulConfig or None, found 3"),
        ({"preferred_element_type": "nope"}, "preferred_element_type is 'nope'; needs one of"),
        ({"target": "tpu"}, "target needs 'mosaic_gpu' or 'triton', found 'tpu'"),
    ):
        with pytest.raises(InputError, match=f"stream_matmul: {message}"):
            stream_matmul(on_host(x), w, **given)
    with pytest.raises(InputError, match="stream_matmul: x must be an array, found list"):
        stream_matmul([[1.0]], w)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must live in host memory, found neither there; move it"):
        stream_matmul(x, w)
    with pytest.raises(InputError, match="must live in host memory, found both there"):
        stream_matmul(on_host(x), on_host(w))


@pytest.mark.parametrize("given", [{"backend": "copy_engine"}, {"target": "triton"}])
def test_without_a_compiler_it_says_what_to_install(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if given.get("target") == "triton":
        pytest.importorskip("jax_triton")
    monkeypatch.setenv("CXX", "absent-c++")
    with pytest.raises(UnsupportedError, match=r"stream_matmul: .*no compiler.*install g\+\+"):
        stream_matmul(on_host(normal((64, 32), 0)), normal((32, 64), 1), **given)


def test_without_a_compiler_ctas_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "absent-c++")
    x, w = normal((64, 32), 0), normal((32, 64), 1)
    found = stream_matmul(on_host(x), w, preferred_element_type=jnp.float32)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(found, exact, atol=1e-4)
