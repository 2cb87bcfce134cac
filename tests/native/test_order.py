"""The CUDA handlers on a simulated driver: no flag is up ahead of its data, none comes too late."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import jax
import pytest

from syncopate_jax.native import build
from syncopate_jax.native.cxx import find_compiler

pytestmark = [
    pytest.mark.slow,  # compiles the handlers once more
    pytest.mark.skipif(build.missing() is not None, reason=str(build.missing())),
]
SOURCE = Path(__file__).with_name("simulated_driver.cc")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "simulated_driver"
    folders = ("-isystem", jax.ffi.include_dir(), "-I", str(build.SOURCE.parent))
    flags = [flag for flag in build.FLAGS if flag not in ("-shared", "-O2")]
    command = [*(find_compiler(os.environ) or ()), *flags, "-Wno-unused-function", *folders]
    done = subprocess.run(
        [*command, "-o", str(path), str(SOURCE), "-ldl"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return path


def run(path: Path, *given: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(path), *given], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_no_flag_is_up_ahead_of_its_data(simulated: Path) -> None:
    assert run(simulated, "400") == (0, "")


def test_a_stream_without_order_is_noticed(simulated: Path) -> None:
    code, said = run(simulated, "100", "broken")
    assert code == 1 and "is announced and not there, in the kernel" in said


def test_no_copy_outlives_an_error(simulated: Path) -> None:
    assert run(simulated, "1", "failing") == (0, "")


def test_threads_share_seats_and_meetings_end(simulated: Path) -> None:
    assert run(simulated, "100", "threads") == (0, "")
