"""The Hopper matmul alone, interpreted: shared memory is used again only when it is free."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.pallas_kernels.matmul_mosaic_gpu import matmul
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import CANDIDATES, MatmulConfig
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_kernel import _Worker
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_split import divided_tiles
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
    MatmulConfig(tile_m=256, tile_n=128, stages=3, overlap_epilogue=False),
    MatmulConfig(tile_m=256, tile_n=128, stages=3, overlap_epilogue=False, lends_stage=False),
    MatmulConfig(tile_n=128, stagger=2),
    MatmulConfig(tile_m=256, tile_n=128, stages=3, overlap_epilogue=False, stagger=1),
)


SPLIT: tuple[dict[str, Any], ...] = ({}, {"tile_m": 256, "stages": 3, "overlap_epilogue": False})


def error(
    config: MatmulConfig, tiles: tuple[int, int] = (3, 2), k: int = 160, sms: int = 2
) -> float:
    """Of a product of several tiles a CTA, with edges; raises what the interpreter finds."""
    rng = np.random.default_rng(0)
    k = 288 if config.stagger else k
    m, n = tiles[0] * config.tile_m - 8, tiles[1] * config.tile_n
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((k, n)), jnp.bfloat16)

    def product(x: Any, w: Any) -> Any:
        return matmul(x, w, config=config, num_sms=sms, interpret=plgpu.InterpretGPUParams())

    found = np.asarray(run_checked(product, x, w), np.float64)
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.tile_m}x{c.tile_n}-{c.split}")
def test_right_and_silent(config: MatmulConfig) -> None:
    assert error(config) < 3e-3


def test_a_store_slot_that_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Worker, "stores_since", lambda self, index: 1)
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


@pytest.mark.parametrize(
    ("tiles", "sms", "divided"),
    [((3, 2), 4, 2), ((3, 1), 4, 3), ((5, 1), 4, 5), ((4, 1), 3, 1), ((2, 2), 2, 0)],
    ids=str,
)
@pytest.mark.parametrize("changes", SPLIT, ids=["overlaps", "lends"])
def test_tiles_divided_along_k(
    changes: dict[str, Any], tiles: tuple[int, int], sms: int, divided: int
) -> None:
    """Runs of a half, of three quarters, of more than a tile and of a third."""
    assert divided_tiles(tiles[0] * tiles[1], sms) == divided
    config = MatmulConfig(tile_n=128, split_last=True, **changes)
    assert error(config, tiles=tiles, k=288, sms=sms) < 3e-3


def test_a_sum_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl, "semaphore_wait", lambda *args, **options: None)
    with pytest.raises(AssertionError):
        error(MatmulConfig(tile_n=128, split_last=True), tiles=(3, 1), k=288, sms=4)
