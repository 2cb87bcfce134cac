"""The Hopper matmul alone, interpreted: shared memory is used again only when it is free."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.pallas_kernels.matmul_mosaic_gpu import matmul
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import CANDIDATES, MatmulConfig
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_epilogue import Epilogue
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_kernel import _Worker
from tests.mosaic_interpreter.run import RaceFound, run_checked
from tests.mosaic_interpreter.versions import needs_known_jax

pytestmark = needs_known_jax
ONE_STORE = MatmulConfig(tile_n=64)  # a tile is one store of each warpgroup, and slots are two
CONFIGS = (
    *(dataclasses.replace(config, cluster_m=1, cluster_n=1) for config in CANDIDATES),
    ONE_STORE,
    MatmulConfig(tile_n=128, in_flight=0, stages=2),
    MatmulConfig(tile_n=128, overlap_epilogue=False),
    MatmulConfig(split="n"),
)


def error(config: MatmulConfig) -> float:
    """Of a product of several tiles a CTA, with edges; raises what the interpreter finds."""
    rng = np.random.default_rng(0)
    m, k, n = 3 * config.tile_m - 8, 160, 2 * config.tile_n
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((k, n)), jnp.bfloat16)

    def product(x: Any, w: Any) -> Any:
        return matmul(x, w, config=config, num_sms=2, interpret=plgpu.InterpretGPUParams())

    found = np.asarray(run_checked(product, x, w), np.float64)
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.tile_m}x{c.tile_n}-{c.split}")
def test_right_and_silent(config: MatmulConfig) -> None:
    assert error(config) < 3e-3


def test_a_store_slot_that_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Epilogue, "stores_since", lambda self, index: 1)
    with pytest.raises(RaceFound, match=r"a store by .* is unordered with a copy to GMEM by"):
        error(ONE_STORE)


def test_a_stage_that_is_released_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the products of the step before this one were never in flight."""
    monkeypatch.setattr(_Worker, "previous_slot", lambda self, slot: slot)
    with pytest.raises(AssertionError):
        error(MatmulConfig(tile_n=128, stages=2))


def test_products_that_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda n: None)
    with pytest.raises(RaceFound, match=r"a copy to shared memory .* a product of tensor cores"):
        error(MatmulConfig(tile_n=128, stages=2))
