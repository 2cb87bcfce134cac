"""Imports go one way: the order below, read off every module's source, with no cycle."""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "syncopate_jax"
# Each unit may import those before it; units joined by a bar may not import each other.
ORDER = (
    "errors options registry ir plans kernel triton_source pallas_kernels check native "
    "synthesis passes|importers|backends "
    "runtime tune compiler ops rewrite|advice commands cli __init__ __main__"
)
RANK = {unit: rank for rank, units in enumerate(ORDER.split()) for unit in units.split("|")}
# What these see is named in full, their own unit aside: of the package, and from outside it.
ONLY = {"plans": {"ir", "registry", "errors"}, "pallas_kernels": {"kernel", "errors"}}
OUTSIDE = {"plans": {"numpy"}, "pallas_kernels": {"numpy", "jax", "triton"}}
JAX = {"jax", "jaxlib", "jax_triton", "triton"}
# What users import from: the package itself, and its operators.
RE_EXPORT = (PACKAGE, f"{PACKAGE}.ops")
NOT_INSTALLED = {"plans", "pallas_kernels", "experiments", "tests"}


def modules(root: Path) -> dict[str, Path]:
    """Every module by its installed name: plans/ and pallas_kernels/ are inside the package."""
    found = {}
    for folder in (PACKAGE, "plans", "pallas_kernels"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts if folder == PACKAGE else (PACKAGE, *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def unit(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def targets(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """What a module imports, at its top or inside a function: modules, where they are known."""
    found = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*up, node.module] if node.module else up)
            full = [f"{base}.{alias.name}" for alias in node.names]
            found |= {f"{base}.*" if f.endswith(".*") else f if f in known else base for f in full}
    return found


def violations(root: Path) -> list[str]:
    """All that breaks the rules, each as one line that names the module and what it imports."""
    known = modules(root)
    imports = {name: targets(name, path, known) for name, path in known.items()}
    found = []
    for name, seen in imports.items():
        own = unit(name)
        if own not in RANK:
            found.append(f"{name}: {own} has no place in ORDER: give it one")
            continue
        for target in sorted(seen):
            top = target.split(".")[0]
            if target.endswith(".*"):
                found.append(f"{name}: star import from {target[:-2]}")
            if top in NOT_INSTALLED:
                found.append(f"{name}: {target} exists in the repository only, not once installed")
            elif top != PACKAGE:
                allowed = OUTSIDE.get(own, {top}) | sys.stdlib_module_names
                if top not in allowed:
                    found.append(f"{name}: {own} may not import {top}")
            elif known[name].name == "__init__.py" and name not in RE_EXPORT:
                found.append(f"{name}: re-exports {target}; only {', '.join(RE_EXPORT)} may")
            elif (other := unit(target)) != own and (
                RANK.get(other, -1) >= RANK[own] or other not in ONLY.get(own, {other})
            ):
                found.append(f"{name}: {own} may not import {other} ({target})")
    graph = {name: seen & known.keys() - {name} for name, seen in imports.items()}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return [*found, "cycle: " + " -> ".join(error.args[1])]
    # ir imports no JAX, nor does anything that ir imports.
    reach: dict[str, set[str]] = {}
    for name in order:
        reach[name] = imports[name].union(*(reach[other] for other in graph[name]))
        if unit(name) == "ir" and (hit := {t.split(".")[0] for t in reach[name]} & JAX):
            found.append(f"{name}: ir may not import {', '.join(sorted(hit))}, nor through others")
    return found


def test_the_sources_keep_the_order() -> None:
    assert len(modules(ROOT)) > 3
    assert violations(ROOT) == []


def plant(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return violations(root)


def test_allowed_imports_pass(tmp_path: Path) -> None:
    good = {
        "syncopate_jax/__init__.py": "from syncopate_jax.ops import gather\n",
        "syncopate_jax/errors.py": "",
        "syncopate_jax/options.py": "from syncopate_jax import errors\n",
        "syncopate_jax/registry.py": "import importlib\n",
        "syncopate_jax/ir/__init__.py": '"""Doc."""\n',
        "syncopate_jax/ir/chunk.py": "from . import plan\nfrom .. import errors\n",
        "syncopate_jax/ir/plan.py": "import numpy\n",
        "syncopate_jax/kernel/local.py": "import jax\n",
        "syncopate_jax/passes/split.py": "from syncopate_jax.plans import ring\n",
        "syncopate_jax/ops/gather.py": "from syncopate_jax import pallas_kernels, registry\n",
        "plans/ring.py": "import math\nfrom syncopate_jax.ir import chunk\n",
        "pallas_kernels/__init__.py": "",
        "pallas_kernels/matmul_triton.py": "import triton\nfrom ..kernel import local\n",
    }
    assert plant(tmp_path, good) == []


PLANTED = {
    "upward": (
        "syncopate_jax/ir/a.py",
        "import syncopate_jax.kernel.b",
        "ir may not import kernel",
    ),
    "in a function": (
        "syncopate_jax/ir/a.py",
        "def f():\n    from syncopate_jax import compiler\n",
        "ir may not import __init__",
    ),
    "relative": ("syncopate_jax/ir/a.py", "from ..passes.x import y", "ir may not import passes"),
    "siblings": (
        "syncopate_jax/passes/a.py",
        "from syncopate_jax.backends.xla import lower",
        "passes may not import backends",
    ),
    "the package": (
        "syncopate_jax/tune/a.py",
        "import syncopate_jax",
        "tune may not import __init__",
    ),
    "plans see kernels": (
        "plans/ring.py",
        "from syncopate_jax.options import Options",
        "plans may not import options",
    ),
    "plans see JAX": ("plans/ring.py", "import jax.numpy as jnp", "plans may not import jax"),
    "kernels communicate": (
        "pallas_kernels/m.py",
        "from syncopate_jax.ir import chunk",
        "pallas_kernels may not import ir",
    ),
    "kernels see torch": ("pallas_kernels/m.py", "import torch", "may not import torch"),
    "ir sees JAX": ("syncopate_jax/ir/a.py", "import jaxlib", "ir may not import jaxlib"),
    "star": ("syncopate_jax/tune/a.py", "from math import *", "star import from math"),
    "re-export": (
        "syncopate_jax/ir/__init__.py",
        "from syncopate_jax.errors import PlanError",
        "re-exports syncopate_jax.errors",
    ),
    "not installed": ("syncopate_jax/ops/a.py", "from plans import ring", "not once installed"),
    "no layer": ("syncopate_jax/misc.py", "", "misc has no place in ORDER"),
}


@pytest.mark.parametrize("case", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_violation_is_found(tmp_path: Path, case: tuple[str, str, str]) -> None:
    path, text, message = case
    (found,) = plant(tmp_path, {path: text})
    assert message in found


def test_a_cycle_is_found(tmp_path: Path) -> None:
    files = {
        "syncopate_jax/ir/a.py": "from syncopate_jax.ir import b\n",
        "syncopate_jax/ir/b.py": "from syncopate_jax.ir import a\n",
    }
    (found,) = plant(tmp_path, files)
    assert found.startswith("cycle: ") and found.count("syncopate_jax.ir.") == 3


def test_jax_behind_another_module_is_found(tmp_path: Path) -> None:
    files = {
        "syncopate_jax/errors.py": "import jax\n",
        "syncopate_jax/ir/a.py": "from syncopate_jax import errors\n",
    }
    (found,) = plant(tmp_path, files)
    assert found == "syncopate_jax.ir.a: ir may not import jax, nor through others"
