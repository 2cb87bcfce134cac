"""The C++ compiler that native code is built with, found without JAX: ``doctor`` looks for it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping

COMPILERS = ("c++", "g++", "clang++")
GET_COMPILER = "install g++ or clang++, or point CXX at one"


def asked_compilers(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Compilers to look for: ``$CXX``, a command that may have arguments, or the usual names."""
    asked = environ.get("CXX", "").strip()
    return (asked,) if asked else COMPILERS


def find_compiler(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The first of them on the path, with its arguments; None where there is none."""
    for command in asked_compilers(environ):
        try:
            first, *rest = shlex.split(command)
        except ValueError:  # a quote without its end
            continue
        place = shutil.which(first)
        if place is not None:
            return (place, *rest)
    return None
