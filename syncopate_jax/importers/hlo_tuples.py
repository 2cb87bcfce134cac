"""All-to-alls of one array a member, which XLA makes of an array's: slices before, a join after."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from syncopate_jax.importers.hlo_axes import BLOCKS, RANKS, Dims, dims_of, through
from syncopate_jax.importers.hlo_ops import HloGraph, HloOp

MAX_STEPS = 64  # between a collective and a contraction
_RANGE = re.compile(r"\[(\d+):(\d+)\]")


@dataclass(frozen=True, slots=True)
class Value:
    """A value on the way, and what its dimensions are made of.

    ``calls``: the operations through which its computation was entered.
    """

    op: HloOp
    dims: Dims
    calls: tuple[HloOp, ...] = ()


Users = Callable[[Value], Iterator[tuple[HloOp, int]]]


def joined(graph: HloGraph, op: HloOp, users: Users) -> tuple[Value, int] | None:
    """The concatenation, in order, of all that an all-to-all of several arrays receives.

    And the dimension it joins along; None if the arrays go elsewhere.
    """
    count, piece = len(op.operands), op.types[0].shape
    taken = [_taken(op, k, users) for k in range(count)]
    if any(len(each) != 1 for each in taken):
        return None
    values = [Value(each[0], dims_of(piece)) for each in taken]
    for _ in range(MAX_STEPS):
        found = [list(users(value)) for value in values]
        if any(len(uses) != 1 for uses in found):
            return None
        readers = [uses[0] for uses in found]
        user = readers[0][0]
        if any(reader is not user for reader, _ in readers):
            return None
        if user.opcode == "concatenate":
            axis = (*user.ints.get("dimensions", ()), -1)[0]
            in_order = [place for _, place in readers] == list(range(len(user.operands)))
            if not in_order or not 0 <= axis < len(piece):
                return None
            own = dims_of(piece)
            dims = tuple(((RANKS, count), *f) if d == axis else f for d, f in enumerate(own))
            return Value(user, dims, values[0].calls), axis
        if user.opcode != "fusion" or len(user.calls) != 1:
            return None
        inner = parameters(graph, user)
        if any(place not in inner for _, place in readers):
            return None
        calls = (*values[0].calls, user)
        values = [Value(inner[place], dims_of(piece), calls) for _, place in readers]
    return None


def _taken(op: HloOp, place: int, users: Users) -> list[HloOp]:
    """What takes the array at ``place`` from a tuple."""
    return [
        user
        for user, _ in users(Value(op, ()))
        if user.opcode == "get-tuple-element" and user.ints.get("index") == (place,)
    ]


def parameters(graph: HloGraph, fusion: HloOp) -> dict[int, HloOp]:
    """The parameters of what a fusion calls, by their place."""
    return {
        op.ints["index"][0]: op
        for op in graph.ops[fusion.calls[0]].values()
        if op.opcode == "parameter" and len(op.ints.get("index", ())) == 1
    }


def sliced(graph: HloGraph, op: HloOp, users: Users) -> tuple[Value, int] | None:
    """The one array whose blocks, in order, an all-to-all of several arrays sends.

    And the dimension that is cut; None if they are no such blocks, or if others read the array.
    """
    found = [_source(graph, op, place, users) for place in range(len(op.operands))]
    first = found[0]
    if first is None:
        return None
    source, dims, axis = first
    for one in found:
        if one is None or one[0] is not source or one[1:] != (dims, axis):
            return None
    if sum(1 for _ in users(Value(source, dims))) != len(found):
        return None
    return Value(source, dims), axis


def _source(graph: HloGraph, op: HloOp, place: int, users: Users) -> tuple[HloOp, Dims, int] | None:
    """The array that operand ``place`` is block ``place`` of, its dimensions, and which is cut."""
    calls: tuple[HloOp, ...] = ()
    dims: Dims | None = None
    computation, name, axis = op.computation, op.operands[place], -1
    for _ in range(MAX_STEPS):
        source = graph.ops[computation].get(name)
        if source is None or (dims is not None and not calls):
            return None if source is None or dims is None else (source, dims, axis)
        if dims is None and len(list(users(Value(source, (), calls)))) != 1:
            return None
        if source.opcode == "fusion" and len(source.calls) == 1 and dims is None:
            calls = (*calls, source)
            computation, name = source.calls[0], graph.roots[source.calls[0]]
            continue
        if source.opcode == "parameter" and calls:
            index = source.ints.get("index", (-1,))[0]
            caller, calls = calls[-1], calls[:-1]
            if not 0 <= index < len(caller.operands):
                return None
            computation, name = caller.computation, caller.operands[index]
            continue
        argument = graph.ops[computation].get(source.operands[0]) if source.operands else None
        if argument is None or len(source.operands) != 1 or not argument.types:
            return None
        if source.opcode == "slice" and dims is None:
            axis = _block(source, argument, place, len(op.operands))
            if axis < 0:
                return None
            dims = dims_of(argument.types[-1].shape, {axis: (BLOCKS, len(op.operands))})
        elif dims is not None:
            dims = through(source, argument, dims, backward=True)
            if dims is None:
                return None
        elif through(source, argument, dims_of(argument.types[-1].shape)) is None:
            return None
        name = source.operands[0]
    return None


def _block(op: HloOp, argument: HloOp, place: int, count: int) -> int:
    """The dimension of which a slice takes block ``place`` of ``count``; -1 if it does not."""
    whole = argument.types[-1].shape
    ranges = [(int(a), int(b)) for a, b in _RANGE.findall(op.texts.get("slice", ""))]
    cut = [d for d, (n, own) in enumerate(zip(whole, ranges, strict=False)) if own != (0, n)]
    if len(ranges) != len(whole) or len(cut) != 1:
        return -1
    low, high = ranges[cut[0]]
    size = whole[cut[0]] // count
    return cut[0] if (low, high) == (place * size, (place + 1) * size) else -1
