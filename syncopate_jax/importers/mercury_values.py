"""Values as Python prints them, of which Mercury's printed programs are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from syncopate_jax.importers.scanner import Cursor


@dataclass(slots=True)
class Call:
    """``NAME(positional, key=value)``."""

    name: str
    positional: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)


def read_value(at: Cursor) -> Any:
    """An integer, a word or string, a list, a tuple, or a Call.

    ``np.int64(3)`` is 3; the Python code in ``PyNode(…)`` is not read, only kept as text.
    """
    at.enter()
    found = _value(at)
    at.leave()
    return found


def _value(at: Cursor) -> Any:
    if at.skip("["):
        return _values(at, "]")
    if at.skip("("):
        return tuple(_values(at, ")"))
    if at.token.kind == "string":
        return at.take().text[1:-1]
    if at.token.kind == "number":
        return at.integer()
    word = at.of("word", "a value")
    if not at.has("("):
        return word
    if word == "PyNode":
        return Call(word, [at.balanced()])
    at.expect("(")
    call = _arguments(at, Call(word))
    if word == "np.int64" and len(call.positional) == 1:
        return call.positional[0]
    return call


def _values(at: Cursor, closing: str) -> list[Any]:
    found: list[Any] = []
    while not at.skip(closing):
        if found:
            at.expect(",")
            if at.skip(closing):
                break
        found.append(read_value(at))
    return found


def _arguments(at: Cursor, call: Call) -> Call:
    while not at.skip(")"):
        if call.positional or call.named:
            at.expect(",")
        if at.token.kind == "word" and at.ahead(1).text == "=":
            key = at.take().text
            at.expect("=")
            call.named[key] = read_value(at)
        else:
            call.positional.append(read_value(at))
    return call
