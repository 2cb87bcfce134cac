"""Rewritten kernels as modules: kept in files by content, and loaded.

Triton compiles a kernel from the file it is defined in, so a rewritten kernel needs one. Its name
is made of the text's hash; writing is atomic, so that several processes and threads may build at
once.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncopate_jax.errors import UnsupportedError

FOLDER = "SYNCOPATE_TRITON_DUMP"
"""Names the environment variable with a folder that rewritten kernels are kept in, to be read."""


HIDDEN = ("__name__", "__file__", "__spec__", "__loader__", "__package__", "__doc__")
_LOADED: dict[tuple[Any, ...], types.ModuleType] = {}
"""By file and by which objects the text's names mean, which the module keeps alive."""


def folder() -> Path:
    """``$SYNCOPATE_TRITON_DUMP``, else a folder of the user's cache."""
    asked = os.environ.get(FOLDER)
    if asked:
        return Path(asked)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "syncopate_jax" / "triton"


def save(name: str, text: str) -> Path:
    """The file that holds ``text``; written unless it is there already.

    Raises:
      UnsupportedError: no file can be written there.
    """
    try:
        path = folder() / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)  # atomic: others see all of it or nothing
    except (OSError, RuntimeError) as error:  # the latter where there is no home
        raise UnsupportedError(
            f"kernel {name}, rewritten, cannot be kept in a file, and Triton compiles files only: "
            f"{error}; set {FOLDER} to a folder that can be written"
        ) from error
    return path


def load(path: Path, given: Mapping[str, Any]) -> types.ModuleType:
    """The module of a file; ``given`` are names of the original kernel's module.

    Helpers, constants and imports of the kernel are known to the rewritten one by their names;
    what the rewritten module defines itself stands. Loaded once for the same file and the same
    objects, so that Triton finds what it has compiled.
    """
    names = _names(path)
    key = (path, *((name, id(value)) for name, value in sorted(given.items()) if name in names))
    if key not in _LOADED:
        _LOADED.setdefault(key, made(path, {n: v for n, v in given.items() if n in names}))
    return _LOADED[key]


@functools.cache
def _names(path: Path) -> frozenset[str]:
    """What a file's text names; a file's name says its content."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name))


def made(path: Path, given: Mapping[str, Any]) -> types.ModuleType:
    """As ``load``, anew."""
    spec = importlib.util.spec_from_file_location(f"syncopate_triton_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py has a loader
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update({n: v for n, v in given.items() if n not in HIDDEN})
    sys.modules[module.__name__] = module  # Triton looks a kernel's module up by its name
    spec.loader.exec_module(module)
    return module
