import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common import check, results, shapes, timing
from experiments.local_gemm import run
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig


@pytest.mark.parametrize("chunks", run.CHUNKS)
def test_chunk_table_takes_the_chunks_in_order_and_each_tile_once(chunks):
    gemm = shapes.Gemm("", 8192, 4096, 3584)
    table = run.chunk_table(MatmulConfig(), gemm, chunks)
    assert list(table[:, 2]) == sorted(table[:, 2])
    assert {(m, n) for m, n, _ in table.tolist()} == set(np.ndindex(64, 14))
    np.testing.assert_array_equal(table[:, 0] * chunks // 64, table[:, 2])


def test_no_chunk_table_where_tiles_straddle_chunks():
    assert run.chunk_table(MatmulConfig(), shapes.Gemm("", 1920, 64, 256), 4) is None


def test_one_wrong_element_is_found():
    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.standard_normal((256, 256)), jnp.bfloat16) for _ in range(2))
    y = jnp.dot(x, w)
    assert check.checked_error("right", y, x, w)[0] < 3e-3
    wrong = y.at[200, 17].set(0)
    with pytest.raises(ValueError, match=r"wrong: rows are wrong by .* and .* \(largest\)"):
        check.checked_error("wrong", wrong, x, w)


def test_each_version_is_timed_once_a_round():
    versions = {"a": lambda x: x + 1, "b": lambda x: x * 2}
    seconds = timing.interleaved_seconds(versions, [(jnp.ones(()),)], rounds=3, calls=2)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}
    assert min(min(values) for values in seconds.values()) > 0


def test_results_are_read_back_as_written(tmp_path):
    head, rows = {"experiment": "e", "summary": {"x": 1}}, [{"name": "a"}, {"name": "b"}]
    results.write(tmp_path / "deeper" / "r.json", head, rows)
    assert json.loads((tmp_path / "deeper" / "r.json").read_text()) == {**head, "rows": rows}


def test_the_script_checks_times_and_writes_tiny_products(tmp_path):
    out = tmp_path / "tiny.json"
    argv = ["--tiny", "--only", "ragged", "--rounds", "1", "--block-ms", "0", "--min-calls", "1"]
    head = run.main([*argv, "--out", str(out)])
    [row] = json.loads(out.read_text())["rows"]
    assert row["name"] == "tiny/ragged"
    assert row["errors_before"]["natural"][0] < check.MEAN_LIMIT
    assert head["summary"]["speedup_min"] == row["speedup"]
