import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu as kernel
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu_kernel as body
from syncopate_jax.pallas_kernels import tile_loop_mosaic_gpu as tile_loop
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import CLUSTER_AXES, Limits, MatmulConfig
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_operands import Operands

H200 = Limits(sms=132, shared_memory=232448)
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
SMALL = MatmulConfig(tile_n=128, stages=2, group=2)
small = functools.partial(dataclasses.replace, SMALL)


def operands(m, k, n, dtype=F16, seed=0):
    draw = np.random.default_rng(seed)
    x, w = draw.standard_normal((m, k)), draw.standard_normal((k, n))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def reference(x, w, addend=0.0):
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(addend, np.float64)


def relative_error(found, expected):
    found = np.asarray(found, np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def run(x, w, config, **options):
    sms = options.pop("sms", config.cluster)
    return kernel.matmul(
        x,
        w,
        config=config,
        num_sms=sms,
        interpret=plgpu.InterpretGPUParams(),
        **options,
    )


# -- numerics, interpreted -----------------------------------------------------------------------

NUMERICS = {
    "even": (small(), (256, 128, 256)),
    "ragged": (small(), (208, 208, 336)),
    "not_overlapped": (small(overlap_epilogue=False), (208, 208, 336)),
    "fewer_k_steps_than_stores": (small(epilogue_n=32), (256, 64, 256)),
    "nothing_in_flight": (small(in_flight=0), (208, 208, 336)),
    "split_columns": (small(split="n"), (208, 208, 336)),
    "cluster_along_m": (small(cluster_m=2), (400, 144, 208)),
    "cluster_along_n": (small(cluster_n=2), (208, 144, 400)),
    "narrow_swizzle": (small(tile_n=96, epilogue_n=32), (208, 144, 208)),
    "k_snake": (small(k_snake=1), (256, 208, 384)),
    "three_stages_one_store_slot": (small(stages=3, epilogue_slots=1), (256, 208, 256)),
}


LIKE_OTHERS = ("even", "cluster_along_n", "narrow_swizzle", "three_stages_one_store_slot")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in LIKE_OTHERS else []) for n in NUMERICS],
)
def test_product(name):
    config, (m, k, n) = NUMERICS[name]
    x, w = operands(m, k, n)
    assert relative_error(run(x, w, config), reference(x, w)) < 3e-4


