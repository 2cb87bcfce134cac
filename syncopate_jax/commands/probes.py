"""What ``doctor`` looks at: one probe for each thing that a part of the package leans on.

No probe imports JAX: a broken installation must not take the doctor with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from syncopate_jax.native.cxx import GET_COMPILER, asked_compilers, find_compiler

OLDEST_JAX, NEWEST_JAX = "0.11.2", "0.12.0.1"
"""The JAX and jaxlib releases that the package is tested on, first and last."""

# The kernels use warpgroup products, which compute capability 9 (Hopper) has and no other: they
# were left out again in 10.0 and 12.0 (Blackwell).
HOPPER = 9

# Starting JAX with a broken driver may hang or crash: ask in a process of its own.
_ASK_JAX = """
import json, jax
print(json.dumps([
    [d.platform, d.device_kind, str(getattr(d, "compute_capability", ""))] for d in jax.devices()
]))
"""
_ASK_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found about one thing.

    Attributes:
      name: the thing.
      ok: it is there and usable.
      found: its version or place, or what is wrong.
      fix: what to do; empty when ok.
    """

    name: str
    ok: bool
    found: str
    fix: str = ""


def probe_all() -> tuple[Probe, ...]:
    """Every probe, in the order shown."""
    devices = ask_jax_for_devices()
    return (
        probe_jax("jax"),
        probe_jax("jaxlib"),
        probe_devices(devices),
        probe_gpu(devices),
        probe_triton(),
        probe_compiler(os.environ),
        probe_plugin(),
        probe_nvcc(os.environ),
        probe_package("matplotlib", "pip install matplotlib"),
    )


def version_of(package: str) -> str | None:
    """Installed version of ``package``, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def version_key(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, which order as releases do."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


def probe_jax(package: str) -> Probe:
    """``jax`` or ``jaxlib``: there, and neither older nor newer than what is tested."""
    version = version_of(package)
    install = f"pip install '{package}>={OLDEST_JAX},<={NEWEST_JAX}'"
    if version is None:
        return Probe(package, False, "not installed", install)
    if version_key(version) < version_key(OLDEST_JAX):
        return Probe(package, False, f"{version}, older than {OLDEST_JAX}", install)
    if version_key(version) > version_key(NEWEST_JAX):
        found = f"{version}, newer than {NEWEST_JAX}, the last one tested"
        return Probe(package, True, found, f"if something breaks: {install}")
    return Probe(package, True, version)


def ask_jax_for_devices() -> list[tuple[str, str, str]] | str:
    """(platform, kind, compute capability) of each device JAX has, or what went wrong."""
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_JAX],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"JAX did not start within {_ASK_SECONDS} s"
    if answer.returncode:
        lines = answer.stderr.strip().splitlines()
        return lines[-1] if lines else f"JAX ended with code {answer.returncode}"
    return [tuple(device) for device in json.loads(answer.stdout.strip().splitlines()[-1])]


def probe_devices(devices: list[tuple[str, str, str]] | str) -> Probe:
    """Whether JAX starts at all, and on what."""
    if isinstance(devices, str):
        return Probe(
            "JAX devices", False, devices, "make `python -c 'import jax; jax.devices()'` work"
        )
    kinds = sorted({(platform, kind) for platform, kind, _ in devices})
    counts = [sum(d[:2] == pair for d in devices) for pair in kinds]
    words = [f"{n} {kind} ({platform})" for n, (platform, kind) in zip(counts, kinds, strict=True)]
    return Probe("JAX devices", True, ", ".join(words))


def probe_gpu(devices: list[tuple[str, str, str]] | str) -> Probe:
    """A CUDA device that JAX can use, of Hopper's capability."""
    gpus = [] if isinstance(devices, str) else [d for d in devices if d[0] in ("gpu", "cuda")]
    if gpus:
        known = sorted({gpu[2] for gpu in gpus})
        found = f"{len(gpus)} of compute capability {', '.join(x or 'unknown' for x in known)}"
        if any(not one or version_key(one)[0] == HOPPER for one in known):
            return Probe("GPU", True, found)
        return Probe("GPU", False, found, "the fused kernels need 9.0 (Hopper), and no later one")
    if not has_cuda_driver():
        return Probe(
            "GPU", False, "no CUDA driver (libcuda.so.1)", "use a machine with an NVIDIA GPU"
        )
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not re.search("cuda|gpu", platforms):
        fix = f"unset JAX_PLATFORMS, which is {platforms!r}"
    else:
        fix = "pip install 'jax[cuda13]' at the version of jax"
    return Probe("GPU", False, "a CUDA driver is there, but JAX sees no GPU", fix)


def has_cuda_driver() -> bool:
    """Whether the CUDA driver library can be opened."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def probe_triton() -> Probe:
    """``jax-triton`` and a Triton that it works with."""
    bridge, triton = version_of("jax-triton"), version_of("triton")
    if bridge is None or triton is None:
        absent = [name for name, v in (("jax-triton", bridge), ("triton", triton)) if v is None]
        fix = f"pip install {' '.join(absent)}"
        return Probe("Triton", False, f"{' and '.join(absent)} not installed", fix)
    found = f"jax-triton {bridge}, triton {triton}"
    # jax-triton 0.4 calls functions that Triton has only from 3.7 on.
    if version_key(bridge) >= (0, 4) and version_key(triton) < (3, 7):
        return Probe("Triton", False, found, "pip install 'jax-triton<0.4', or triton 3.7 or later")
    return Probe("Triton", True, found)


def probe_compiler(environ: Mapping[str, str]) -> Probe:
    """A C++ compiler: ``$CXX`` or a usual name on the path."""
    found = find_compiler(environ)
    if found is not None:
        return Probe("C++ compiler", True, shlex.join(found))
    names = ", ".join(asked_compilers(environ))
    return Probe("C++ compiler", False, f"none of {names}", GET_COMPILER)


def probe_plugin() -> Probe:
    """JAX's CUDA plugin, with which programs are compiled for GPUs, whether one is here or not."""
    for cuda in (13, 12):
        version = version_of(f"jax-cuda{cuda}-pjrt")
        if version is not None:
            return Probe("JAX's CUDA plugin", True, f"{version}, CUDA {cuda}")
    fix = "pip install 'jax[cuda13]' at the version of jax"
    return Probe("JAX's CUDA plugin", False, "not installed", fix)


def probe_nvcc(environ: Mapping[str, str]) -> Probe:
    """The CUDA compiler: on the path, under ``$CUDA_HOME``, or as the plugin's own package."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    places = ["nvcc", *([os.path.join(home, "bin", "nvcc")] if home else [])]
    found = next((place for name in places if (place := shutil.which(name))), None)
    if found is not None:
        return Probe("nvcc", True, found)
    if version := version_of("nvidia-cuda-nvcc") or version_of("nvidia-cuda-nvcc-cu12"):
        return Probe("nvcc", True, f"nvidia-cuda-nvcc {version}")
    fix = "install a CUDA toolkit; only compiling kernels ahead of time needs it"
    return Probe("nvcc", False, "not on PATH nor under CUDA_HOME", fix)


def probe_package(name: str, fix: str) -> Probe:
    """Whether a Python package is installed."""
    version = version_of(name)
    if version is None:
        return Probe(name, False, "not installed", fix)
    return Probe(name, True, version)
