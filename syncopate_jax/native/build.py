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
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.native.cxx import GET_COMPILER, asked_compilers, find_compiler

SOURCE = Path(__file__).with_name("handlers.cc")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra")
LIMIT_S = 300

_STAGED = {"start": ("Site", "Start")}
_PLAIN = {"cpu": {"join": "Join", "wait": "Wait"}, "cuda": {"join": "Join"}}


def missing() -> str | None:
    """What keeps the native library from being built here, and how to mend it; None if nothing."""
    if find_compiler(os.environ) is None:
        return (
            f"the copy engine's handlers are C++ built at first use, and no compiler was found "
            f"({', '.join(asked_compilers(os.environ))}); {GET_COMPILER}"
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
      UnsupportedError: no compiler, or it failed, and the message has what it said; or there is no
        place for the library.
    """
    cxx = find_compiler(os.environ)
    if cxx is None:
        raise UnsupportedError(str(missing()))
    include = jax.ffi.include_dir()
    path = folder() / f"handlers-{_key(cxx, include)}.so"
    try:
        if path.exists():
            return path
        with _lock(path.parent):
            if not path.exists():
                _compile(cxx, include, path)
    except OSError as error:
        raise UnsupportedError(
            f"the copy engine's handlers could not be built and kept in {path.parent} ({error}); "
            f"point XDG_CACHE_HOME at a folder that can be written"
        ) from error
    return path


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The compiler's answer; raises UnsupportedError where it does not run or does not end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnsupportedError(
            f"the compiler of the copy engine's handlers did not end within {LIMIT_S} s: "
            f"{' '.join(command)}; point CXX at another compiler"
        ) from error
    except OSError as error:
        raise UnsupportedError(
            f"the compiler of the copy engine's handlers does not run ({error}): "
            f"{' '.join(command)}; point CXX at another compiler"
        ) from error


def _key(cxx: Sequence[str], include: str) -> str:
    """Names the library by all that its content follows from."""
    version = _run([*cxx, "--version"]).stdout.encode()
    digest = hashlib.sha256()
    own = [path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    for part in (*own, version, repr(cxx[1:]).encode(), repr(FLAGS).encode()):
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


def _compile(cxx: Sequence[str], include: str, path: Path) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    command = [*cxx, *FLAGS, "-isystem", include, "-o", str(partial), str(SOURCE), "-ldl"]
    try:
        done = _run(command)
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
    """The library, with its handlers registered for CPU and CUDA; built if need be.

    Raises UnsupportedError as ``build`` does, and where the library is damaged.
    """
    path = build()
    # What is registered ahead of JAX's backends reaches them handlers first, which XLA refuses
    # as their types are not there yet; and then the process has no backend.
    jax.devices()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(
            f"the copy engine's handlers in {path} cannot be loaded ({error}); delete that file"
        ) from error
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
