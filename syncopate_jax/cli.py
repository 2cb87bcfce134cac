"""The command line: ``syncopate COMMAND …``, the same as ``python -m syncopate_jax COMMAND …``.

A command is one file of ``commands`` and one line of the table here.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from syncopate_jax.commands import (
    advise,
    demo,
    doctor,
    explain,
    import_plan,
    plan,
    simulate,
    synthesize,
    verify,
)
from syncopate_jax.commands.command import DONE, NO, WRONG, Command
from syncopate_jax.errors import DeadlockError, SyncopateError

COMMANDS: tuple[Command, ...] = (
    demo.COMMAND,
    plan.COMMAND,
    import_plan.COMMAND,
    verify.COMMAND,
    simulate.COMMAND,
    synthesize.COMMAND,
    explain.COMMAND,
    advise.COMMAND,
    doctor.COMMAND,
)

# As a shell reports a program that a signal has ended: 128 and the signal's number.
_INTERRUPTED, _BROKEN_PIPE = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; never raises on wrong input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else DONE
    command: Command = args.command
    try:
        code = command.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read has left. Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _fail(command, "interrupted", _INTERRUPTED)
    except DeadlockError as error:
        return _fail(command, str(error), NO)
    except SyncopateError as error:
        return _fail(command, str(error), WRONG)
    except MemoryError:
        return _fail(command, "not enough memory", WRONG)
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        return _fail(command, f"{name}{error.strerror or error}", WRONG)


def _fail(command: Command, message: str, code: int) -> int:
    print(f"syncopate {command.name}: error: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="syncopate",
        description="Plan, check and time chunk-level communication that overlaps with kernels.",
    )
    version = metadata.version("syncopate-jax")
    parser.add_argument("--version", action="version", version=f"syncopate-jax {version}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        found = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.configure(found)
        found.set_defaults(command=command)
    return parser
