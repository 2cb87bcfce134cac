import dataclasses
import json
import re
from importlib import resources

import jax
import jax.numpy as jnp
import pytest

from experiments.common import shapes
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu as kernel
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu_config as configs
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_operands import Operands

H200 = configs.Limits(sms=132, shared_memory=232448)
BF16, F32 = jnp.bfloat16, jnp.float32


def test_fit_takes_as_many_stages_as_there_is_room_for():
    config = configs.MatmulConfig(stages=9)
    fitted = config.fit(H200.shared_memory, BF16, BF16)
    assert fitted.stages == 4
    assert fitted.shared_memory(BF16, BF16) <= H200.shared_memory
    with_addend = config.fit(H200.shared_memory, BF16, BF16, F32)
    assert with_addend.stages == 3


def test_fit_says_what_two_stages_need():
    message = (
        "tile 128x256x64 with 2 stages takes 132096 bytes of shared memory, and a block has 100000"
    )
    with pytest.raises(UnsupportedError, match=message):
        configs.MatmulConfig().fit(100000, BF16, BF16)


@pytest.mark.parametrize(("kept", "expected"), [(24, 240), (32, 232), (40, 232), (56, 224)])
def test_no_more_registers_are_asked_for_than_a_launch_has(kept: int, expected: int) -> None:
    """Three warpgroups of 128 threads start with 168 each, 504 together."""
    config = configs.MatmulConfig(producer_registers=kept)
    assert config.consumer_registers == expected
    assert 2 * expected + kept <= 504


def test_workers_leave_out_sms_that_would_idle_in_the_last_wave():
    config = configs.MatmulConfig()
    assert config.workers(8192, 4096, sms=132) == 128
    assert config.workers(8192, 4096, sms=100) == 94  # 1024 tiles in 11 waves
    assert dataclasses.replace(config, cluster_m=2).workers(8192, 4096, sms=132) == 64
    assert config.workers(64, 64, sms=132) == 1


def test_overlap_needs_registers_for_both_tiles():
    assert configs.MatmulConfig().overlaps(BF16)
    assert not configs.MatmulConfig().overlaps(F32)
    assert not configs.MatmulConfig(tile_m=256, tile_n=192).overlaps(BF16)


def test_a_store_is_at_most_one_swizzle_wide():
    assert configs.MatmulConfig().store_columns(BF16) == 64
    assert configs.MatmulConfig().store_columns(F32) == 32


PROBLEMS = [
    (dict(tile_m=192), r"part of the 192x256 tile is 96x256; its rows must be a multiple of 64"),
    (dict(tile_n=260), r"part of the 128x260 tile is 64x260; .* its columns of 8"),
    (dict(tile_n=320), r"part has 320 columns; wgmma has at most 256"),
    (dict(tile_m=256), r"a 128x256 float32 accumulator takes 256 of 232 registers"),
    (dict(tile_n=192, epilogue_n=128), r"epilogue_n=128 must be one of \(16, 32, 64\)$"),
    (
        dict(tile_m=64, tile_n=64, split="n"),
        r"the 64x64 tile has 32 columns, and 64 are .* whose columns are a multiple of 128$",
    ),
    (dict(stages=1), r"stages=1 must exceed in_flight=1"),
    (dict(split="n", warpgroups=3), r"part of the 128x256 tile is 128x85"),
]


@pytest.mark.parametrize(("changes", "message"), PROBLEMS)
def test_problem_names_what_does_not_match(changes, message):
    found = configs.MatmulConfig(**changes).problem()
    assert found is not None and re.search(message, found), found


def test_every_candidate_can_be_built():
    for config in configs.CANDIDATES:
        assert config.problem() is None
        assert config.fit(H200.shared_memory, BF16, BF16) == config


def test_tuned_configs_suit_their_products():
    text = resources.files("syncopate_jax.pallas_kernels").joinpath(configs.TUNED_FILE).read_text()
    for entries in json.loads(text).values():
        for entry in entries:
            config = configs.MatmulConfig(**entry["config"])
            m, k, n = entry["m"], entry["k"], entry["n"]
            x, w, y = (jax.ShapeDtypeStruct(s, BF16) for s in ((m, k), (k, n), (m, n)))
            assert kernel.unsupported_reason(Operands(x, w, y), config, H200) is None, entry


def test_benchmarked_products_are_tuned_or_guessed():
    tuned = 0
    for gemm in shapes.local_gemms():
        best = configs.ranked(gemm.m, gemm.n, gemm.k, sms=132, device_kind="NVIDIA H200")
        tuned += len(best) > len(configs.CANDIDATES)
    assert tuned == 41  # all but n = 3696


def test_a_guess_avoids_a_nearly_empty_last_wave():
    # 64 x 3 tiles of 128x256 leave the second wave half empty; 32 x 4 of 256x192 are one wave.
    [best, *_] = configs.ranked(8192, 768, 1024, sms=128)
    assert (best.tile_m, best.tile_n) == (256, 192)


class Gpu:
    device_kind, core_count, shared_memory_per_block_optin = "gpu", 144, 1000


def test_limits_are_read_off_the_device():
    assert configs.Limits.of(Gpu()) == configs.Limits(144, 1000)
    assert configs.Limits.of(Gpu(), sms=8, shared_memory=500) == configs.Limits(8, 500)


def test_a_device_without_multiprocessors_needs_a_number():
    cpu = jax.devices("cpu")[0]
    assert configs.Limits.of(cpu, sms=132) == configs.Limits(132, configs.HOPPER_SHARED_MEMORY)
    with pytest.raises(InputError, match=r"device 'cpu' does not say how many .*; pass num_sms"):
        configs.Limits.of(cpu)
