"""Every exception the package raises, and the findings that checks collect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_MESSAGE = 800  # characters of a FormatError


class SyncopateError(Exception):
    """Base of every error raised on purpose by this package."""


class InputError(SyncopateError, ValueError):
    """An argument is wrong: the message names it, what was found and what was needed."""


class FormatError(SyncopateError, ValueError):
    """A file or text is malformed: the message names the place in it.

    What it quotes may be of any length; a long message is cut in the middle.
    """

    def __init__(self, message: str):
        if len(message) > MAX_MESSAGE:
            half = MAX_MESSAGE // 2 - 1
            message = f"{message[:half]} … {message[-half:]}"
        super().__init__(message)


class UnsupportedError(SyncopateError, NotImplementedError):
    """The input is valid but this realisation cannot do it; the message says which can."""


class MeshError(SyncopateError, RuntimeError):
    """An operator was called where its mesh axis is not bound."""


class DeadlockError(SyncopateError, RuntimeError):
    """Communication or tiles can make no progress; the message names who waits for what."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One fault found by a check.

    Attributes:
      code: stable short name of the kind of fault, such as ``out-of-bounds``.
      rank: rank at fault, or -1 when the fault belongs to no single rank.
      index: index of the operation in that rank's list (or tile step), or -1.
      message: what was found, what was needed, what to do.
    """

    code: str
    rank: int
    index: int
    message: str

    def __str__(self) -> str:
        where = "" if self.rank < 0 else f"rank {self.rank} "
        where += "" if self.index < 0 else f"op {self.index} "
        return f"{where}[{self.code}]: {self.message}"


class PlanError(SyncopateError, ValueError):
    """A plan or schedule failed verification; ``findings`` holds every fault found."""

    def __init__(self, name: str, findings: Sequence[Finding], limit: int = 20, advice: str = ""):
        """``advice``: what to do about all of them; of the findings ``limit`` are shown."""
        self.findings = tuple(findings)
        shown = "\n".join(f"  {finding}" for finding in self.findings[:limit])
        rest = len(self.findings) - limit
        more = f"\n  … and {rest} more" if rest > 0 else ""
        first = f"{len(self.findings)} finding(s){advice and f'; {advice}'}"
        super().__init__(f"{name}: {first}\n{shown}{more}")
