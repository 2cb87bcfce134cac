"""Reading JSON files of a fixed shape: messages say which field, what was found, what is needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from syncopate_jax.errors import FormatError
from syncopate_jax.ir.arguments import MAX_EXTENT

MAX_ITEMS = 2**16  # of a list


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a JSON file and the path to it."""

    path: str
    value: Any

    def fail(self, needed: str) -> NoReturn:
        """Raises FormatError: where, what was found and what was needed."""
        shown = json.dumps(self.value)
        shown = shown if len(shown) < 60 else f"{shown[:57]}…"
        raise FormatError(f"{self.path}: found {shown}, needs {needed}")

    def fields(self, needed: Sequence[str], optional: Sequence[str] = ()) -> Mapping[str, Field]:
        """The members of an object, which has all of ``needed`` and none but ``optional`` else."""
        if not isinstance(self.value, dict):
            self.fail(f"an object with {', '.join(needed)}")
        for key in needed:
            if key not in self.value:
                raise FormatError(f"{self.path}: has no {key!r}; needs {', '.join(needed)}")
        for key in self.value:
            if key not in (*needed, *optional):
                known = ", ".join((*needed, *optional))
                raise FormatError(f"{self.path}: has an unknown {key[:60]!r}; known: {known}")
        return {key: Field(f"{self.path}.{key}", value) for key, value in self.value.items()}

    def members(self) -> Mapping[str, Field]:
        """The members of an object, whatever they are called."""
        if not isinstance(self.value, dict):
            self.fail("an object")
        return {key: Field(f"{self.path}.{key}", value) for key, value in self.value.items()}

    def items(self) -> list[Field]:
        """The items of a list."""
        if not isinstance(self.value, list):
            self.fail("a list")
        if len(self.value) > MAX_ITEMS:
            raise FormatError(f"{self.path}: has {len(self.value)} items, at most {MAX_ITEMS} fit")
        return [Field(f"{self.path}[{i}]", item) for i, item in enumerate(self.value)]

    def each[T](self, read: Callable[[Field], T]) -> tuple[T, ...]:
        """``read`` of every item of a list."""
        return tuple(read(item) for item in self.items())

    def integer(self, least: int = 0, most: int = MAX_EXTENT) -> int:
        """An integer in ``least..most``."""
        if type(self.value) is not int or not least <= self.value <= most:
            self.fail(f"an integer in {least}..{most}")
        return self.value

    def integers(self, least: int = 0, most: int = MAX_EXTENT) -> tuple[int, ...]:
        """A list of integers in ``least..most``."""
        return self.each(lambda item: item.integer(least, most))

    def text(self) -> str:
        """A string that is not empty."""
        if not isinstance(self.value, str) or not self.value:
            self.fail("a string that is not empty")
        return self.value

    def one_of(self, known: Sequence[str]) -> str:
        """One of the strings ``known``."""
        if self.value not in known or not isinstance(self.value, str):
            self.fail(f"one of {', '.join(known)}")
        return self.value

    def flag(self) -> bool:
        """true or false."""
        if not isinstance(self.value, bool):
            self.fail("true or false")
        return self.value


def read_json(source: str, text: str) -> Field:
    """The one value in ``text``; raises FormatError, also where a key is there twice."""
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except FormatError as error:
        raise FormatError(f"{source}: {error}") from None
    except RecursionError:
        raise FormatError(f"{source}: nested too deep") from None
    except ValueError as error:
        raise FormatError(f"{source}: is not JSON ({error})") from error
    return Field(source, value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise FormatError(f"has {key[:60]!r} twice in one object")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise FormatError(f"has the number {name}, which JSON has not")
