"""The notebooks run: every code cell, in order, in a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "experiments" / "notebooks"
# What a notebook shows is not looked at; IPython is not needed to run one.
DISPLAY = """
import sys, types
module = types.ModuleType("IPython.display")
module.SVG = module.Image = module.Markdown = module.display = lambda *given, **named: None
sys.modules["IPython"], sys.modules["IPython.display"] = types.ModuleType("IPython"), module
sys.modules["IPython"].version_info = (9, 0, 0)  # matplotlib looks
"""


def cells(path: Path) -> list[str]:
    book = json.loads(path.read_text())
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def notebooks() -> list[Path]:
    found = sorted(FOLDER.glob("*.ipynb"))
    assert found, f"no notebook in {FOLDER}"
    return found


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
@pytest.mark.slow
def test_runs(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join([DISPLAY, *cells(path)]))
    environ = {**os.environ, "MPLBACKEND": "Agg", "NOTEBOOKS": str(FOLDER)}
    environ.pop("XLA_FLAGS", None)
    found = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def test_pictures_are_there_and_small() -> None:
    """What cells draw is kept beside the notebooks, and shown by their text."""
    shown = set()
    for path in notebooks():
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                shown |= set(re.findall(r"!\[\]\((.+?)\)", "".join(cell["source"])))
    kept = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("figures/*")}
    assert kept == shown
    assert sum((FOLDER / name).stat().st_size for name in kept) < 250_000


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_holds_no_output(path: Path) -> None:
    book = json.loads(path.read_text())
    assert [cell.get("outputs", []) for cell in book["cells"] if cell.get("outputs")] == []
