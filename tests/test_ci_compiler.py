"""The script that adds a compiler for CUDA: it adds once, and for the JAX that is there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "add_compiler"
PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A folder that looks like a virtual environment; what its Python is told to do is logged."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        """#!/usr/bin/env bash
case "$*" in
    *'version("jaxlib")'*) echo 1.2.3 ;;
    *m.version*) cat "${0%/bin/python}/packages" ;;
    *) echo "$*" >>"${0%/bin/python}/log" ;;
esac
"""
    )
    python.chmod(0o755)
    return tmp_path


def run(environment: Path, versions: dict[str, str]) -> str:
    """What was installed, if anything."""
    lines = [f"{name} {versions.get(name, 'missing')}" for name in PACKAGES]
    (environment / "packages").write_text("\n".join(lines) + "\n")
    settings = os.environ | {"INSTALLER": "pip"}
    subprocess.run([SCRIPT, environment], check=True, env=settings, timeout=60)
    log = environment / "log"
    return log.read_text() if log.exists() else ""


def test_nothing_is_added_twice(environment: Path) -> None:
    assert run(environment, dict.fromkeys(PACKAGES, "1.2.3")) == ""


@pytest.mark.parametrize(
    "versions", [{}, dict.fromkeys(PACKAGES, "1.2.2"), dict.fromkeys(PACKAGES[:3], "1.2.3")]
)
def test_the_plugin_is_that_of_the_jax(environment: Path, versions: dict[str, str]) -> None:
    installed = run(environment, versions)
    assert installed.startswith("-m pip install")
    assert "jax-cuda13-plugin==1.2.3 jax-cuda13-pjrt==1.2.3" in installed
