"""Checks of the arguments that templates and passes share: each names argument and value."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from syncopate_jax.errors import InputError

MAX_EXTENT = 2**31 - 1  # columns are int32


MADE_BY = {
    "Plan": (
        "syncopate_jax.templates.get(name)(ranks, shape, …) makes one, "
        "syncopate_jax.ir.serial.load reads one from a file"
    ),
    "Topology": "syncopate_jax.ir.presets.preset(name, ranks) makes one, such as 'h200'",
}
"""Where what users are often asked for comes from, by its type."""


def instance(where: str, what: str, value: Any, kind: type) -> None:
    """Raises InputError unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        name = kind.__name__
        hint = f"; {MADE_BY[name]}" if name in MADE_BY else ""
        raise InputError(f"{where}: {what} needs a {name}, found {value!r}{hint}")


def integer(where: str, what: str, value: Any, least: int) -> int:
    """``value`` as an int of at least ``least`` that fits the columns; else raises InputError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise InputError(f"{where}: {what} must be an integer, found {value!r}") from None
    if not least <= found <= MAX_EXTENT:
        raise InputError(f"{where}: {what} must be in {least}..{MAX_EXTENT}, found {found}")
    return found


def dtype_name(value: Any) -> Any:
    """The name of a dtype, such as ``x.dtype`` or ``jax.numpy.float32``; what is none as it is."""
    if value is None or isinstance(value, str):  # of None NumPy makes float64
        return value
    try:
        found = np.dtype(value)
    except (TypeError, ValueError):
        return value
    return value if found.type is np.void else found.name  # void: lists and dicts as structures


def extents(where: str, shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as a tuple of extents, each 0 or more; else raises InputError."""
    return tuple(integer(where, f"shape{tuple(shape)}", extent, 0) for extent in shape)


def axis_of(where: str, what: str, axis: int, shape: tuple[int, ...]) -> int:
    """``axis`` counted from the front; raises InputError when ``shape`` has no such axis."""
    found = integer(where, what, axis, -MAX_EXTENT)
    if not -len(shape) <= found < len(shape):
        raise InputError(
            f"{where}: {what} {found} is not an axis of shape {shape}, "
            f"which has {len(shape)} dimensions"
        )
    return found % len(shape)


def largest_divisor(value: int, most: int) -> int:
    """The largest number up to ``most`` that divides ``value``."""
    return next(part for part in range(min(value, most), 0, -1) if value % part == 0)


def one_of(where: str, what: str, value: str, known: Sequence[str]) -> int:
    """Position of ``value`` in ``known``; raises InputError that lists what is known."""
    if value not in known:
        raise InputError(f"{where}: {what} {value!r} is not one of {', '.join(known)}")
    return list(known).index(value)


def origin_text(name: str, **arguments: object) -> str:
    """``name(argument=value, …)``, without arguments that are None; long tuples are cut short."""
    shown = (f"{key}={_short(value)}" for key, value in arguments.items() if value is not None)
    return f"{name}({', '.join(shown)})"


def _short(value: object) -> str:
    if isinstance(value, tuple) and len(value) > 16:
        return f"({', '.join(map(str, value[:3]))}, … {len(value)} in all)"
    return str(value)
