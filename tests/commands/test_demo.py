"""``syncopate demo``: the main job."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from syncopate_jax.cli import main
from syncopate_jax.commands import feed_forward

SMALL = ["--ranks", "2", "--tokens", "16", "--hidden", "32", "--ffn", "48"]


def test_the_layer_is_right_and_its_timeline_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "timeline.svg"
    assert main(["demo", *SMALL, "--picture", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["right"] is True
    assert set(found["errors"]) == {
        "output", "gradient of x", "gradient of w_in", "gradient of w_out"
    }  # fmt: skip
    assert all(0 < e["fused"] < 1e-5 for e in found["errors"].values())
    for predicted in found["predicted_us"].values():
        assert predicted["bound"] <= predicted["fused"] <= predicted["unfused"]
    assert picture.read_text().startswith("<svg")


def test_the_report_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "timeline.svg"
    assert main(["demo", *SMALL, "--backend", "xla", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "tensor parallel over 2 simulated devices: 16 tokens, hidden 32, inner 48" in out
    words = " ".join(out.split())
    assert "every device sends its 8 rows of x to its neighbour first" in words
    assert "by then the part from the other is there, to be added in float32" in words
    assert "each device has a tall lane for the tiles it computes" in words
    assert "predicted on 8x H200 (NVLink)" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, found 0"),
        (["--seed", "-1"], "demo: seed must be in 0..2147483647, found -1"),
        (["--seed", str(2**31)], "demo: seed must be in 0..2147483647, found 2147483648"),
        (["--tokens", "10", "--ranks", "4"], "--tokens 10 is not a multiple of --ranks 4"),
        (["--ranks", "64", "--tokens", "64"], "JAX has 8 devices"),
        ([*SMALL, "--picture", "timeline.gif"], "needs a name that ends in .svg or .png"),
        ([*SMALL, "--backend", "pigeon"], "no backend is called 'pigeon'"),
        (
            [*SMALL, "--backend", "tma_dedicated"],
            "--backend tma_dedicated needs GPUs, and the devices here are simulated on the CPU; "
            "leave it out, or give --backend xla; where each rank has a GPU, set "
            "JAX_PLATFORMS=cuda",
        ),
        ([*SMALL, "--backend", "copy_engine"], "--backend copy_engine needs GPUs"),
    ],
)
def test_bad_input_is_named(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *argv]) == 2
    assert message in capsys.readouterr().err


def test_the_float64_layer_has_the_gradient_of_its_output() -> None:
    rng = np.random.default_rng(0)
    x, w_in, w_out, ct = (rng.standard_normal(shape) for shape in ((3, 4), (4, 12), (6, 4), (3, 4)))
    _, d_x, d_in, d_out = feed_forward.in_float64(2, x, w_in, w_out, ct)

    def loss(*args: np.ndarray) -> float:
        return float((feed_forward.in_float64(2, *args, ct)[0] * ct).sum())

    for i, gradient in enumerate((d_x, d_in, d_out)):
        args = [x, w_in, w_out]
        step = rng.standard_normal(args[i].shape)
        ahead, behind = ([*args], [*args])
        ahead[i], behind[i] = args[i] + 1e-5 * step, args[i] - 1e-5 * step
        slope = (loss(*ahead) - loss(*behind)) / 2e-5
        np.testing.assert_allclose(slope, (gradient * step).sum(), rtol=1e-6)
