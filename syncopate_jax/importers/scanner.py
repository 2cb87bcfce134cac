"""Tokens of a text with their line and column, and a cursor that every text parser walks with."""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from syncopate_jax.errors import FormatError

MAX_DIGITS = 18  # of an integer: fits 64 bits, and int() takes no time over it
MAX_DEPTH = 100  # of brackets: far more than any compiler prints, far less than Python's stack


class Token(NamedTuple):
    """One token: its kind (a name of the scanner's pattern), its text, where it begins."""

    kind: str
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class Language:
    """What the tokens of a text are.

    Attributes:
      name: of the format, for messages.
      pattern: alternatives as named groups; the groups ``space`` and ``comment`` are skipped, and
        ``mark`` is punctuation.
      brackets: the brackets that come in pairs, each opening one before its closing one.
    """

    name: str
    pattern: re.Pattern[str]
    brackets: str = "()[]{}"


class Cursor:
    """A place in a text's tokens. Every message names the line and the column."""

    def __init__(self, language: Language, text: str):
        self.language = language
        self.text = text
        self.tokens: list[Token] = []
        self.place = 0
        self.depth = 0
        self._lines = [0, *(found.end() for found in re.finditer("\n", text))]
        at = 0
        for match in language.pattern.finditer(text):
            start, end = match.span()
            if start != at:
                break
            at = end
            kind = match.lastgroup
            if kind != "space" and kind != "comment" and kind is not None:
                self.tokens.append(Token(kind, match[0], start))
        if at != len(text):
            self.fail_at(
                at, f"found {text[at]!r}, which begins nothing known; is the file damaged?"
            )
        self.tokens.append(Token("end", "", len(text)))

    @property
    def token(self) -> Token:
        """The next token."""
        return self.tokens[self.place]

    def ahead(self, count: int) -> Token:
        """The token ``count`` places on; the last one, beyond the end."""
        return self.tokens[min(self.place + count, len(self.tokens) - 1)]

    def line(self, at: int | None = None) -> int:
        """The line of a position, of the next token if None."""
        return bisect.bisect_right(self._lines, self.token.at if at is None else at)

    def start(self, line: int) -> int:
        """The position at which a line begins."""
        return self._lines[line - 1]

    def take(self) -> Token:
        """The next token, and past it."""
        token = self.token
        if token.kind != "end":
            self.place += 1
        return token

    def has(self, *texts: str) -> bool:
        """Whether the next token is one of ``texts``."""
        return self.token.text in texts and self.token.kind not in ("end", "string")

    def skip(self, *texts: str) -> bool:
        """Whether the next token was one of ``texts``, and past it if so."""
        found = self.has(*texts)
        self.place += found
        return found

    def expect(self, text: str) -> None:
        """Past the token ``text``."""
        if not self.skip(text):
            self.fail(repr(text))

    def of(self, kind: str, needed: str) -> str:
        """The text of the next token, which must be of ``kind``."""
        if self.token.kind != kind:
            self.fail(needed)
        return self.take().text

    def integer(self, needed: str = "an integer") -> int:
        """The next token as an integer."""
        text = self.token.text
        if self.token.kind != "number" or not re.fullmatch(r"-?\d+", text, re.ASCII):
            self.fail(needed)
        if len(text) > MAX_DIGITS:
            self.fail(f"{needed} of at most {MAX_DIGITS} digits")
        self.take()
        return int(text)

    def integers(self, opening: str, closing: str) -> tuple[int, ...]:
        """Integers between brackets, separated by commas."""
        self.expect(opening)
        found: list[int] = []
        while not self.skip(closing):
            if found:
                self.expect(",")
            found.append(self.integer(f"an integer or {closing!r}"))
        return tuple(found)

    def enter(self) -> None:
        """Counts one more open bracket; FormatError when there are too many."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"at most {MAX_DEPTH} levels of brackets")

    def leave(self) -> None:
        """Counts one bracket less."""
        self.depth -= 1

    def balanced(self) -> str:
        """The text from the bracket that comes next to the one that closes it, and past it."""
        start = self.token.at
        wanted: list[str] = []
        while True:
            token = self.token
            if token.kind == "end":
                self.fail(repr(wanted[-1]) if wanted else "a bracket")
            place = self.language.brackets.find(token.text) if token.kind == "mark" else -1
            if place >= 0 and place % 2 == 0:
                wanted.append(self.language.brackets[place + 1])
            elif place >= 0:
                if not wanted or token.text != wanted.pop():
                    self.fail("brackets that match")
            elif not wanted:
                self.fail("a bracket")
            self.take()
            if not wanted:
                return self.text[start : token.at + 1]

    def fail(self, needed: str) -> NoReturn:
        """Raises FormatError: what was found where, and what was needed."""
        token = self.token
        shown = repr(token.text[:40]) if token.kind != "end" else "the end of the file"
        self.fail_at(token.at, f"found {shown}, needs {needed}")

    def fail_at(self, at: int, message: str) -> NoReturn:
        """Raises FormatError with the line and column of position ``at``."""
        line = self.line(at)
        column = at - self._lines[line - 1] + 1
        raise FormatError(f"{self.language.name}: line {line}, column {column}: {message}")
