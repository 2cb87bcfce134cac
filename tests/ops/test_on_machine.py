"""Operators on a machine that was measured: each effect against what pencil and paper give."""

from __future__ import annotations

from typing import Any

import pytest

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir import machine, presets
from syncopate_jax.ops.on_machine import predict_call
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Launch, Options
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_beside import Beside
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig

H200 = machine.h200()
M, K, N = 2048, 4096, 8192
GATHER = Contraction("bmk", "kn", "bmn", "all_gather", "lhs", gather="m")
SCATTER = Contraction("bmk", "kn", "bmn", "reduce_scatter", "out", scatter="m")
REDUCE = Contraction("bmk", "kn", "bmn", "all_reduce", "out")


def gather(backend: str, ctas: int | None = None, **more: Any):
    options = Options(backend=backend, split=1, launch=Launch(communicating=ctas), **more)
    return predict_call(H200, GATHER, (1, M // 2, K), (K, N // 2), 2, options)


def test_copies_beside_the_kernel_hide_behind_its_own_half() -> None:
    found = gather("copy_engine")
    tiles = (M // 128) * (N // 2 // 256)
    assert found.product == H200.product(M, K, N // 2) == 2 * H200.tile(128 * 256, K)
    assert tiles == 256 and found.fused == pytest.approx(found.product)
    received = M // 2 * K * 2
    assert found.exchange == H200.collective("all_gather", received)
    assert found.unfused == found.product + found.exchange
    assert found.speedup == found.unfused / found.fused > 1.4


def test_ctas_that_communicate_compute_nothing() -> None:
    """256 tiles are two waves on 128 multiprocessors, and three on 124."""
    wave = H200.tile(128 * 256, K)
    slow = gather("tma_dedicated", 8, tiles={"n": 256})
    assert slow.fused == pytest.approx(3 * wave + H200.call_seconds)
    # So the usual tiles are half as wide: 512 of them are five shorter waves.
    narrow = 5 * H200.tile(128 * 128, K) + H200.call_seconds
    assert gather("tma_dedicated", 8).fused == pytest.approx(narrow)
    # Four are not late with eight megabytes only if they need no longer than one wave.
    copied = M // 2 * K * 2 / (4 * H200.copy_unit_cta_bandwidth) + presets.SIGNAL_LATENCY
    late = max(copied - wave, 0.0)
    assert gather("tma_dedicated", 4).fused == pytest.approx(2 * wave + late + H200.call_seconds)


def test_those_that_communicate_are_told_of_a_tile_during_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 narrow tiles are two turns: the first is the peer's half, added by it in its second."""
    m, k, n = 1024, 4096, 4096
    options = Options(backend="tma_dedicated", split=1, launch=Launch(communicating=4))
    found = predict_call(H200, SCATTER, (1, m, k // 2), (k // 2, n), 2, options)
    lag = Beside(k // 2 // 64, 6, 2, looks_up=True, signals=True).signal_step / (k // 2 // 64)
    told = (1 + lag) * H200.tile(128 * 128, k // 2)
    copied = m // 2 * n * 2 / (4 * H200.copy_unit_cta_bandwidth) + presets.SIGNAL_LATENCY
    assert found.fused == pytest.approx(told + copied + H200.call_seconds)
    older = predict_call(H200, SCATTER, (1, m, k // 2), (k // 2, n), 2, options, lag=0.75)
    assert older.fused - found.fused == pytest.approx((0.75 - lag) * H200.tile(128 * 128, k // 2))
    # Where registers do not hold a tile beside the next, it is stored and told of before that.
    monkeypatch.setattr(MatmulConfig, "overlaps", lambda *_: False)
    at_once = predict_call(H200, SCATTER, (1, m, k // 2), (k // 2, n), 2, options).timeline
    assert at_once.op_start.min() == at_once.tile_finish.min()


def test_loads_and_stores_are_slower_than_the_link() -> None:
    copied = M // 2 * K * 2 / H200.load_store_bandwidth
    found = gather("ldst_dedicated", 16).timeline
    assert found.op_finish.max() == pytest.approx(copied + presets.SIGNAL_LATENCY)


def test_an_all_reduce_ends_with_its_last_wave_on_the_link() -> None:
    options = Options(backend="tma_colocated")
    # So deep that a wave's tiles are pushed while the next one's are computed.
    scatter = predict_call(H200, SCATTER, (1, M, K), (K, N), 2, options)
    reduce = predict_call(H200, REDUCE, (1, M, K), (K, N), 2, options)
    assert scatter.fused == pytest.approx(scatter.product + H200.call_seconds)
    # 512 tiles are 4 waves of 128; the last one is pushed by its CTA at that one's rate.
    last = (128 / H200.copy_unit_bandwidth + 1 / H200.copy_unit_cta_bandwidth) * 128 * 256 * 2
    expected = scatter.fused + last + presets.SIGNAL_LATENCY
    assert reduce.fused == pytest.approx(expected, rel=1e-3)


def test_backends_of_unknown_speed_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="of how fast ldst_colocated moves data; use copy"):
        options = Options(backend="ldst_colocated")
        predict_call(H200, SCATTER, (1, M, K // 2), (K // 2, N), 2, options)
    with pytest.raises(UnsupportedError, match=r"tile_stores: .* sends what no tile writes"):
        gather("tma_colocated")
