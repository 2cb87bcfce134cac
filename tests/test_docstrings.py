"""Every module and public function says what it is for, and which errors it raises."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from syncopate_jax import errors

ROOT = Path(__file__).parents[1]
FILES = [
    path
    for folder in ("syncopate_jax", "plans", "pallas_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
ERRORS = {name for name in vars(errors) if name.endswith("Error")}


def public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Classes and functions of a module; one statement alone speaks for itself."""
    for node in tree.body:
        named = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if named and (isinstance(node, ast.ClassDef) or len(node.body) > 1):
            yield node


def raised(function: ast.FunctionDef) -> set[str]:
    """The package's errors that a function raises itself."""
    found = {node.exc for node in ast.walk(function) if isinstance(node, ast.Raise)}
    called = {exc.func for exc in found if isinstance(exc, ast.Call)}
    return ERRORS & {name.id for name in called if isinstance(name, ast.Name)}


def faults(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    # ``configure`` and ``run`` of a command are those of ``commands.command.Command``.
    known = ("configure", "run") if path.parent.name == "commands" else ()
    found = [] if ast.get_docstring(tree) else ["the module says nothing"]
    for node in public(tree):
        text = ast.get_docstring(node) or ""
        if not text and node.name not in known:
            found.append(f"{node.name} says nothing")
        elif text and isinstance(node, ast.FunctionDef) and raised(node) and "aises" not in text:
            found.append(f"{node.name} does not say that it raises {', '.join(raised(node))}")
    return found


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda p: p.name)
def test_what_is_public_is_documented(folder: Path) -> None:
    found = {path.name: faults(path) for path in FILES if path.parent == folder}
    assert {name: said for name, said in found.items() if said} == {}


def test_what_is_missing_is_found(tmp_path: Path) -> None:
    path = tmp_path / "new.py"
    path.write_text(
        'def f(x):\n  """Doubles."""\n  raise InputError("x")\ndef g():\n  a = 1\n  a\n'
    )
    assert faults(path) == [
        "the module says nothing",
        "f does not say that it raises InputError",
        "g says nothing",
    ]
