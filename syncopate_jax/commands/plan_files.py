"""Reading a plan from a file or stdin, in either of its forms."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from syncopate_jax.errors import FormatError
from syncopate_jax.ir import serial, text
from syncopate_jax.ir.plan import Plan


def add_plan_argument(parser: argparse.ArgumentParser) -> None:
    """The positional argument FILE."""
    parser.add_argument(
        "file", metavar="FILE", help="a plan, as text or JSON; - reads standard input"
    )


def read_plan(name: str) -> Plan:
    """The plan in the file ``name`` (``-``: stdin); what begins with ``{`` is JSON, else text.

    Raises FormatError that names the file, or OSError.
    """
    raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    shown = "standard input" if name == "-" else name
    try:
        found = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{shown}: plan file: is not UTF-8 ({error})") from error
    if not found.strip():
        raise FormatError(f"{shown}: plan file: is empty")
    try:
        is_json = found.lstrip().startswith("{")
        return serial.from_json(found) if is_json else text.from_text(found)
    except FormatError as error:
        raise FormatError(f"{shown}: {error}") from error
