"""Reading a plan from a file or stdin, in either of its forms."""

from __future__ import annotations

import argparse
import sys

from syncopate_jax.ir import serial
from syncopate_jax.ir.plan import Plan


def add_plan_argument(parser: argparse.ArgumentParser) -> None:
    """The positional argument FILE."""
    parser.add_argument(
        "file", metavar="FILE", help="a plan, as text or JSON; - reads standard input"
    )


def read_plan(name: str) -> Plan:
    """The plan in the file ``name`` (``-``: stdin), as JSON or text; raises as ``serial.load``."""
    if name == "-":
        return serial.from_bytes(sys.stdin.buffer.read(), "standard input")
    return serial.load(name)
