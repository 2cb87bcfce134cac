"""The arguments of a plan template: its signature, with what its docstring says of each."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from syncopate_jax import plans
from syncopate_jax.ir.plan import Plan

# A value of each annotation, as --set takes it.
_EXAMPLES = {
    "int": "2",
    "str": "word",  # or the default
    "bool": "true",
    "Sequence[int]": "[4,4]",
    "tuple[int, int]": "[2,4]",
    "Sequence[Sequence[int]]": "[[0,1],[2,3]]",
}
_INDENT: Any = {"initial_indent": "    ", "subsequent_indent": "    "}
_ENTRY = re.compile(r"( +)(\w+(?:, \w+)*): (.*)")


@dataclass(frozen=True, slots=True)
class Argument:
    """One keyword argument of a template.

    Attributes:
      kind: its annotation, such as ``Sequence[int] | None``.
      default: what it is if not given.
      help: what the template's docstring, or that of all templates, says of it; may be empty.
    """

    name: str
    kind: str
    default: Any
    help: str

    @property
    def example(self) -> str:
        """How ``--set`` gives it, fit for a shell."""
        value = _EXAMPLES[self.kind.removesuffix(" | None")]
        value = self.default if isinstance(self.default, str) else value
        return (
            f"--set {self.name}={value}"
            if value.isidentifier() or value.isdigit()
            else f"--set '{self.name}={value}'"
        )

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        known = {"name": self.name, "type": self.kind, "default": self.default, "help": self.help}
        return {**known, "example": self.example}

    def __str__(self) -> str:
        default = json.dumps(self.default) if isinstance(self.default, bool) else self.default
        head = f"{self.name}: {self.kind}, default {default}; {self.example}"
        return "\n".join([head, *textwrap.wrap(self.help, 96, **_INDENT)])


def arguments(template: Callable[..., Plan]) -> tuple[Argument, ...]:
    """What ``template`` takes beside its ranks and shape, in the order of its signature."""
    said = {**_described(plans.__doc__), **_described(inspect.getdoc(template))}
    return tuple(
        Argument(name, str(parameter.annotation), parameter.default, said.get(name, ""))
        for name, parameter in inspect.signature(template).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    )


def _described(docstring: str | None) -> dict[str, str]:
    """What the docstring says of each name that it lists as ``name: …`` or ``name, other: …``."""
    found: dict[str, str] = {}
    names: list[str] = []
    indent = 0
    for line in (docstring or "").splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry and (not names or len(entry[1]) <= indent):
            indent, names = len(entry[1]), entry[2].split(", ")
            found |= dict.fromkeys(names, entry[3])
        elif names and line.startswith(" " * (indent + 1)):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found
