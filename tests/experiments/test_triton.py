"""Triton's experiments without a GPU: candidates for the local product, and how parts are timed."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from experiments.common import shapes
from experiments.triton import candidates, compare, run
from experiments.triton.candidates import CANDIDATES, Candidate
from syncopate_jax.backends import triton_call
from syncopate_jax.native import build
from syncopate_jax.pallas_kernels import matmul_triton
from syncopate_jax.pallas_kernels.matmul_triton import MatmulConfig
from tests.triton_interpret import run_alone

SIZES: dict[str, int] = {"block_m": 16, "block_n": 16, "block_k": 16, "group": 2}
SMALL = {
    "pointers": Candidate(candidates.pointed, **SIZES),
    "pointers, snake": Candidate(candidates.pointed, **SIZES, snake=True, even=False),
    "descriptors, 1 part": Candidate(candidates.described, **SIZES, parts=1, flatten=False),
    "descriptors, 4 parts": Candidate(candidates.described, **SIZES, parts=4),
}


@pytest.mark.parametrize("candidate", SMALL.values(), ids=SMALL.keys())
def test_candidates_are_right(candidate: Candidate) -> None:
    m, k, n = 40, 20, 24
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    y = np.full((m, n), np.nan, np.float32)
    arrays = {"x_ptr": x, "w_ptr": w, "y_ptr": y}
    run_alone(candidate.kernel, candidate.grid(m, n, 4), arrays, **candidate.arguments(m, k, n, 4))
    np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)


def test_programs_take_no_more_turns_than_they_must() -> None:
    even, all_ = Candidate(candidates.pointed), Candidate(candidates.pointed, even=False)
    assert (even.grid(8192, 7168, 132), all_.grid(8192, 7168, 132)) == (128, 132)
    assert even.grid(128, 512, 132) == all_.grid(128, 512, 132) == 2


def test_candidates_are_what_products_are_by_default() -> None:
    wanted = {
        "late": (8192, 4096, 4096),
        "descriptors, flat, 2 parts, 3 stages": (8192, 4096, 1536),
        "pointers, flat, 3 stages": (8192, 4096, 4092),
    }
    assert next(iter(CANDIDATES)) == "late"
    kernels = []
    for name, mkn in wanted.items():
        best, usual = CANDIDATES[name], MatmulConfig.usual(mkn, "bfloat16", "bfloat16", 128)
        for size in ("block_m", "block_n", "block_k", "group", "parts"):
            assert getattr(usual, size) == getattr(best, size)
        assert (usual.num_stages, usual.num_warps, usual.flat) == (best.stages, best.warps, True)
        assert usual.late in (0, best.late)
        kernels.append((usual.kernel, best.kernel))
    assert kernels == [
        (candidates.late_matmul_kernel, candidates.late_matmul_kernel),
        (matmul_triton.described_matmul_kernel, candidates.described),
        (matmul_triton.persistent_matmul_kernel, candidates.pointed),
    ]


def test_means_are_of_candidates_that_all_shapes_have() -> None:
    rows: list[dict[str, Any]] = [
        {"of_xla": {"xla": 1.0, "slow": 0.5, "fast": 0.9, "once": 2.0}},
        {"of_xla": {"xla": 1.0, "slow": 0.5, "fast": 0.4}},
    ]
    assert compare.means(rows) == {"xla": 1.0, "fast": 0.6, "slow": 0.5}
    assert compare.means([]) == {}


def test_every_candidate_and_shape_is_lowered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def call(inputs: Any, outputs: Any, arguments: Any, **given: Any) -> list[jax.Array]:
        calls.append({**arguments, **given})
        return [jnp.zeros(out.shape, out.dtype) for out in outputs]

    monkeypatch.setattr(triton_call, "call", call)
    compare.main(["--tiny", "--lower"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["program"] for row in rows] == [f"tiny {name}" for name in CANDIDATES]
    assert all(row["lowers"] for row in rows)
    for candidate, made in zip(CANDIDATES.values(), calls, strict=True):
        assert (made["kernel"], made["num_stages"]) == (candidate.kernel, candidate.stages)
        assert made["grid"] == (made["PROGRAMS"],) and made["K"] == 512


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_streaming_is_checked_and_timed_beside_its_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A copy takes one operand and products two; without a GPU they stream before they multiply."""
    monkeypatch.setattr(run, "TINY", (shapes.Gemm("tiny", 256, 64, 256),))
    monkeypatch.setattr(run, "local", lambda *_: lambda x, w: x @ w)  # its kernel runs on GPUs only
    out = tmp_path / "out.json"
    run.main(["stream", "--tiny", "--rounds", "2", "--pause", "0", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert list(row["median_us"]) == [
        "copy, XLA", "gemm, XLA", "gemm", "stream, 16 chunks", "stream, paced",
    ]  # fmt: skip
    assert min(row["median_us"].values()) > 0 and row["best"] in row["median_us"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CANDIDATES)
def test_candidates_compile_for_hopper(name: str) -> None:
    """And fit a block, and keep a product in flight."""
    candidate = CANDIDATES[name]
    signature = {
        n: "*bf16" if n.endswith("_ptr") else "constexpr" for n in candidate.kernel.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    arguments = candidate.arguments(1024, 512, 1536, 132)
    source = ASTSource(candidate.kernel, signature, arguments, aligned)
    options = {"num_warps": candidate.warps, "num_stages": candidate.stages}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.metadata.shared <= 227 * 1024
    pending = re.findall(r"warp_group_dot_wait[^\n]*pendings = (\d)", found.asm["ttgir"])
    assert int(pending[0]) >= 1
