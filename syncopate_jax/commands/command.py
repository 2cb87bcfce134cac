"""What a command of the command line is, and how all of them speak.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 the answer is no (a
finding, a deadlock), 2 wrong usage or input.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

DONE, NO, WRONG = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
      name: the word on the command line.
      help: one line.
      configure: adds its arguments to its parser.
      run: does it, and returns the exit code. It imports what is heavy itself, JAX above all.
    """

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """The ``--json`` that every command with a result has."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=1))
