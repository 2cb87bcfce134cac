"""The package installs, from anywhere, by what pyproject, Dockerfile and .dockerignore say."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# What a docker build sees, and so all that an install may need.
CONTEXT = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"]
SOURCES = ("syncopate_jax", "plans", "pallas_kernels")


def docker_argument(name: str) -> str:
    return re.search(rf"^ARG {name}=(\S+)$", DOCKERFILE, re.MULTILINE)[1]


def dependency(name: str) -> Requirement:
    (found,) = (r for r in map(Requirement, PYPROJECT["project"]["dependencies"]) if r.name == name)
    return found


def installed_name(path: Path) -> str:
    """plans/x.json -> syncopate_jax/plans/x.json, as the wheel has it."""
    inside = path.relative_to(ROOT)
    return (inside if inside.parts[0] == "syncopate_jax" else "syncopate_jax" / inside).as_posix()


def test_every_package_folder_is_listed() -> None:
    folders = [p.parent for source in SOURCES for p in (ROOT / source).rglob("__init__.py")]
    expected = {installed_name(folder).replace("/", ".") for folder in folders}
    assert set(SETUPTOOLS["packages"]) == expected
    assert len(SETUPTOOLS["packages"]) == len(expected)


def test_every_module_is_in_a_package() -> None:
    modules = [p for source in SOURCES for p in (ROOT / source).rglob("*.py")]
    assert [p for p in modules if not (p.parent / "__init__.py").exists()] == []


def test_jax_and_jaxlib_have_one_bound() -> None:
    assert dependency("jax").specifier == dependency("jaxlib").specifier
    cuda13 = Requirement(PYPROJECT["project"]["optional-dependencies"]["cuda13"][0])
    assert (cuda13.name, cuda13.extras) == ("jax", {"cuda13"})
    assert cuda13.specifier == dependency("jax").specifier


def test_this_environment_has_a_supported_jax() -> None:
    for name in ("jax", "jaxlib"):
        assert importlib.metadata.version(name) in dependency(name).specifier


def test_the_dockerfile_agrees_with_pyproject() -> None:
    python = docker_argument("PYTHON_VERSION")
    assert SpecifierSet(PYPROJECT["project"]["requires-python"]) == SpecifierSet(f">={python}")
    assert docker_argument("JAX_VERSION") in dependency("jax").specifier
    extras = re.search(r'pip install "\.\[([\w,]+)\]"', DOCKERFILE)[1].split(",")
    assert "cuda13" in extras
    assert set(extras) <= PYPROJECT["project"]["optional-dependencies"].keys()
    assert re.search(r"^FROM nvidia/cuda:13\.", DOCKERFILE, re.MULTILINE)


def test_the_image_runs_the_command_line_as_a_plain_user() -> None:
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1] not in ("root", "0")
    assert 'ENTRYPOINT ["python", "-m", "syncopate_jax"]' in DOCKERFILE
    assert 'CMD ["doctor"]' in DOCKERFILE


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The files of the docker context alone, without caches or an old build folder."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in CONTEXT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment without the project, which borrows this one's JAX by a path file.

    A path file inside the borrowed folder is not read, so this environment's own editable install
    of the project stays out.
    """
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    borrowed = [p for p in sys.path if p.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    return tmp_path / "env" / "bin" / "python"


def run(*command: object, cwd: Path) -> str:
    # Neither the repository nor pip's own settings of where to install may leak in.
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_TARGET")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def pip(command: str, *arguments: object, cwd: Path) -> None:
    """Runs this environment's pip; it builds with our setuptools if there, else fetches its own."""
    (needed,) = map(Requirement, PYPROJECT["build-system"]["requires"])
    found = {d.name: d.version for d in importlib.metadata.distributions()}.get(needed.name)
    build = ["--no-build-isolation"] if found and found in needed.specifier else []
    run(sys.executable, "-m", "pip", *command.split(), *build, *arguments, cwd=cwd)


IMPORTS = """
import importlib
for name in ("syncopate_jax", "syncopate_jax.plans", "syncopate_jax.pallas_kernels"):
    print(importlib.import_module(name).__file__)
"""


@pytest.mark.slow
def test_a_wheel_installs_and_holds_every_source(
    tmp_path: Path, source: Path, python: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    pip("wheel --no-deps", "--wheel-dir", tmp_path, source, cwd=empty)
    (wheel,) = tmp_path.glob("*.whl")
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    files = [p for top in SOURCES for p in (ROOT / top).rglob("*") if p.is_file()]
    assert held == {installed_name(p) for p in files if "__pycache__" not in p.parts}

    pip(f"--python {python} install --no-deps", wheel, cwd=empty)
    paths = run(python, "-c", IMPORTS, cwd=empty).split()
    assert len(paths) == 3
    assert all(Path(p).is_relative_to(tmp_path / "env") for p in paths)


@pytest.mark.slow
def test_an_editable_install_reads_the_sources(tmp_path: Path, source: Path, python: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    pip(f"--python {python} install --no-deps", "--editable", source, cwd=empty)
    paths = run(python, "-c", IMPORTS, cwd=empty).split()
    expected = ["syncopate_jax", "plans", "pallas_kernels"]
    assert [Path(p) for p in paths] == [source / name / "__init__.py" for name in expected]


def test_a_checkout_is_whole_where_it_lies(source: Path, python: Path) -> None:
    """Not installed, or shadowing what is: the folder that Python starts in comes first."""
    paths = run(python, "-c", IMPORTS, cwd=source).split()
    expected = ["syncopate_jax", "plans", "pallas_kernels"]
    assert [Path(p) for p in paths] == [source / name / "__init__.py" for name in expected]
    listed = run(python, "-m", "syncopate_jax", "plan", "--list", cwd=source)
    assert "all_gather_ring" in listed
