import argparse
import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common import check, results, shapes, timing
from experiments.local_gemm import run, sweep
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu as kernel
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import Limits, MatmulConfig


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


def test_a_sweep_measures_its_choice_again(monkeypatch):
    monkeypatch.setattr(kernel, "matmul", lambda x, w, config: x @ w)
    monkeypatch.setattr(Limits, "of", classmethod(lambda cls, device, **_: cls(5, 232448)))
    monkeypatch.setattr(sweep, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "BLOCK_MS", 0.0)
    gemm = shapes.Gemm("tiny", 256, 64, 1536)
    row = sweep.search(gemm, argparse.Namespace(without=["stagger"], rounds=1))
    names = set(row["search"]["busy"])
    assert {"xla", "tuned", "128x256 split", "256x192 split"} <= names
    assert not any("stagger" in name for name in names)
    assert set(row["again"]["bursts"]) == {"xla", "tuned", row["winner"]}
    assert row["wrong"] == {} and row["errors"]["xla"][0] < check.MEAN_LIMIT
    found = sweep.summary([row, {"ended": 0}])
    assert found["busy winner"] == {
        "geomean": row["speedup"]["busy"], "least": row["speedup"]["busy"], "shapes": 1,
    }  # fmt: skip


def test_a_wrong_candidate_is_named_and_left_out(monkeypatch):
    def product(x, w, config):
        return jnp.zeros_like(x @ w) if config.split_last else x @ w

    monkeypatch.setattr(kernel, "matmul", product)
    monkeypatch.setattr(Limits, "of", classmethod(lambda cls, device, **_: cls(5, 232448)))
    monkeypatch.setattr(sweep, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "BLOCK_MS", 0.0)
    gemm = shapes.Gemm("tiny", 256, 64, 1536)
    row = sweep.search(gemm, argparse.Namespace(without=["stagger"], rounds=1))
    assert set(row["wrong"]) == {"128x256 split", "256x192 split"}
    assert "rows are wrong by" in row["wrong"]["256x192 split"]
    assert not set(row["wrong"]) & set(row["search"]["busy"])


def test_what_a_sweep_chose_is_adopted(tmp_path, monkeypatch):
    tuned = tmp_path / "configs" / sweep.config_module.TUNED_FILE
    tuned.parent.mkdir()
    kept = {"m": 1, "n": 2, "k": 3, "config": {"k_snake": 8}}
    tuned.write_text(json.dumps({"H": [kept, {"m": 4, "n": 5, "k": 6, "config": {}}], "other": []}))
    monkeypatch.setattr(sweep.config_module, "__file__", str(tuned.with_name("module.py")))
    chosen = {"m": 4, "n": 5, "k": 6, "config": {"stagger": 2}}
    rows = [{**chosen, "winner": "128x256 stagger"}, {"ended": 0}]
    results.write(tmp_path / "swept.json", {"device": "1x H"}, rows)
    sweep.main(["--adopt", str(tmp_path / "swept.json")])
    assert json.loads(tuned.read_text()) == {"H": [kept, chosen], "other": []}
