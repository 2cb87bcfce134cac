"""Golden texts: the expected output of what prints plans, one file a case, under this folder.

Set ``UPDATE_GOLDEN=1`` to write what was found instead of comparing; then read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent


def golden(name: str, found: str) -> str:
    """The expected text of case ``name``, such as ``plans/all_gather_ring.txt``."""
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found, encoding="utf-8")
    return path.read_text(encoding="utf-8")