@pytest.mark.parametrize(("x_transposed", "w_transposed"), [(True, False), (False, True)])
def test_product_of_transposed_operands(x_transposed, w_transposed):
    x, w = operands(208, 144, 208)
    y = run(
        x.T if x_transposed else x,
        w.T if w_transposed else w,
        SMALL,
        x_transposed=x_transposed,
        w_transposed=w_transposed,
    )
    assert relative_error(y, reference(x, w)) < 3e-4


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "limit"),
    [
        (BF16, BF16, 3e-3),
        pytest.param(BF16, F32, 1e-6, marks=pytest.mark.slow),
        (F16, F32, 1e-6),
    ],
)
def test_output_types(dtype, out_dtype, limit):
    x, w = operands(208, 144, 208, dtype)
    y = run(x, w, SMALL, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    assert relative_error(y, reference(x, w)) < limit


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_addend_and_transform_are_applied_in_float32_before_the_rounding(overlap):
    x, w = operands(208, 160, 224)
    addend = jnp.asarray(np.random.default_rng(1).standard_normal((208, 224)) * 30, F32)
    config = small(overlap_epilogue=overlap)
    y = run(x, w, config, addend=addend, transform=lambda part: part * part)
    assert relative_error(y, reference(x, w, addend) ** 2) < 3e-4


@pytest.mark.parametrize("config", [small(k_snake=1), small(cluster_m=2)], ids=["one", "cluster"])
def test_scheduled_order_gives_the_same_bits_as_the_natural_one(config):
    x, w = operands(256, 144, 336)
    tiles = config.tiles(256, 336)
    table = tile_loop.NaturalOrder(tiles, 1, "n").table()
    np.random.default_rng(2).shuffle(table)
    scheduled = run(x, w, config, table=jnp.asarray(table))
    np.testing.assert_array_equal(scheduled, run(x, w, config))


@pytest.mark.parametrize(("m", "k", "n"), [(0, 64, 128), (64, 64, 0), (64, 0, 128)])
def test_empty_products(m, k, n):
    x, w = jnp.zeros((m, k), F16), jnp.zeros((k, n), F16)
    addend = jnp.full((m, n), 2.0, F16)
    y = run(x, w, SMALL, addend=addend, transform=lambda part: part + 1)
    np.testing.assert_array_equal(y, np.full((m, n), 3.0))


# -- the seam ------------------------------------------------------------------------------------

M, K, N = 256, 192, 384
TILES = SMALL.tiles(M, N)


def run_with_hooks(config, hooks, logs):
    """The product in natural order by one worker; ``hooks(x, y, *log_refs)`` makes the hooks."""
    x, w = operands(M, K, N)

    def kernel_body(x_ref, w_ref, y_ref, *log_refs):
        order = tile_loop.NaturalOrder(TILES, config.group, config.minor)
        loop = tile_loop.TileLoop(order, lax.axis_index(body.CTA_AXIS), 1)
        loop = dataclasses.replace(loop, **hooks(x_ref, y_ref, *log_refs))
        operands_of = Operands(x_ref, w_ref, y_ref)
        body.compute_tiles(operands_of, config, loop, flat_views=False)

    found = plgpu.kernel(
        kernel_body,
        out_type=(jax.ShapeDtypeStruct((M, N), F16), *logs),
        grid=(1,),
        grid_names=(body.CTA_AXIS,),
        cluster=(1, 1),
        cluster_names=CLUSTER_AXES,
        num_threads=3,
        thread_name=body.WARPGROUP_AXIS,
        interpret=plgpu.InterpretGPUParams(),
    )(x, w)
    return reference(x, w), *found


def test_hooks_before_tiles_and_k_steps_are_called_in_order():
    logs = [jax.ShapeDtypeStruct((np.prod(TILES), 3), jnp.int32)]
    logs += [jax.ShapeDtypeStruct((np.prod(TILES) * 3,), jnp.int32)]

    def hooks(x_ref, y_ref, tiles, steps):
        def before_tile(tile):
            tiles[tile.step, 0], tiles[tile.step, 1] = tile.m, tile.n
            tiles[tile.step, 2] = tile.chunk

        def before_k_step(tile, k):
            steps[tile.step * 3 + k] = tile.step * 10 + k

        return dict(before_tile=before_tile, before_k_step=before_k_step)

    expected, y, tiles, steps = run_with_hooks(SMALL, hooks, logs)
    assert relative_error(y, expected) < 3e-4
    np.testing.assert_array_equal(tiles, tile_loop.NaturalOrder(TILES, SMALL.group).table())
    assert list(steps) == [10 * step + k for step in range(np.prod(TILES)) for k in range(3)]


@pytest.mark.parametrize("overlap", [False, True])
def test_after_tile_finds_all_parts_in_memory(overlap):
    """The hook copies one element of each warpgroup's part from y: they must be there by then."""
    logs = [jax.ShapeDtypeStruct((*TILES, 2), F16)]

    def hooks(x_ref, y_ref, probe):
        def after_tile(tile):
            for wg in range(2):
                row, column = tile.m * 128 + wg * 64 + 5, tile.n * 128 + 7
                probe[tile.m, tile.n, wg] = y_ref[row, column]

        return dict(after_tile=after_tile)

    config = small(overlap_epilogue=overlap, tile_k=32)
    assert config.overlaps(F16, -(-K // 32)) == overlap
    expected, y, probe = run_with_hooks(config, hooks, logs)
    assert relative_error(y, expected) < 3e-4
    parts = np.asarray(y).reshape(TILES[0], 2, 64, TILES[1], 128)
    np.testing.assert_array_equal(probe, parts[:, :, 5, :, 7].transpose(0, 2, 1))


# -- lowering for the GPU ------------------------------------------------------------------------

BASE = MatmulConfig()
LOWERED = {
    "base": (BASE, (8192, 4096, 3584), {}),
    "float16": (BASE, (4096, 1024, 1024), {"dtype": F16}),
    "float32_output": (BASE, (1001, 1032, 1088), {"out_dtype": F32}),
    "not_overlapped": (
        MatmulConfig(tile_m=256, tile_n=192, stages=3, epilogue_slots=3),
        (8192, 4096, 2304),
        {},
    ),
    "narrow_swizzle": (MatmulConfig(tile_n=224, epilogue_n=32), (8192, 8192, 7392), {}),
    "split_columns": (MatmulConfig(split="n"), (1024, 1024, 1024), {}),
    "nothing_in_flight": (MatmulConfig(in_flight=0), (1024, 1024, 1024), {}),
    "k_snake": (MatmulConfig(k_snake=8), (8192, 7168, 8192), {}),
    "cluster_along_m": (MatmulConfig(cluster_m=2, group=8), (1000, 3696, 8192), {}),
    "cluster_along_n": (MatmulConfig(cluster_n=2), (1001, 3696, 8192), {}),
    "cluster_of_four": (MatmulConfig(cluster_m=2, cluster_n=2), (1001, 3696, 8192), {}),
    "w_transposed": (BASE, (1001, 3688, 3688), {"w_transposed": True}),
    "x_transposed": (BASE, (1008, 3688, 3712), {"x_transposed": True}),
    "addend": (BASE, (1000, 1032, 1088), {"addend": F32}),
    "scheduled": (BASE, (8192, 4096, 3584), {"scheduled": True}),
    "scheduled_with_flags": (BASE, (8192, 4096, 3584), {"scheduled": True, "flags": True}),
    "tiny": (BASE, (3, 8, 64), {}),
}


@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_the_gpu(name):
    config, (m, k, n), options = LOWERED[name]
    options = dict(options)
    dtype = options.pop("dtype", BF16)
    x_shape = (k, m) if options.get("x_transposed") else (m, k)
    w_shape = (n, k) if options.get("w_transposed") else (k, n)
    arrays = {"x": (x_shape, dtype), "w": (w_shape, dtype)}
    if "addend" in options:
        arrays["addend"] = ((m, n), options.pop("addend"))
    if options.pop("scheduled", False):
        arrays["table"] = ((int(np.prod(config.tiles(m, n))), 3), jnp.int32)
    if options.pop("flags", False):
        arrays["flags"] = ((8,), jnp.int32)
    shapes = {key: jax.ShapeDtypeStruct(*value) for key, value in arrays.items()}
    function = functools.partial(kernel.matmul, config=config, num_sms=132, **options)
    lowered = jax.jit(function).trace(**shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


# -- refusals ------------------------------------------------------------------------------------

REFUSED = {
    "contraction": (
        ((64, 64), (72, 64)),
        {},
        {},
        r"x \(64, 64\) contracts over 64 elements and w \(72, 64\) over 72",
    ),
    "types": (((64, 64), (64, 64)), {"dtype": F32}, {}, r"operands are float32 and float32"),
    "output": (((64, 64), (64, 64)), {}, {"out_dtype": jnp.int8}, r"the output is int8"),
    "addend": (
        ((64, 64), (64, 128)),
        {"addend": (64, 64)},
        {},
        r"the addend is \(64, 64\); it must be as the result, \(64, 128\)",
    ),
    "config": (((64, 64), (64, 64)), {}, {"config": MatmulConfig(tile_m=192)}, r"is 96x256"),
    "sms": (
        ((64, 64), (64, 64)),
        {},
        {"config": MatmulConfig(cluster_m=2), "num_sms": 1},
        r"a cluster of 2 CTAs needs as many SMs; there are 1",
    ),
    "swizzle": (
        ((64, 64), (64, 72)),
        {},
        {},
        r"\(64, 64\) and \(64, 72\); rows that .* need a multiple of 32 bytes",
    ),
    "k": (
        ((64, 68), (68, 64)),
        {},
        {},
        r"x has rows of 68 elements of bfloat16; .* multiple of 16 bytes",
    ),
    "tiles": (
        ((60, 64), (64, 336)),
        {},
        {},
        r"\(60, 64\) is copied in tiles of \(8, 16\), which must divide it",
    ),
    "addend_tiles": (
        ((64, 64), (64, 80)),
        {"addend": (64, 80), "addend_dtype": F32},
        {},
        r"\(64, 80\) is copied in tiles of \(8, 32\), which must divide it",
    ),
    "output_rows": (
        ((64, 64), (68, 64)),
        {},
        {"w_transposed": True},
        r"y has rows of 68 elements of bfloat16; they must be a multiple of 16 bytes",
    ),
    "flags": (((64, 64), (64, 64)), {"flags": (1,)}, {}, r"flags are waited for .*; pass table"),
    "table": (
        ((64, 64), (64, 512)),
        {"table": (1, 3)},
        {},
        r"table is \(1, 3\); the 1x2 tiles of this config need \(2, 3\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_says_what_was_found_and_needed(name):
    (x_shape, w_shape), arrays, options, message = REFUSED[name]
    dtype = arrays.get("dtype", BF16)
    x, w = jax.ShapeDtypeStruct(x_shape, dtype), jax.ShapeDtypeStruct(w_shape, dtype)
    given = {
        key: jax.ShapeDtypeStruct(arrays[key], of)
        for key, of in (
            ("addend", arrays.get("addend_dtype", BF16)),
            ("table", jnp.int32),
            ("flags", jnp.int32),
        )
        if key in arrays
    }
    options = {"config": BASE, "num_sms": 132, **options}
    with pytest.raises((InputError, UnsupportedError), match=message):
        jax.eval_shape(functools.partial(kernel.matmul, **options), x, w, **given)


def test_shared_memory_over_the_limit_is_a_reason():
    x = jax.ShapeDtypeStruct((64, 64), BF16)
    reason = kernel.unsupported_reason(Operands(x, x, x), BASE, Limits(132, 100_000))
    assert reason is not None
    assert "takes 230400 bytes of shared memory and a block has 100000" in reason


def test_no_config_suits_names_each_reason():
    x, w = jax.ShapeDtypeStruct((64, 64), BF16), jax.ShapeDtypeStruct((64, 72), BF16)
    y = jax.ShapeDtypeStruct((64, 72), BF16)
    with pytest.raises(
        UnsupportedError, match=r"no config suits; .*128x256: .*\(64, 72\)"
    ) as caught:
        kernel.pick_config(Operands(x, w, y), H200)
    assert str(caught.value).count("need a multiple of 32 bytes") == 5


def test_default_config_avoids_what_does_not_suit():
    """The tile whose swizzle is narrower could not clip this K."""
    x, w, y = (jax.ShapeDtypeStruct(s, BF16) for s in ((8192, 3688), (3688, 3584), (8192, 3584)))
    config = kernel.pick_config(Operands(x, w, y), H200)
    assert config.tile_n % 64 == 0
