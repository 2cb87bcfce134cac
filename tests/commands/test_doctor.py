"""The doctor: what each probe says, and what follows for what can be run."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from syncopate_jax import cli
from syncopate_jax.commands import doctor, probes
from syncopate_jax.commands.probes import Probe

PLUGIN = "JAX's CUDA plugin"
NAMES = (
    *("jax", "jaxlib", "JAX devices", "GPU", "Triton", "C++ compiler"),
    *(PLUGIN, "nvcc", "matplotlib"),
)
GOOD = tuple(Probe(name, True, "1.0") for name in NAMES)
CPU = [("cpu", "cpu", "")]


def without(*names: str) -> tuple[Probe, ...]:
    return tuple(
        Probe(probe.name, False, "gone", f"get {probe.name}") if probe.name in names else probe
        for probe in GOOD
    )


def test_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is True
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {probe["name"] for probe in found["probes"]} == {probe.name for probe in GOOD}
    assert all(probe["ok"] or probe["fix"] for probe in found["probes"])
    assert found["abilities"][0]["available"] is True


def test_reports_what_is_missing_and_the_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe_all", lambda: without("GPU", "matplotlib"))
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"missing  GPU                gone\n{'':<26}  -> get GPU\n" in out
    assert "no       backend copy_engine on GPUs (lacks GPU)\n" in out
    assert "no       pictures as PNG (lacks matplotlib)\n" in out
    assert "yes      backend xla" in out
    assert "broken" not in out


def test_a_broken_core_is_a_no(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe_all", lambda: without("JAX devices"))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "the core is broken: only plans and their checks work until JAX does\n" in out
    assert "yes      plans: build, verify, simulate, draw as SVG\n" in out


def test_every_need_is_a_probe() -> None:
    names = {probe.name for probe in GOOD}
    assert all(set(needs) <= names for _, needs in doctor.ABILITIES)
    assert all(not lacking for _, lacking in doctor.abilities(GOOD))


@pytest.mark.parametrize(
    ("version", "ok", "found", "fix"),
    [
        (None, False, "not installed", "pip install 'jax>=0.11.2,<=0.12.0.1'"),
        ("0.9.9", False, "0.9.9, older than 0.11.2", "pip install 'jax>=0.11.2,<=0.12.0.1'"),
        ("0.11.2", True, "0.11.2", ""),
        ("0.12.0.1", True, "0.12.0.1", ""),
        (
            "0.13.0.dev2",
            True,
            "0.13.0.dev2, newer than 0.12.0.1, the last one tested",
            "if something breaks: pip install 'jax>=0.11.2,<=0.12.0.1'",
        ),
    ],
)
def test_jax_versions(
    version: str | None, ok: bool, found: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "version_of", lambda name: version)
    assert probes.probe_jax("jax") == Probe("jax", ok, found, fix)


def test_devices_are_counted() -> None:
    found = probes.probe_devices([("gpu", "H200", "9.0")] * 2 + CPU)
    assert found == Probe("JAX devices", True, "1 cpu (cpu), 2 H200 (gpu)")
    broken = probes.probe_devices("RuntimeError: no backend")
    assert (broken.ok, broken.found) == (False, "RuntimeError: no backend")


@pytest.mark.parametrize(
    ("devices", "driver", "platforms", "ok", "found", "fix"),
    [
        ([("gpu", "H200", "9.0")], True, "", True, "1 of compute capability 9.0", ""),
        ([("cuda", "B200", "10.0")], True, "", False, "1 of compute capability 10.0", "need 9.0"),
        ([("cuda", "RTX", "12.0")], True, "", False, "1 of compute capability 12.0", "need 9.0"),
        ([("cuda", "?", "")], True, "", True, "1 of compute capability unknown", ""),
        ([("gpu", "A100", "8.0")], True, "", False, "1 of compute capability 8.0", "need 9.0"),
        (CPU, False, "", False, "no CUDA driver (libcuda.so.1)", "use a machine with"),
        (CPU, True, "", False, "a CUDA driver is there, but JAX sees no GPU", "jax[cuda13]"),
        (CPU, True, "cpu", False, "a CUDA driver is there", "unset JAX_PLATFORMS, which is 'cpu'"),
        ("broken", False, "", False, "no CUDA driver", "use a machine with"),
    ],
)
def test_gpus(
    devices: list[tuple[str, str, str]] | str,
    driver: bool,
    platforms: str,
    ok: bool,
    found: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes, "has_cuda_driver", lambda: driver)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    probe = probes.probe_gpu(devices)
    assert probe.ok is ok
    assert found in probe.found
    assert fix in probe.fix


def test_cuda_driver_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", opened.append)
    assert probes.has_cuda_driver()
    assert opened == ["libcuda.so.1"]

    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert not probes.has_cuda_driver()


@pytest.mark.parametrize(
    ("bridge", "triton", "ok", "words"),
    [
        (None, None, False, "jax-triton and triton not installed pip install jax-triton triton"),
        (None, "3.6.0", False, "jax-triton not installed pip install jax-triton"),
        ("0.3.1", "3.6.0", True, "jax-triton 0.3.1, triton 3.6.0"),
        ("0.4.0", "3.6.0", False, "pip install 'jax-triton<0.4', or triton 3.7 or later"),
        ("0.4.0", "3.7.0", True, "jax-triton 0.4.0, triton 3.7.0"),
    ],
)
def test_triton(
    bridge: str | None,
    triton: str | None,
    ok: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes, "version_of", {"jax-triton": bridge, "triton": triton}.get)
    found = probes.probe_triton()
    assert found.ok is ok
    assert words in f"{found.found} {found.fix}"


def tool(folder: Path, name: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probes.probe_compiler({}) == Probe(
        "C++ compiler",
        False,
        "none of c++, g++, clang++",
        "install g++ or clang++, or point CXX at one",
    )
    assert probes.probe_compiler({"CXX": "mine -O2"}).found == "none of mine -O2"
    mine, plain = tool(tmp_path, "mine"), tool(tmp_path, "g++")
    assert probes.probe_compiler({"CXX": "mine -O2"}).found == f"{mine} -O2"
    assert probes.probe_compiler({}).found == plain


def test_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages: dict[str, str] = {}
    monkeypatch.setattr(probes, "version_of", packages.get)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not probes.probe_nvcc({}).ok
    packages["nvidia-cuda-nvcc"] = "13.1"
    assert probes.probe_nvcc({}) == Probe("nvcc", True, "nvidia-cuda-nvcc 13.1")
    home = tmp_path / "cuda"
    found = tool(home, "bin/nvcc")
    assert probes.probe_nvcc({"CUDA_HOME": str(home)}).found == found
    assert probes.probe_nvcc({"CUDA_PATH": str(home)}).found == found


def test_cuda_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "version_of", {}.get)
    found = probes.probe_plugin()
    assert (found.ok, found.fix) == (False, "pip install 'jax[cuda13]' at the version of jax")
    monkeypatch.setattr(probes, "version_of", {"jax-cuda12-pjrt": "1.2"}.get)
    assert probes.probe_plugin() == Probe(PLUGIN, True, "1.2, CUDA 12")


def test_kernels_are_not_compiled_ahead_without_the_plugin() -> None:
    lacking = dict(doctor.abilities(without(PLUGIN)))
    assert lacking["kernels compiled ahead of time"] == (PLUGIN,)
    assert sum(map(len, lacking.values())) == 1


def test_triton_on_a_mesh_and_the_copy_engine_need_a_compiler() -> None:
    lacking = dict(doctor.abilities(without("C++ compiler")))
    needing = {name for name, probes in lacking.items() if probes == ("C++ compiler",)}
    assert needing == {
        "target triton on a mesh",
        "backend copy_engine on GPUs",
        "backend copy_engine's copies on CPU devices",
    }
    assert sum(map(len, lacking.values())) == len(needing)


def test_packages() -> None:
    assert probes.probe_package("numpy", "get it").ok
    assert probes.probe_package("no-such-package", "get it") == Probe(
        "no-such-package", False, "not installed", "get it"
    )


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (SimpleNamespace(returncode=0, stdout='noise\n[["cpu", "cpu", ""]]\n', stderr=""), CPU),
        (SimpleNamespace(returncode=1, stdout="", stderr="a\nImportError: b\n"), "ImportError: b"),
        (SimpleNamespace(returncode=-11, stdout="", stderr=""), "JAX ended with code -11"),
    ],
)
def test_asking_jax(
    answer: SimpleNamespace, found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert probes.ask_jax_for_devices() == found


def test_jax_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 120)

    monkeypatch.setattr(subprocess, "run", hang)
    assert probes.ask_jax_for_devices() == "JAX did not start within 120 s"
