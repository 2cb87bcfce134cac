"""JSON fields: each kind of value, and the message where it is another."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from syncopate_jax.errors import FormatError
from syncopate_jax.importers.json_fields import Field, read_json


def test_values() -> None:
    root = read_json("f", '{"a": [1, 2], "b": "x", "c": true, "d": 7}')
    fields = root.fields(("a", "b"), ("c", "d", "e"))
    assert fields["a"].integers() == (1, 2)
    assert (fields["b"].text(), fields["c"].flag(), fields["d"].integer(7, 7)) == ("x", True, 7)
    assert fields["b"].one_of(("x", "y")) == "x"
    assert fields["a"].items()[1].path == "f.a[1]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "f: is not JSON (Expecting property name"),
        ("[" * 100_000, "f: nested too deep"),
        ('{"a": NaN}', "f: has the number NaN, which JSON has not"),
        ('{"a": 1, "a": 2}', "f: has 'a' twice in one object"),
        ('{"a": 1' + "0" * 5000 + "}", "f: is not JSON (Exceeds the limit"),
    ],
)
def test_not_json(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        read_json("f", text)


@pytest.mark.parametrize(
    ("value", "read", "message"),
    [
        ([], lambda f: f.fields(("a",)), "f: found [], needs an object with a"),
        ({}, lambda f: f.fields(("a", "b")), "f: has no 'a'; needs a, b"),
        ({"a": 1, "z": 2}, lambda f: f.fields(("a",), ("b",)), "has an unknown 'z'; known: a, b"),
        (1, lambda f: f.members(), "f: found 1, needs an object"),
        ({}, lambda f: f.items(), "f: found {}, needs a list"),
        ([0] * 65537, lambda f: f.items(), "f: has 65537 items, at most 65536 fit"),
        (True, lambda f: f.integer(), "f: found true, needs an integer in 0..2147483647"),
        (1.5, lambda f: f.integer(1, 2), "f: found 1.5, needs an integer in 1..2"),
        ([1, "x"], lambda f: f.integers(), 'f[1]: found "x", needs an integer'),
        ("", lambda f: f.text(), 'f: found "", needs a string that is not empty'),
        (["x"], lambda f: f.one_of(("x",)), 'f: found ["x"], needs one of x'),
        (0, lambda f: f.flag(), "f: found 0, needs true or false"),
        ("y" * 99, lambda f: f.flag(), "y…, needs true or false"),
    ],
)
def test_other_values(value: Any, read: Callable[[Field], Any], message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        read(Field("f", value))
