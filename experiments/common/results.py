"""Writing of results: what was measured, on what, with which versions and options."""

import json
import pathlib
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """The device, the versions and the commit, for a result's head."""
    import jax  # here, because what starts processes and gathers their rows does without
    import jaxlib

    devices = jax.devices()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "device": f"{len(devices)}x {devices[0].device_kind}",
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
    }


def write(path: pathlib.Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes ``{**head, "rows": rows}`` as JSON, one row a line."""
    text = json.dumps(head, indent=1)[:-2]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text},\n "rows": [\n  {lines}\n ]\n}}\n')


class Results:
    """Rows by stage, written after each, so that a run that is cut short still counts.

    Args:
      path: of the file.
      head: what is written before the rows.
      summary: what the rows say, written with the head.
    """

    def __init__(
        self,
        path: pathlib.Path,
        head: dict[str, Any],
        summary: Callable[[Sequence[dict[str, Any]]], dict[str, Any]],
    ):
        self.path, self.head, self.summary = path, head, summary
        self.rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, stage: str, row: dict[str, Any]) -> None:
        """Adds a row and writes the file."""
        with self._lock:
            self.rows.append({"stage": stage, **row})
            print(stage, json.dumps(row)[:600], flush=True)
            self.head["summary"] = self.summary(self.rows)
            write(self.path, self.head, self.rows)
