"""Types of a template's arguments, checked by its annotations before it does anything with them.

Templates check the range of what they are given; that it is of the right type at all is the same
for each, and read from its signature, so that a new template has the checks by having annotations.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import dtype_name

MAX_TEMPLATE_RANKS = 16_384
"""Of the plans that templates make: all operations of more ranks fit no machine's memory."""


def checked[**P, R](template: Callable[P, R]) -> Callable[P, R]:
    """``template``, raising InputError for an argument that it has not, lacks or has another type.

    Raises:
      InputError: at once, if an annotation is not one of the known ones.
    """
    signature = inspect.signature(template)
    name = template.__name__
    for argument in signature.parameters.values():
        kind = str(argument.annotation).removesuffix(" | None")
        if kind not in _KINDS:
            raise InputError(
                f"{name}: {argument.name} is annotated {argument.annotation}, needs one of "
                f"{', '.join(_KINDS)}, with or without None"
            )

    @functools.wraps(template)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            takes = ", ".join(signature.parameters)
            raise InputError(f"{name}: {error}; its arguments are {takes}") from error
        found = bound.arguments
        if "dtype" in found:
            found["dtype"] = dtype_name(found["dtype"])
        given = found.get("name")
        where = given if isinstance(given, str) and given else name
        for key, value in found.items():
            _check(where, key, str(signature.parameters[key].annotation), value)
        return template(*bound.args, **bound.kwargs)

    return call


def _check(where: str, name: str, annotation: str, value: Any) -> None:
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return
    fits, needed = _KINDS[kind]
    if not fits(value):
        tail = ", or None" if kind != annotation else ""
        needed = "a dtype or its name, such as 'float32'" if name == "dtype" else needed
        raise InputError(f"{where}: {name} must be {needed}{tail}, found {value!r}")
    if name == "num_ranks" and operator.index(value) > MAX_TEMPLATE_RANKS:
        raise InputError(f"{where}: num_ranks must be at most {MAX_TEMPLATE_RANKS}, found {value}")


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_integers(value: Any) -> bool:
    return _is_sequence(value) and all(map(_is_integer, value))


def _are_rows(value: Any) -> bool:
    return _is_sequence(value) and all(map(_are_integers, value))


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_integer, "an integer"),
    "str": (lambda value: isinstance(value, str), "a string"),
    "bool": (lambda value: isinstance(value, bool | np.bool_), "True or False"),
    "Sequence[int]": (_are_integers, "a sequence of integers"),
    "Sequence[Sequence[int]]": (_are_rows, "a sequence of sequences of integers"),
    "tuple[int, int]": (_are_integers, "a sequence of integers"),
}
