"""What a command of the command line is, and how all of them speak.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 the answer is no (a
finding, a deadlock), 2 wrong usage or input.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import MAX_EXTENT

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


def add_json_flag(parser: argparse.ArgumentParser, units: str = "") -> None:
    """The ``--json`` that every command with a result has; ``units``: of its numbers."""
    about = f"print the result as JSON{units and f' ({units})'}"
    parser.add_argument("--json", action="store_true", help=about)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=1))


def integers(
    flag: str, given: str, least: int = 0, example: str = "8192,4096", separators: str = ","
) -> tuple[int, ...]:
    """The integers of ``--flag A,B,…``, each of ``least`` to ``MAX_EXTENT``.

    Raises InputError that says what is none of them.
    """
    shown = given if len(given) <= 60 else f"{given[:60]}…"
    words = [word.strip() for word in re.split(f"[{separators}]", given)]
    if not all(re.fullmatch(r"-?[0-9]+", word) for word in words):
        raise InputError(f"{flag} {shown!r}: needs integers separated by commas, such as {example}")
    for word in words:
        # Python refuses to read numbers of thousands of digits.
        if len(word) > 20 or not least <= int(word) <= MAX_EXTENT:
            raise InputError(
                f"{flag} {shown!r}: needs integers of {least} to {MAX_EXTENT}, found {word[:40]}"
            )
    return tuple(map(int, words))


def file_name(given: str) -> str:
    """``given``, as the ``type`` of an argument that names what is to be written."""
    if not given:
        raise argparse.ArgumentTypeError("'' names no file")
    return given


@contextmanager
def writing(name: str) -> Iterator[None]:
    """What goes wrong in it names the file: a full disk, for one, does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), name) from error
