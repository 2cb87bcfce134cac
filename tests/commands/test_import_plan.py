"""``syncopate import``: what it prints and writes, and its errors."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import jax
import pytest

from syncopate_jax import cli
from syncopate_jax.check.verify import verify
from syncopate_jax.commands.import_plan import readers
from syncopate_jax.commands.plan_files import read_plan
from syncopate_jax.registry import importers, templates

FIXTURES = Path(__file__).parents[1] / "fixtures"
MLP = FIXTURES / "hlo" / "mlp.hlo"
RING = FIXTURES / "mercury" / "reduce_ring.txt"
BY_TEMPLATE = ("--how", "template", "--choose")


def run(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    code = cli.main(["import", *map(str, argv)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_lists_the_importers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--list")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert names == list(importers.names()) and {"alpa", "domino", "hlo", "mercury"} <= {*names}
    assert (
        "\nshardings  no file, called in Python as syncopate_jax.importers.shardings.derive: The"
        in out
    )
    code, out, _ = run(capsys, "--list", "--json")
    assert [item["name"] for item in json.loads(out)] == names
    assert [item["name"] for item in json.loads(out) if item["file"]] == list(readers())


def test_says_what_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "hlo", MLP)
    assert (code, err) == (0, "")
    assert "reduce_scatter.7 reduce_scatter float32[4, 16]" in out
    assert "[matmul_reduce_scatter in ba,ac->bc: [reduce_scatter out b over ranks + dot]]" in out


@pytest.mark.parametrize(
    ("how", "form"), [("direct", "json"), ("template", "text"), ("synthesis", "json")]
)
def test_writes_plans(
    how: str, form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = ("--out", tmp_path / "new", "--how", how, "--format", form, "--topology", "nodes:2x4")
    code, out, _ = run(capsys, "hlo", MLP, *more, "--json")
    found = json.loads(out)
    assert (code, found["ranks"], len(found["files"])) == (0, 8, 2)
    assert [one["kind"] for one in found["collectives"]] == ["all_gather", "reduce_scatter"]
    for file in found["files"]:
        plan = read_plan(file)
        assert verify(plan) == ()
        assert plan.has_collectives() == (how == "direct")


def test_says_what_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "mercury", RING, "--out", tmp_path)
    assert code == 0
    ring, scatter = out.splitlines()[-2:]
    assert ring == f"{tmp_path / '000_x_ring.0.json'}: 000_x_ring.0, 4 ranks, 16 operations"
    assert scatter.endswith(": 001_part_reduce_scatter.1, 4 ranks, 4 operations")


def test_a_ring_stays_one_unless_another_template_is_chosen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def origin(folder: str, *more: str) -> str:
        args = ("--out", tmp_path / folder, "--how", "template", *more, "--json")
        code, out, _ = run(capsys, "mercury", RING, *args)
        assert code == 0
        return read_plan(json.loads(out)["files"][1]).origins[0]

    assert origin("own").startswith("reduce_scatter_ring(")
    chosen = origin("other", "--choose", "reduce_scatter=reduce_scatter_direct")
    assert chosen.startswith("reduce_scatter_direct(")


def test_a_collective_that_no_plan_does_is_said_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = RING.with_name("all_reduce.txt").read_text().replace("torch.add(", "merge(")
    (tmp_path / "own.txt").write_text(own)
    code, out, _ = run(capsys, "mercury", tmp_path / "own.txt", "--out", tmp_path / "plans")
    assert code == 1
    assert f"nothing was written to {tmp_path / 'plans'}: no collective" in out
    assert "no plan: all_reduce part:all_reduce.0: plans reduce by sum or max, this one by" in out
    assert list((tmp_path / "plans").iterdir()) == []
    code, out, _ = run(capsys, "mercury", tmp_path / "own.txt", "--json")
    assert json.loads(out)["collectives"][0]["no_plan"].startswith("all_reduce part")


def test_a_program_without_collectives_leaves_nothing_to_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    local = tmp_path / "local.hlo"
    local.write_text(jax.jit(lambda x: 2 * x).lower(1.0).as_text())
    assert run(capsys, "hlo", local, "--out", tmp_path, "--json")[0] == 1
    assert run(capsys, "hlo", local)[0] == 0


def test_reads_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(RING.read_bytes())))
    code, out, _ = run(capsys, "mercury", "-")
    assert (code, out.splitlines()[0]) == (0, "mercury weighted: 4 ranks")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "import: needs IMPORTER and FILE; import --list shows the importers"),
        (("hlo",), "import: needs IMPORTER and FILE"),
        (("xla", MLP), "no importer of files is called 'xla'; known: "),
        (("shardings", MLP), "no importer of files is called 'shardings'"),
        (("alpa", MLP), f"{MLP}: alpa: is not JSON"),
        (("hlo", "none", "--how", "magic"), "--how 'magic' is not one of template, direct"),
        (("hlo", "none", "--how", "synthesis"), "import: --how synthesis needs --topology"),
        (("hlo", MLP, *BY_TEMPLATE, "x"), "import: --choose 'x' must be KIND=TEMPLATE"),
        (
            ("hlo", "none", *BY_TEMPLATE, "scan=broadcast"),
            "import: --choose 'scan=broadcast': kind 'scan' is not one of all_gather,",
        ),
        (
            ("hlo", "none", *BY_TEMPLATE, "all_reduce=foo"),
            f"no plan template is called 'foo'; known: {', '.join(templates.names())}",
        ),
        (
            ("hlo", "none", *BY_TEMPLATE, "all_reduce=all_gather_ring"),
            "import: --choose 'all_reduce=all_gather_ring': template all_gather_ring does not fit "
            "all_reduce over (0, 1, 2, 3): it has no argument 'reduce'",
        ),
        (
            ("hlo", "none", *BY_TEMPLATE, "all_gather=broadcast"),
            "template broadcast does not fit all_gather over (0, 1, 2, 3): it has no argument",
        ),
        (
            ("hlo", "none", *BY_TEMPLATE, "all_gather=synthesis"),
            "import: --choose 'all_gather=synthesis' needs --topology",
        ),
        (
            ("hlo", "none", "--choose", "all_gather=all_gather_ring"),
            "import: --choose 'all_gather=all_gather_ring' needs --how template; with --how direct",
        ),
        (
            ("hlo", MLP.with_name("a2a.hlo"), *BY_TEMPLATE, "all_to_all=all_to_all_waves"),
            "template all_to_all_waves does not fit all_to_all over (0, 1, 2, 3): it has no",
        ),
        (("hlo", MLP, "--topology", "nodes:2x2"), "'nodes:2x2' has 4 ranks, the plan has 8"),
        (("hlo", MLP.with_name("none")), "none: No such file or directory"),
    ],
)
def test_errors(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err


def test_a_byte_order_mark_is_no_part_of_a_program(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    marked = tmp_path / "f"
    marked.write_text(MLP.read_text(), encoding="utf-8-sig")
    code, out, _ = run(capsys, "hlo", marked)
    assert code == 0 and out == run(capsys, "hlo", MLP)[1]


def test_bytes_that_are_no_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"HloModule \xff")
    code, _, err = run(capsys, "hlo", path)
    assert code == 2
    assert "f: is not UTF-8" in err
