"""Matrix products in Triton alone, in its interpreter, against NumPy; ragged sizes too."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("triton")

from syncopate_jax.errors import InputError
from syncopate_jax.kernel import directives_tree
from syncopate_jax.pallas_kernels import matmul_triton
from syncopate_jax.pallas_kernels.matmul_triton import MatmulConfig
from tests.pallas_kernels.examples import Example
from tests.triton_interpret import run_alone

CONFIGS = {
    "one tile a program": MatmulConfig(16, 16, 16, group=2, persistent=False),
    "persistent": MatmulConfig(16, 16, 16, group=2, flat=False),
    "flat": MatmulConfig(16, 16, 16, group=2),
    "descriptors": MatmulConfig(16, 16, 16, group=2, described=True, flat=False),
    "descriptors, flat": MatmulConfig(16, 16, 16, group=2, described=True),
    "descriptors, flat, 1 part": MatmulConfig(16, 16, 16, group=2, described=True, parts=1),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("m", "k", "n"), [(32, 32, 32), (40, 20, 24)])
def test_matmul(config: MatmulConfig, m: int, k: int, n: int) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    y = np.full((m, n), np.nan, np.float32)
    rows, columns = config.tiles(m, n)
    grid = 4 if config.walks else rows * columns
    arguments = config.arguments(m, k, n, grid)
    run_alone(config.kernel, grid, {"x_ptr": x, "w_ptr": w, "y_ptr": y}, **arguments)
    np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)
    kernel = matmul_triton.matmul(m, k, n, "float32", config, grid)
    assert kernel.grid == (rows, columns, -(-k // 16)) and kernel.reference is not None
    np.testing.assert_allclose(kernel.reference(x, w), x @ w, rtol=1e-4, atol=1e-4)


EXAMPLES = tuple(
    Example(
        name,
        matmul_triton.matmul,
        functools.partial(matmul_triton.matmul, 40, 20, 24, "float32", config, 4),
        {"x": (40, 20), "w": (20, 24)},
    )
    for name, config in CONFIGS.items()
)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_kernels_have_directives(config: MatmulConfig) -> None:
    found = directives_tree.read(config.kernel)
    assert found.accumulator == "total" and (found.loop is not None) == config.walks


LATE = MatmulConfig(16, 32, 16, group=2, described=True, late=1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("m", "k", "n", "grid"), [(64, 80, 64, 3), (40, 104, 88, 2), (16, 96, 32, 4)]
)
def test_a_tile_is_stored_under_the_next_one(dtype: str, m: int, k: int, n: int, grid: int) -> None:
    """Programs with several tiles, one and none."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n)))
    y = np.full((m, n), np.nan, dtype)
    arguments = LATE.arguments(m, k, n, grid)
    run_alone(LATE.kernel, grid, {"x_ptr": x, "w_ptr": w, "y_ptr": y}, **arguments)
    wanted = x.astype(np.float32) @ w.astype(np.float32)
    within = 1e-4 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(y, wanted, rtol=within, atol=within)


@pytest.mark.parametrize(
    ("config", "k", "n", "message"),
    [
        (LATE, 64, 64, r"late=1 needs 5 k steps of 16, found K = 64"),
        (LATE, 100, 66, r"rows of a multiple of 16 bytes, found N = 66 of float32"),
        (MatmulConfig(described=True), 514, 512, r"found K = 514 of bfloat16"),
    ],
)
def test_what_descriptors_and_late_stores_cannot_is_refused(
    config: MatmulConfig, k: int, n: int, message: str
) -> None:
    dtype = "float32" if config is LATE else "bfloat16"
    with pytest.raises(InputError, match=message):
        matmul_triton.matmul(64, k, n, dtype, config, 4)


FLAT = MatmulConfig(num_stages=3)
DESCRIBED = MatmulConfig(described=True)


@pytest.mark.parametrize(
    ("mkn", "dtype", "out_dtype", "wanted"),
    [
        ((8192, 4096, 4096), "bfloat16", "bfloat16", MatmulConfig(described=True, late=2)),
        ((8192, 4096, 1536), "bfloat16", "bfloat16", DESCRIBED),  # three tiles a program
        ((8192, 320, 4096), "bfloat16", "bfloat16", DESCRIBED),  # five k steps
        ((8192, 4096, 4092), "bfloat16", "bfloat16", FLAT),  # rows of 8184 bytes
        # 144 KiB of stages and 128 of a tile are too much
        ((8192, 4096, 4096), "bfloat16", "float32", MatmulConfig(num_stages=4, flat=False)),
        ((8192, 4096, 4096), "float32", "float32", MatmulConfig(num_stages=2, flat=False)),
    ],
)
def test_the_usual_product_is_late_or_flat_where_it_can_be(
    mkn: tuple[int, int, int], dtype: str, out_dtype: str, wanted: MatmulConfig
) -> None:
    assert MatmulConfig.usual(mkn, dtype, out_dtype, 128) == wanted
    assert MatmulConfig(persistent=False, late=2).walks
    kernel = matmul_triton.matmul(*mkn, out_dtype, programs=128)
    same = MatmulConfig.usual(mkn, out_dtype, out_dtype, 128)
    assert kernel.triton_body.arguments == same.arguments(*mkn, 128)
    assert kernel.triton_body.num_stages == same.num_stages
