"""The pages agree with the code: links and paths lead somewhere, commands and snippets run."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from syncopate_jax import cli

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests/fixtures"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
ALL_PAGES = [*PAGES, *sorted(ROOT.glob("experiments/*/README.md"))]
FOLDERS = ("docs", "experiments", "pallas_kernels", "plans", "syncopate_jax", "tests", ".ci")
SUFFIXES = "py|md|json|cc|png|svg|txtpb|ipynb"

each_page = pytest.mark.parametrize("page", ALL_PAGES, ids=lambda p: str(p.relative_to(ROOT)))

# What a page's snippets are seen to have done.
SEEN = {
    "README": "assert (y.reshape(4, *x.shape) == s).all()",
    "importers": "assert program.collectives[0].operator == 'matmul_reduce_scatter'\n"
    "assert [tensor.name for tensor in scatter.tensors] == ['x']",
    "overlap": "assert len(syncopate_jax.overlap(loss).report(w, batch).replaced) == 1",
    "own_kernels": "assert in_pairs.passed_over == {} and (summed == 4).all()",
    "triton": "assert (y.reshape(4, *x.shape) == s[:, None]).all()",
}


def blocks(page: Path, language: str) -> list[str]:
    """The page's code of a language; ``""`` for what has none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [text for named, text in found if named == language]


def prose(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def commands(page: Path) -> list[list[str]]:
    """Arguments of every ``syncopate`` command in the page's code."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("syncopate ")]


COMMANDS = [(page, commands(page)) for page in PAGES if commands(page)]
each_commands = pytest.mark.parametrize(
    ("page", "argvs"), COMMANDS, ids=[page.stem for page, _ in COMMANDS]
)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(page))
    gone = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert gone == []


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    folders = [ROOT / folder for folder in FOLDERS]
    known = [*folders, *(path for folder in folders for path in folder.rglob("*"))]
    ends = tuple(f"/{path.relative_to(ROOT)}" + "/" * path.is_dir() for path in known)
    named = re.findall(rf"`((?:[\w.-]+/)*(?:[\w.-]+\.(?:{SUFFIXES})|[\w.-]+/))`", prose(page))
    gone = [name for name in named if not any(end.endswith(f"/{name}") for end in ends)]
    assert [name for name in gone if not (page.parent / name).exists()] == []


@each_commands
def test_commands_are_understood(page: Path, argvs: list[list[str]]) -> None:
    for argv in argvs:
        assert cli._parser().parse_args(argv).command.name == argv[0]


def test_every_argument_of_every_command_has_help() -> None:
    (table,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert len(table.choices) == len(cli.COMMANDS)
    bare = [
        f"{name} {action.dest}"
        for name, command in table.choices.items()
        for action in command._actions
        if not action.help
    ]
    assert bare == []


def test_every_command_is_shown() -> None:
    shown = {argv[0] for _, argvs in COMMANDS for argv in argvs}
    assert {command.name for command in cli.COMMANDS} - shown == {"demo"}  # make demo


@pytest.mark.slow
@each_commands
def test_commands_run(
    page: Path, argvs: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(FIXTURES / "hlo/mlp.hlo", tmp_path / "step.hlo")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    for argv in argvs:
        assert cli.main(argv) == 0, argv


SNIPPETS = [(page, blocks(page, "python")) for page in PAGES if blocks(page, "python")]


def test_snippets_are_whole() -> None:
    """Every block that calls itself Python is."""
    for page, texts in SNIPPETS:
        for text in texts:
            compile(text, str(page), "exec")


@pytest.mark.slow
@pytest.mark.parametrize(("page", "texts"), SNIPPETS, ids=[page.stem for page, _ in SNIPPETS])
def test_snippets_run(page: Path, texts: list[str], tmp_path: Path) -> None:
    """Each page by itself, its blocks one after the other."""
    if page.stem == "triton":
        pytest.importorskip("jax_triton")
    script = tmp_path / "snippets.py"
    script.write_text("\n\n".join([*texts, SEEN.get(page.stem, "")]))
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environ.pop("XLA_FLAGS", None)
    found = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
