"""Writing of results: what was measured, on what, with which versions and options."""

import json
import pathlib
import subprocess
from typing import Any

import jax
import jaxlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """The device, the versions and the commit, for a result's head."""
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
