"""What a body computes, by NumPy: its program, equation by equation, on blocks that are given.

Fractions are float64 whatever their type in the body, so that two ways to compute one value differ
by next to nothing. What NumPy has not is left to JAX.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.extend import core

from syncopate_jax.kernel.carried_state import ADDEND
from syncopate_jax.kernel.step_numbers import CALLS, COMPARISONS

OVERHEAD = 1000
"""What an equation costs beside its elements, in the unit of ``Machine.left``: about 1 ns."""


class UntoldError(Exception):
    """The program, or a part of it, cannot be computed here; the message is why."""


@dataclass(slots=True, eq=False)
class Held:
    """A reference; of a semaphore it holds nothing."""

    array: np.ndarray | None


def widened(dtype: Any) -> np.dtype:
    """The type in which values of ``dtype`` are computed; raises UntoldError if there is none."""
    if jax.numpy.issubdtype(dtype, jax.numpy.floating):
        return np.dtype(np.float64)
    if jax.numpy.issubdtype(dtype, jax.numpy.complexfloating):
        return np.dtype(np.complex128)
    if dtype == np.bool_ or jax.numpy.issubdtype(dtype, jax.numpy.integer):
        return np.dtype(dtype)
    raise UntoldError(f"it has values of {dtype}")


def _div(a: Any, b: Any) -> Any:
    if np.issubdtype(np.result_type(a, b), np.integer):
        return (a - np.fmod(a, b)) // b  # towards zero
    return a / b


def _dot(a: Any, b: Any, *, dimension_numbers: Any, preferred_element_type: Any, **_: Any) -> Any:
    (a_sum, b_sum), (a_batch, b_batch) = dimension_numbers
    letters = iter(string.ascii_letters)
    left = [next(letters) for _ in range(a.ndim)]
    right = [next(letters) for _ in range(b.ndim)]
    for i, j in (*zip(a_sum, b_sum, strict=True), *zip(a_batch, b_batch, strict=True)):
        right[j] = left[i]
    batch = [left[i] for i in a_batch]
    kept = [x for i, x in enumerate(left) if i not in (*a_sum, *a_batch)]
    kept += [x for i, x in enumerate(right) if i not in (*b_sum, *b_batch)]
    out = widened(a.dtype if preferred_element_type is None else preferred_element_type)
    named = f"{''.join(left)},{''.join(right)}->{''.join(batch + kept)}"
    return np.einsum(named, a.astype(out), b.astype(out), optimize=True)


def _broadcast(x: Any, *_: Any, shape: Any, broadcast_dimensions: Any, **__: Any) -> Any:
    sizes = [1] * len(shape)
    for dim, size in zip(broadcast_dimensions, np.shape(x), strict=True):
        sizes[dim] = size
    return np.broadcast_to(np.reshape(x, sizes), shape)


def _iota(*_: Any, dtype: Any, shape: Any, dimension: int, **__: Any) -> Any:
    sizes = [-1 if d == dimension else 1 for d in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)


def _slice(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    parts = zip(start_indices, limit_indices, strides or [1] * x.ndim, strict=True)
    return x[tuple(slice(*part) for part in parts)]


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *, axes, **_: function(x, axis=tuple(axes))


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *, axes, index_dtype, **_: function(x, axis=axes[0]).astype(index_dtype)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *ins, **_: function(*ins)


ELEMENTS: dict[str, Callable[..., Any]] = {
    **COMPARISONS,
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _div,
    "rem": np.fmod,
    "pow": np.power,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "square": np.square,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "floor": np.floor,
    "ceil": np.ceil,
    "is_finite": np.isfinite,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: np.choose(which, cases),
    "copy": np.copy,
    "reduce_precision": np.copy,
}
SHAPED: dict[str, Callable[..., Any]] = {
    "integer_pow": lambda x, *, y: x**y if y >= 0 else 1 / x**-y,
    "convert_element_type": lambda x, *, new_dtype, **_: np.asarray(x).astype(widened(new_dtype)),
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, *_, new_sizes, dimensions=None, **__: np.reshape(
        x if dimensions is None else np.transpose(x, dimensions), new_sizes
    ),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, tuple(dimensions)),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "slice": _slice,
    "iota": _iota,
    "dot_general": _dot,
    "reduce_sum": _reduced(np.sum),
    "reduce_prod": _reduced(np.prod),
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_and": _reduced(np.bitwise_and.reduce),
    "reduce_or": _reduced(np.bitwise_or.reduce),
    "argmax": _first(np.argmax),
    "argmin": _first(np.argmin),
}
BY_NUMPY = {name: _plain(function) for name, function in ELEMENTS.items()} | SHAPED
WORDLESS = ("debug_print", "debug_callback", "dma_wait")
"""What changes nothing here; copies are done where they start."""


class Machine:
    """Runs programs, for no more than ``left`` units of work.

    ``addend`` makes of a shape what is given for the addend; None: what its function gives.
    """

    def __init__(self, left: float, addend: Callable[[tuple[int, ...]], np.ndarray] | None = None):
        self.left, self.addend = left, addend

    def run(self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The outputs; references, which are ``Held``, are changed in place.

        Raises UntoldError where it cannot be computed, or takes too much work.
        """
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))

        def value(v: Any) -> Any:
            if isinstance(v, core.Literal):
                aval: Any = v.aval
                return np.asarray(v.val).astype(widened(aval.dtype))
            return known[v]

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [value(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, outs, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        self._spend(eqn, ins)
        if name in BY_NUMPY:
            with np.errstate(all="ignore"):
                return [np.asarray(BY_NUMPY[name](*ins, **params))]
        if name in STATEFUL:
            return STATEFUL[name](eqn, ins)
        if name in WORDLESS:
            return [None] * len(eqn.outvars)
        if name == "cond":
            branches = params["branches"]
            return self._closed(branches[min(max(int(ins[0]), 0), len(branches) - 1)], ins[1:])
        if name == "while":
            return self._while(eqn, ins)
        if name == "scan":
            return self._scan(eqn, ins)
        if name == "run_scoped":
            inner = params["jaxpr"]
            return self.run(inner, ins, [scratch(v.aval, None) for v in inner.invars])
        if params.get("name") == ADDEND and self.addend is not None:
            return [self.addend(v.aval.shape) for v in eqn.outvars]
        if name in (*CALLS, "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"):
            inner = params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]
            if hasattr(inner, "consts"):  # else open, as older releases have them
                return self._closed(inner, ins)
            return self.run(inner, [], ins)
        return _by_jax(eqn, ins)

    def _spend(self, eqn: Any, ins: list[Any]) -> None:
        self.pay(OVERHEAD + sum(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars))
        if eqn.primitive.name == "dot_general":
            (summed, _), _ = eqn.params["dimension_numbers"]
            terms = math.prod(ins[0].shape[d] for d in summed)
            self.pay(math.prod(eqn.outvars[0].aval.shape) * terms / 4)

    def pay(self, units: float) -> None:
        """Counts ``units`` of work; raises UntoldError where they are too many."""
        self.left -= units
        if self.left < 0:
            raise UntoldError("it takes too much to compute on blocks of these sizes")

    def _closed(self, closed: Any, ins: Sequence[Any]) -> list[Any]:
        return self.run(closed.jaxpr, closed.consts, ins)

    def _while(self, eqn: Any, ins: list[Any]) -> list[Any]:
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        carried = ins[second:]
        while self._closed(eqn.params["cond_jaxpr"], ins[:first] + carried)[0]:
            carried = self._closed(eqn.params["body_jaxpr"], ins[first:second] + carried)
            self.pay(OVERHEAD)
        return carried

    def _scan(self, eqn: Any, ins: list[Any]) -> list[Any]:
        params = eqn.params
        constants, carried, walked = (list(part) for part in params["ft_in"].update(ins).unpack())
        made = []
        turns = range(params["length"])
        for turn in reversed(turns) if params["reverse"] else turns:
            given = [*constants, *carried, *(x[turn] for x in walked)]
            outs = self._closed(params["jaxpr"], given)
            carried = outs[: len(carried)]
            made.append(outs[len(carried) :])
        made = made[::-1] if params["reverse"] else made
        stacked = [np.stack(part) for part in zip(*made, strict=True)]
        if len(stacked) < len(eqn.outvars) - len(carried):
            raise UntoldError("it has a loop without turns that makes arrays")
        return [*carried, *stacked]


def scratch(aval: Any, rng: np.random.Generator | None) -> Held:
    """A reference in which anything is, or zeros without ``rng``."""
    try:
        dtype = widened(aval.dtype)
    except UntoldError:
        return Held(None)
    array = np.zeros(aval.shape, dtype)
    return Held(array if rng is None else (array + 7 * rng.random(aval.shape)).astype(dtype))


def _place(ref: Any, transforms: Sequence[Any]) -> tuple[np.ndarray, Any]:
    """The array, or a view of it, and the index of what the transforms leave of it."""
    array = ref.array if isinstance(ref, Held) else None
    if array is None:
        raise UntoldError("it reads or writes a reference that is none to an array")
    index: Any = ...
    for transform in transforms:
        array = array[index]
        if not hasattr(transform, "indices"):
            raise UntoldError(f"it takes a reference by {type(transform).__name__}")
        index = tuple(map(_position, transform.indices, array.shape))
    return array, index


def _position(index: Any, extent: int) -> Any:
    if not isinstance(index, pl.Slice):
        if np.ndim(index):
            raise UntoldError("it takes a reference at places that an array has")
        return min(max(int(index), 0), extent - 1)
    reach = (int(index.size) - 1) * index.stride + 1
    start = min(max(int(index.start), 0), extent - reach)
    return slice(start, start + reach, index.stride)


def _get(eqn: Any, ins: list[Any]) -> list[Any]:
    transforms = jax.tree.unflatten(eqn.params["tree"], ins[1:])
    array, index = _place(ins[0], transforms)
    return [np.array(array[index])]


def _swap(eqn: Any, ins: list[Any]) -> list[Any]:
    array, index = _place(ins[0], jax.tree.unflatten(eqn.params["tree"], ins[2:]))
    before = np.array(array[index])
    array[index] = ins[1]
    return [before]


def _addupdate(eqn: Any, ins: list[Any]) -> list[Any]:
    array, index = _place(ins[0], jax.tree.unflatten(eqn.params["tree"], ins[2:]))
    array[index] += ins[1]
    return []


def _masked_load(eqn: Any, ins: list[Any]) -> list[Any]:
    ref, transforms, mask, other = jax.tree.unflatten(eqn.params["args_tree"], ins)
    array, index = _place(ref, transforms)
    if mask is None:
        return [np.array(array[index])]
    return [np.where(mask, array[index], 0 if other is None else other)]


def _masked_swap(eqn: Any, ins: list[Any]) -> list[Any]:
    ref, transforms, stored, mask = jax.tree.unflatten(eqn.params["args_tree"], ins)
    array, index = _place(ref, transforms)
    before = np.array(array[index])
    array[index] = stored if mask is None else np.where(mask, stored, before)
    return [before]


def _copy(eqn: Any, ins: list[Any]) -> list[Any]:
    src, dst, _, remote, *_ = jax.tree.unflatten(eqn.params["tree"], ins)
    if remote is not None or eqn.params.get("add"):
        raise UntoldError("it copies to another device, or adds while it copies")
    (source, there), (array, here) = (
        _place(ref, ()) if isinstance(ref, Held) else _place(ref.ref, ref.transforms)
        for ref in (src, dst)
    )
    array[here] = source[there]
    return []


STATEFUL: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "get": _get,
    "swap": _swap,
    "addupdate": _addupdate,
    "masked_load": _masked_load,
    "masked_swap": _masked_swap,
    "dma_start": _copy,
}


def _by_jax(eqn: Any, ins: list[Any]) -> list[Any]:
    """By the primitive itself, which must be a function of arrays alone."""
    name = eqn.primitive.name
    inside = any(True for _ in core.jaxprs_in_params(eqn.params))
    refs = any(isinstance(x, Held) for x in ins)
    if inside or refs or eqn.effects or name == "bitcast_convert_type":
        raise UntoldError(f"it uses {name}")
    params = {k: widened(v) if isinstance(v, np.dtype) else v for k, v in eqn.params.items()}
    try:
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            outs = eqn.primitive.bind(*ins, **params)
            return [np.asarray(x) for x in (outs if eqn.primitive.multiple_results else [outs])]
    except Exception as error:  # whatever a primitive has against values of these types
        raise UntoldError(f"it uses {name}, which raises {type(error).__name__} here") from error
