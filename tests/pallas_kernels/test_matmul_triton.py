"""Matrix products in Triton alone, in its interpreter, against NumPy; ragged sizes too."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("triton")

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


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "stages", "flat"),
    [
        ("bfloat16", "bfloat16", 3, True),
        ("bfloat16", "float32", 4, False),  # 144 KiB of stages and 128 of a tile are too much
        ("float32", "float32", 2, False),
    ],
)
def test_the_usual_product_is_flat_where_memory_is_enough(
    dtype: str, out_dtype: str, stages: int, flat: bool
) -> None:
    config = MatmulConfig.usual(dtype, out_dtype)
    assert config == MatmulConfig(num_stages=stages, flat=flat) and config.persistent
    kernel = matmul_triton.matmul(256, 64, 256, out_dtype)
    same = MatmulConfig.usual(out_dtype, out_dtype)
    assert kernel.triton_body.arguments["FLAT"] == same.flat
    assert kernel.triton_body.num_stages == same.num_stages
