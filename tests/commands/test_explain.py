"""``syncopate explain``."""

from __future__ import annotations

import json

import pytest

from syncopate_jax.cli import main
from syncopate_jax.registry import operators


def _out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_an_unknown_operator_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "matmul", "--shape", "8,8,8"]) == 2
    assert "no operator is called 'matmul'; known: all_gather_matmul" in capsys.readouterr().err


@pytest.mark.parametrize("operator", operators.names())
def test_every_operator_is_explained(operator: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", operator, "--ranks", "4", "--shape", "512,512,512", "--target", "tpu"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(_out(capsys))
    assert found["auto"] == "xla"
    assert found["backends"]["xla"] == {"can": True, "reason": "", "gradients": ""}
    assert found["backends"]["remote_dma"] == {"can": True, "reason": "", "gradients": ""}
    predicted = found["predicted_us"][str(found["best_split"])]
    assert predicted["bound"] <= predicted["fused"] <= predicted["unfused"] * 1.001
    assert all(predicted["fused"] <= other["fused"] for other in found["predicted_us"].values())


def test_a_backend_that_cannot_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", "all_gather_matmul", "--ranks", "2", "--shape", "256,256,256"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "remote_dma      works with target 'tpu', not 'mosaic_gpu'" in out
    assert "backend 'auto' takes xla for this shape on h200: no measurement says" in out


def test_gradients_that_are_not_fused(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", "all_gather_matmul", "--ranks", "2", "--shape", "256,256,256"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(_out(capsys))["backends"]
    assert found["tma_dedicated"]["gradients"] == ""
    assert found["copy_engine"]["can"]
    assert found["copy_engine"]["gradients"].startswith("one is refused: no backend can fuse plan")
    assert main([*argv, "--result-dtype", "float32"]) == 0
    out = _out(capsys)
    assert "over all ranks, bfloat16 to float32\n" in out
    said = "  tma_dedicated   can do it\n                  of its gradients: xla computes them, as "
    assert f"{said}they multiply bfloat16 by float32 in float32, and the kernels of target" in out


def test_auto_is_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", "matmul_reduce_scatter", "--ranks", "2", "--shape", "4096,14336,4096"]
    assert main([*argv, "--json"]) == 0
    assert json.loads(_out(capsys))["auto"] == "tma_colocated"
    assert main([*argv, "--target", "tpu"]) == 0
    assert "'auto' takes xla for this shape on h200: with target 'tpu' none" in _out(capsys)
    assert main([*argv, "--json", "--dtype", "float32"]) == 0
    assert json.loads(_out(capsys))["auto"] == "xla"
    assert main([*argv, "--json", "--result-dtype", "float32"]) == 0
    assert json.loads(_out(capsys))["auto"] == "xla"
    assert main([*argv, "--json", "--topology", "h100"]) == 0
    assert json.loads(_out(capsys))["auto"] == "xla"


def test_a_topology_without_the_links_has_no_prediction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["explain", "all_gather_matmul", "--shape", "512,512,512", "--target", "tpu"]
    assert main([*argv, "--topology", "nodes:2x4"]) == 0
    out = capsys.readouterr().out
    assert "  xla             can do it\n" in out
    assert "no prediction on nodes:2x4: simulate all_gather_swizzle: rank 0 op 3 travels" in out
    assert main([*argv, "--topology", "nodes:2x4", "--json"]) == 0
    found = json.loads(_out(capsys))
    assert (found["best_split"], found["predicted_us"]) == (None, {})
    assert found["no_prediction"].startswith("simulate all_gather_swizzle")


def test_float64_is_left_to_xla(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", "all_gather_matmul", "--shape", "512,512,512", "--target", "tpu", "--json"]
    assert main([*argv, "--dtype", "float64"]) == 0
    found = json.loads(_out(capsys))["backends"]
    assert found["xla"]["can"]
    assert "would lose half of float64's digits" in found["remote_dma"]["reason"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shape", "1,2"], "--shape '1,2': needs three integers M,K,N"),
        (["--shape", "8,0,8"], "--shape '8,0,8': needs integers of 1 to 2147483647, found 0"),
        (["--shape", "9,8,8"], "M = 9 is not a multiple of the 8 ranks that share it; pad it"),
        (
            ["--shape", "9,8,6", "--ranks", "6"],
            "M = 9 is not a multiple of the 6 ranks that share it; pad it to 12, or take --ranks "
            "that divide it, such as 3",
        ),
        (["--shape", "8,8,8", "--ranks", "0"], "--ranks must be at least 1, found 0"),
        (["--shape", "8,8,8", "--topology", "moon"], "moon"),
        (
            ["--shape", "8,8,8", "--dtype", "int8"],
            "--dtype 'int8' is none that operators take; needs one of float32, bfloat16",
        ),
        (["--shape", "8,8,8", "--result-dtype", "int8"], "--result-dtype 'int8' is none that"),
        (["--shape", "8,8,8", "--target", "fpga"], "no local kernel is written for 'fpga'; known:"),
    ],
)
def test_bad_input_is_named(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "all_gather_matmul", *argv]) == 2
    assert message in capsys.readouterr().err
