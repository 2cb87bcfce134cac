"""The scripts that find a Python and make environments say what is wrong and harm nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has a shell, but neither Python, pyenv nor uv."""
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "head", "rm", "sort", "tail"):
        found = shutil.which(tool)
        assert found, f"{tool} is not on PATH"
        (tmp_path / "bin" / tool).symlink_to(found)
    return {"PATH": str(tmp_path / "bin"), "PYENV_ROOT": str(tmp_path), "HOME": str(tmp_path)}


def add_tool(machine: dict[str, str], name: str, script: str) -> str:
    path = Path(machine["PATH"]) / name
    path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
    path.chmod(0o755)
    return str(path)


def call(machine: dict[str, str], script: str, *arguments: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [str(CI / script), *map(str, arguments)],
        env=machine,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout.strip(), done.stderr


def test_no_python_is_a_clear_error(machine: dict[str, str]) -> None:
    code, out, err = call(machine, "find_python")
    assert (code, out) == (1, "")
    assert "No Python 3.12 or newer was found" in err and "PYTHON=/path/to/python3.12" in err


def test_a_shim_that_fails_and_an_old_python_are_passed_over(machine: dict[str, str]) -> None:
    add_tool(machine, "python3.12", "echo 'python3.12: command not found' >&2; exit 127")
    add_tool(machine, "python3", "exit 1")
    assert call(machine, "find_python")[0] == 1
    good = add_tool(machine, "python3.13", f'exec "{sys.executable}" "$@"')
    assert call(machine, "find_python") == (0, good, "")


def test_a_version_that_pyenv_holds_is_found(machine: dict[str, str]) -> None:
    bin_folder = Path(machine["PYENV_ROOT"]) / "versions" / "3.12.1" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to(sys.executable)
    assert call(machine, "find_python") == (0, str(bin_folder / "python"), "")


def test_a_named_python_is_taken_or_refused(machine: dict[str, str]) -> None:
    assert call(machine | {"PYTHON": sys.executable}, "find_python")[:2] == (0, sys.executable)
    code, _, err = call(machine | {"PYTHON": "/nowhere/python"}, "find_python")
    assert code == 1 and "PYTHON=/nowhere/python does not run, is older than 3.12" in err


def test_uv_brings_a_python_where_there_is_none(machine: dict[str, str]) -> None:
    script = """
case "$*" in
    "python install 3.12") echo installing >&2 ;;
    "python find 3.12") echo /brought/python ;;
    --version) ;;
    *) exit 2 ;;
esac"""
    add_tool(machine, "uv", script)
    assert call(machine, "find_python") == (0, "/brought/python", "installing\n")
    assert call(machine | {"INSTALLER": "pip"}, "find_python")[0] == 1


def test_a_folder_that_is_no_environment_is_left_alone(
    machine: dict[str, str], tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("ten years")
    code, _, err = call(machine, "make_env", precious, "test")
    assert code == 1 and f"{precious} exists and is no virtual environment: move it" in err
    assert (precious / "thesis.txt").read_text() == "ten years"


def test_an_unknown_installer_is_refused(machine: dict[str, str], tmp_path: Path) -> None:
    machine |= {"PYTHON": sys.executable, "INSTALLER": "conda"}
    code, _, err = call(machine, "make_env", tmp_path / "env", "test")
    assert code == 1 and "INSTALLER=conda: expected uv or pip" in err
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize(
    ("old", "new", "code"), [("0.11.2", "0.12.0.1", 0), ("0.9", "0.10", 0), ("1.2", "1.2", 1)]
)
def test_two_environments_must_differ(
    machine: dict[str, str], tmp_path: Path, old: str, new: str, code: int
) -> None:
    for name, version in (("old", old), ("new", new)):
        (tmp_path / name / "bin").mkdir(parents=True)
        python = add_tool(machine, f"fake-{name}", f"echo {version}")
        os.rename(python, tmp_path / name / "bin" / "python")
    found, out, err = call(machine, "differ", tmp_path / "old", tmp_path / "new")
    assert (found, out) == (code, f"oldest: jax {old}; newest: jax {new}")
    assert ("is jax capped by this machine's settings" in err) == bool(code)
