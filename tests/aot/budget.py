"""What a kernel may take of a multiprocessor: ``budgets.json``, and what is over it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tests.aot.hopper import Kernel

BUDGETS = json.loads(Path(__file__).with_name("budgets.json").read_text())


def budget(operator: str, backend: str) -> dict[str, int]:
    """Limits by the fields of ``Kernel``; the more particular entry counts."""
    found: dict[str, int] = {}
    for key in ("default", backend, operator, f"{operator}/{backend}"):
        found |= BUDGETS.get(key, {})
    return found


def over(kernel: Kernel, allowed: dict[str, int]) -> list[str]:
    """What of a kernel is over its budget, in words."""
    found = dataclasses.asdict(kernel)
    words = [f"{name} {found[name]} of {n}" for name, n in allowed.items() if found[name] > n]
    return words + (["the tensor cores wait for each other"] if kernel.serialized else [])
