"""The commands ``synthesize`` and ``advise``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from syncopate_jax import cli
from syncopate_jax.check.verify import verify
from syncopate_jax.commands.plan_files import read_plan
from syncopate_jax.ir import presets, topology_json
from syncopate_jax.ir.text import from_text


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_prints_a_plan_and_how_near_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "synthesize", "all_gather", "--topology", "ring", "--ranks", "3", "--shape", "6,4"
    )
    assert code == 0
    assert verify(from_text(out)) == ()
    assert "6 operations; " in err and "times the bound of" in err


def test_saves_a_plan_for_a_file_and_a_group(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    topology_json.save(presets.nodes(2, 2), tmp_path / "t.json")
    out = str(tmp_path / "plan.json")
    arguments = ("--topology", str(tmp_path / "t.json"), "--shape", "6,4", "--group", "3,0")
    code, printed, _ = run(
        capsys, "synthesize", "all_reduce", *arguments, "--out", out, "--channels", "nic,nvlink"
    )
    assert code == 0 and printed.startswith("synthesis_all_reduce(kind=all_reduce, ")
    plan = read_plan(out)
    assert plan.num_ranks == 4 and {goal.rank for goal in plan.goals} == {0, 3}
    code, printed, _ = run(
        capsys, "synthesize", "broadcast", *arguments, "--root", "3", "--json", "--mode", "pull"
    )
    found = json.loads(printed)
    assert code == 0
    assert (found["kind"], found["ranks"], found["bound_by"]) == ("broadcast", 4, "cut")
    assert 0 < found["bound_us"] <= found["predicted_us"] * (1 + 1e-9)


def test_nothing_to_move(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(
        capsys, "synthesize", "all_gather", "--topology", "nodes:1x2", "--shape", "0"
    )
    none = "predicted; nothing has to move, so there is no bound\n"
    assert code == 0 and f"0 operations; 0.0 us {none}" in err
    one = ("--topology", "ring", "--ranks", "1", "--shape", "64")
    code, _, err = run(capsys, "synthesize", "all_reduce", *one)
    assert code == 0 and err.endswith(none) and "cut" not in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--shape", "a,4"), "--shape 'a,4': needs integers separated by commas"),
        (("--shape", "4,4", "--ranks", "0"), "--ranks must be at least 1, found 0"),
        (("--shape", "4,4", "--group", "0,9"), "group has ranks [9], topology h200_nvlink has 8"),
        (("--shape", "4,4", "--topology", "T", "--ranks", "3"), "--ranks is 3, "),
        (
            ("--shape", "4,4", "--topology", "nodes:2x2", "--ranks", "8"),
            "--ranks is 8, nodes:2x2 has 4 ranks",
        ),
        (
            ("--shape", "4,4", "--topology", "nodes:129x8"),
            "--topology nodes:129x8 has 1032 ranks, plans are made for at most 1024",
        ),
        (
            ("--shape", "4,4", "--ranks", "5000"),
            "--topology h200 has 5000 ranks, plans are made for at most 1024",
        ),
        (
            ("--shape", "4,4", "--topology", "L"),
            "l.json has 1025 ranks, plans are made for at most",
        ),
        (("--shape", "4,4", "--topology", "mesh"), "no topology preset is called 'mesh'"),
        (("--shape", "4,4", "--channels", "x"), "no channel 'x'"),
    ],
)
def test_wrong_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: tuple[str, ...], message: str
) -> None:
    for name, ranks in (("t", 4), ("l", 1025)):
        topology_json.save(presets.ring(ranks), tmp_path / f"{name}.json")
    files = {name.upper(): str(tmp_path / f"{name}.json") for name in ("t", "l")}
    words = [files.get(word, word) for word in argv]
    code, _, err = run(capsys, "synthesize", "all_gather", *words)
    assert code == 2 and message in err


def test_advises(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.svg"
    arguments = ("advise", "llama3-8b", "--ranks", "2", "--tokens", "128")
    code, out, _ = run(capsys, *arguments, "--picture", str(picture))
    assert code == 0 and "<- best" in out and "feed_forward_out" in out
    assert "llama3-8b, 128 tokens, h200_nvlink" in picture.read_text()
    code, out, _ = run(capsys, *arguments, "--degrees", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["best_degree"] == 2
    assert [layer["layer"] for layer in found["layers"]] == [
        "qkv", "attention_out", "feed_forward_in", "feed_forward_out",
    ]  # fmt: skip


def test_advice_on_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "advise", "gpt")
    assert code == 2 and "no model is called 'gpt'; known: " in err
    code, _, err = run(capsys, "advise", "llama3-8b", "--degrees", "2,x")
    assert code == 2 and "--degrees '2,x': needs integers separated by commas, such as 2,4" in err
    code, _, err = run(capsys, "advise", "llama3-8b", "--degrees", "-2")
    assert code == 2 and "--degrees '-2': needs integers of 1 to 2147483647, found -2" in err
    code, _, err = run(capsys, "advise", "llama3-8b", "--picture", "a.pdf")
    assert code == 2 and "needs a name that ends in .svg or .png" in err
    code, _, err = run(capsys, "advise", "llama3-8b", "--picture", "no/such/a.svg")
    assert code == 2 and "picture no/such/a.svg: there is no folder no/such; make it first" in err
    code, out, err = run(capsys, "advise", "llama3-8b", "--dtype", "float7")
    assert (code, out) == (2, "") and err.count("float7") == 1
    assert "advise: dtype 'float7' is not one of bfloat16, float16," in err
    code, _, err = run(capsys, "synthesize", "all_gather", "--shape", "4", "--out", "")
    assert code == 2 and "argument --out: '' names no file" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("synthesize", "all_gather", "--shape", "9" * 5000), "9…': needs integers of "),
        (("advise", "llama3-8b", "--degrees", "9" * 5000), "9…': needs integers of "),
        (
            ("synthesize", "all_to_all", "--shape", "6", "--ranks", "3", "--seed", "-1"),
            "seed must be in 0..",
        ),
    ],
)
def test_refuses_numbers_without_bounds(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2 and message in err
