"""The native library: built once by content, and plain words where it cannot be built."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.native import build
from syncopate_jax.native.cxx import find_compiler


def fake_compiler(folder: Path, body: str) -> Path:
    """A compiler that answers --version, and otherwise runs ``body`` with $out set."""
    path = folder / "fake-c++"
    path.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1.0; exit 0; fi\n'
        'while [ "$1" != -o ]; do shift; done\nout="$2"\n' + body
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "syncopate_jax"


def test_the_library_is_kept_by_content(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    compiler = fake_compiler(tmp_path, f'echo ran >> {log}\necho library > "$out"\n')
    monkeypatch.setenv("CXX", str(compiler))
    first = build.build()
    assert build.build() == first
    assert first.read_text() == "library\n"
    assert log.read_text() == "ran\n"
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.build() != first
    assert log.read_text() == "ran\nran\n"
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".so", ".so"]


def test_a_header_counts_as_content(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, 'echo library > "$out"\n')))
    source, header = tmp_path / "handlers.cc", tmp_path / "part.h"
    source.write_text('#include "part.h"\n')
    header.write_text("// one\n")
    monkeypatch.setattr(build, "SOURCE", source)
    first = build.build()
    header.write_text("// other\n")
    assert build.build() != first


def test_two_processes_compile_once(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = fake_compiler(tmp_path, f'echo ran >> {log}\nsleep 1\necho library > "$out"\n')
    environ = {**os.environ, "CXX": str(compiler), "JAX_PLATFORMS": "cpu"}
    program = "from syncopate_jax.native import build; print(build.build().read_text())"
    running = [
        subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [one.communicate(timeout=120)[0] for one in running] == [b"library\n\n"] * 2
    assert log.read_text() == "ran\n"


def test_a_machine_without_a_compiler_says_so(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "absent-c++"))
    with pytest.raises(
        UnsupportedError, match=r"no compiler was found .*absent-c\+\+.*; install g\+\+"
    ):
        build.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no compiler was found (c++, g++, clang++)" in str(build.missing())


def test_what_the_compiler_says_is_passed_on(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake_compiler(tmp_path, "echo handlers.cc:1: no such thing >&2\nexit 3\n")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(
        UnsupportedError, match=r"(?s)did not compile \(exit 3\).*no such thing.*point CXX at"
    ):
        build.build()
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_all_of_cxx_is_the_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    plain = fake_compiler(tmp_path, 'echo library > "$out"\n')
    wrapper = tmp_path / "my wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$2" >> {log}\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}' {plain}")
    assert find_compiler(os.environ) == (str(wrapper), str(plain))
    assert build.build().read_text() == "library\n"
    assert log.read_text() == f"--version\n{build.FLAGS[0]}\n"
    monkeypatch.setenv("CXX", f"'{wrapper}")
    assert f"no compiler was found ('{wrapper})" in str(build.missing())


def test_a_compiler_that_hangs_is_ended(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "exec sleep 60\n")))
    monkeypatch.setattr(build, "LIMIT_S", 0.5)
    with pytest.raises(UnsupportedError, match=r"did not end within 0.5 s: .*fake-c\+\+ .*; point"):
        build.build()
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_what_cannot_be_run_kept_or_loaded_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake_compiler(tmp_path, 'echo library > "$out"\n')
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(UnsupportedError, match=r"handlers-\w+.so cannot be loaded .*; delete that"):
        build.load.__wrapped__()
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiler))  # a file
    with pytest.raises(UnsupportedError, match=r"kept in .*/syncopate_jax .*XDG_CACHE_HOME"):
        build.build()
    compiler.write_text("#!/no/such/shell\n")
    with pytest.raises(UnsupportedError, match=r"does not run .*fake-c\+\+ --version; point CXX"):
        build.build()


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    import jax

    command = [*(find_compiler(os.environ) or ()), *build.FLAGS, "-Werror", "-fsyntax-only"]
    command += ["-isystem", jax.ffi.include_dir(), str(build.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_the_library_can_be_loaded_before_anything_else() -> None:
    """As where a program is traced for a mesh without devices, the first that a process does."""
    program = (
        "from syncopate_jax.native import build, copies; build.load()\n"
        "import jax, numpy as np; out = jax.ShapeDtypeStruct((3,), 'float32')\n"
        "copy = copies.Copy(0, 0, 0, 0, 12, 0, 0, 12, 12, 1, 0, 1, 0)\n"
        "call = copies.Call('one', 1, (copy,), 1, joined=False)\n"
        "def copied(x):\n"
        "    buffers, flags = copies.start(call, copies.ALONE, [x], [out])\n"
        "    return copies.wait(call, flags, np.ones(1, 'int32'), buffers)\n"
        "print(jax.jit(copied)(np.arange(3, dtype='f'))[0].tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "[0.0, 1.0, 2.0]\n", done.stderr
