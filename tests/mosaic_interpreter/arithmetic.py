"""Operations on values, in NumPy: scalars of integers and booleans are Python's own.

What is not listed runs as JAX would run it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np


def plain(value: Any, aval: Any) -> Any:
    """A value as the interpreter keeps it."""
    if aval.shape == () and np.issubdtype(aval.dtype, np.bool_):
        return bool(value)
    if aval.shape == () and np.issubdtype(aval.dtype, np.integer):
        return int(value)
    return np.asarray(value, aval.dtype)


def _divide(a: Any, b: Any) -> Any:
    """Towards zero for integers."""
    if isinstance(a, int) and isinstance(b, int):
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    if np.issubdtype(np.asarray(a).dtype, np.integer):
        quotient = np.abs(a) // np.abs(b)
        return np.where(np.sign(a) == np.sign(b), quotient, -quotient)
    return a / b


def _remainder(a: Any, b: Any) -> Any:
    """Of the sign of ``a``."""
    return a - b * _divide(a, b) if isinstance(a, int) else np.fmod(a, b)


def _not(a: Any) -> Any:
    return not a if isinstance(a, bool) else ~a


def _select(which: Any, *cases: Any) -> Any:
    if isinstance(which, int):
        return cases[int(which)]
    return np.choose(np.asarray(which, np.int32), cases)


def _minimum(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) else np.minimum(a, b)


def _maximum(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) else np.maximum(a, b)


BY_NAME: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divide,
    "rem": _remainder,
    "neg": operator.neg,
    "min": _minimum,
    "max": _maximum,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": _not,
    "select_n": _select,
    "convert_element_type": lambda a: a,
    "layout_cast": lambda a: a,
}


def evaluate(eqn: Any, arguments: list[Any]) -> list[Any]:
    """The results of an operation without effects."""
    name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
    with np.errstate(all="ignore"):
        if name in BY_NAME:
            found: Any = [BY_NAME[name](*arguments)]
        elif name == "broadcast_in_dim" and not np.ndim(arguments[0]):
            found = [np.full(out.shape, arguments[0], out.dtype)]
        elif name == "slice" and params["strides"] is None:
            bounds = zip(params["start_indices"], params["limit_indices"], strict=True)
            found = [arguments[0][tuple(slice(*pair) for pair in bounds)]]
        else:
            typed = [
                np.asarray(value, var.aval.dtype)
                for value, var in zip(arguments, eqn.invars, strict=True)
            ]
            found = eqn.primitive.bind(*typed, **eqn.primitive.get_bind_params(params))
            found = found if eqn.primitive.multiple_results else [found]
    return [plain(value, var.aval) for value, var in zip(found, eqn.outvars, strict=True)]
