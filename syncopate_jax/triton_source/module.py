"""Rewritten kernels as modules: kept in files by content, and loaded.

Triton compiles a kernel from the file it is defined in, so a rewritten kernel needs one. Its name
is made of the text's hash; writing is atomic, so that several processes and threads may build at
once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "SYNCOPATE_TRITON_DUMP"
"""Names the environment variable with a folder that rewritten kernels are kept in, to be read."""


def folder() -> Path:
    """``$SYNCOPATE_TRITON_DUMP``, else a folder of the user's cache."""
    asked = os.environ.get(FOLDER)
    if asked:
        return Path(asked)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "syncopate_jax" / "triton"


def save(name: str, text: str) -> Path:
    """The file that holds ``text``; written unless it is there already."""
    path = folder() / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)  # atomic: others see all of it or nothing
    return path


def load(path: Path, given: Mapping[str, Any]) -> types.ModuleType:
    """A new module from a file; ``given`` are names of the original kernel's module.

    Helpers, constants and imports of the kernel are known to the rewritten one by their names;
    what the rewritten module defines itself stands.
    """
    spec = importlib.util.spec_from_file_location(f"syncopate_triton_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py has a loader
    module = importlib.util.module_from_spec(spec)
    hidden = ("__name__", "__file__", "__spec__", "__loader__", "__package__", "__doc__")
    module.__dict__.update({n: v for n, v in given.items() if n not in hidden})
    sys.modules[module.__name__] = module  # Triton looks a kernel's module up by its name
    spec.loader.exec_module(module)
    return module
