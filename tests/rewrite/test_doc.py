"""``docs/overlap.md`` quotes reasons as they are reported."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def texts() -> str:
    """All strings of the rewriter's sources, what is filled in as an ellipsis."""
    found = []
    for folder in ("rewrite", "ops"):
        for path in sorted((ROOT / "syncopate_jax" / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_every_reason_in_the_doc_is_reported() -> None:
    section = (ROOT / "docs/overlap.md").read_text().split("## Why a pair is left")[1]
    rows = [line.split("|")[1] for line in section.split("\n## ")[0].splitlines() if "|" in line]
    quoted = re.findall(r"`([^`]+)`", "\n".join(rows))
    assert len(quoted) > 35
    known = texts()
    fragments = [part.strip(" …();") for text in quoted for part in text.split("…")]
    assert [part for part in fragments if len(part) > 3 and part not in known] == []
