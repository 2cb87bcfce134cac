"""Builds the native library at first use, keeps it by content, and registers its handlers.

Only backends that need the library call this; without a compiler everything else still runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from syncopate_jax.errors import UnsupportedError

SOURCE = Path(__file__).with_name("handlers.cc")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra")
COMPILERS = ("c++", "g++", "clang++")
LIMIT_S = 300

_STAGED = {"start": ("Site", "Start")}
_PLAIN = {"cpu": {"join": "Join", "wait": "Wait"}, "cuda": {"join": "Join"}}


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or a usual name on the path; None where there is none."""
    asked = os.environ.get("CXX", "").split()
    return next(filter(None, map(shutil.which, asked[:1] or COMPILERS)), None)


def missing() -> str | None:
    """What keeps the native library from being built here, and how to mend it; None if nothing."""
    if compiler() is None:
        asked = os.environ.get("CXX", "") or ", ".join(COMPILERS)
        return (
            f"the copy engine's handlers are C++ built at first use, and no compiler was found "
            f"({asked}); install g++ or clang++, or point CXX at one"
        )
    return None


def folder() -> Path:
    """Where built libraries are kept: under ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "syncopate_jax"


def build() -> Path:
    """The shared library for this source, compiler and JAX; compiled unless it is there already.

    Several processes may call this at once: one compiles, the others wait for it.

    Raises:
      UnsupportedError: no compiler, or it failed; the message has what it said.
    """
    if reason := missing():
        raise UnsupportedError(reason)
    cxx = str(compiler())
    include = jax.ffi.include_dir()
    path = folder() / f"handlers-{_key(cxx, include)}.so"
    if path.exists():
        return path
    with _lock(path.parent):
        if not path.exists():
            _compile(cxx, include, path)
    return path


def _key(cxx: str, include: str) -> str:
    """Names the library by all that its content follows from."""
    version = subprocess.run([cxx, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256()
    own = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    for part in (*own, version, repr(FLAGS).encode()):
        digest.update(hashlib.sha256(part).digest())
    for header in sorted(Path(include, "xla/ffi/api").glob("*.h")):
        digest.update(header.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _lock(where: Path) -> Iterator[None]:
    """Held by one process at a time; given up by the system if the process dies."""
    where.mkdir(parents=True, exist_ok=True)
    with (where / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(cxx: str, include: str, path: Path) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    command = [cxx, *FLAGS, "-isystem", include, "-o", str(partial), str(SOURCE), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise UnsupportedError(
                f"the copy engine's handlers did not compile (exit {done.returncode}): "
                f"{' '.join(command)}\n{done.stderr.strip()[-2000:]}\n"
                f"C++17 is needed; point CXX at another compiler"
            )
        partial.replace(path)  # atomic: other processes see all of it or nothing
    finally:
        partial.unlink(missing_ok=True)


@functools.cache
def load() -> ctypes.CDLL:
    """The library, with its handlers registered for CPU and CUDA; built if need be."""
    library = ctypes.CDLL(str(build()))
    for platform, prefix in (("cpu", "SyncopateCpu"), ("cuda", "SyncopateCuda")):
        xla_platform = {"cpu": "cpu", "cuda": "CUDA"}[platform]
        jax.ffi.register_ffi_type(
            f"syncopate_site_{platform}", _type(library, prefix), platform=xla_platform
        )
        for name, (instantiate, execute) in _STAGED.items():
            stages = {
                "instantiate": _capsule(library, prefix + instantiate),
                "execute": _capsule(library, prefix + execute),
            }
            jax.ffi.register_ffi_target(f"syncopate_{name}", stages, platform=xla_platform)
        for name, symbol in _PLAIN[platform].items():
            jax.ffi.register_ffi_target(
                f"syncopate_{name}", _capsule(library, prefix + symbol), platform=xla_platform
            )
    return library


def _capsule(library: ctypes.CDLL, symbol: str) -> object:
    return jax.ffi.pycapsule(getattr(library, symbol))


def _type(library: ctypes.CDLL, prefix: str) -> Any:
    """What identifies the state of a call site to XLA, and deletes it."""
    found = {}
    for key, symbol in (("type_id", "TypeId"), ("type_info", "TypeInfo")):
        function = getattr(library, prefix + symbol)
        function.restype = ctypes.c_void_p
        found[key] = jax.ffi.pycapsule(ctypes.c_void_p(function()))
    return found
