"""Which contraction a collective stands next to, and what both are as one operator.

A pair needs a value that goes straight from one to the other, perhaps through casts, copies,
transposes and reshapes that leave the exchanged dimensions whole, and into or out of a fusion. A
value that something else needs as well makes no pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from syncopate_jax.errors import InputError
from syncopate_jax.importers.dot_formula import MAX_NDIM, dot_formula
from syncopate_jax.importers.hlo_ops import HloGraph, HloOp
from syncopate_jax.importers.program import ImportedCollective
from syncopate_jax.importers.resharding import Move
from syncopate_jax.importers.shardings import FUSED_AFTER, FUSED_BEFORE, Derived

AXIS = "ranks"  # the one mesh axis of a pair: the members of a group
SAME = ("copy", "convert", "optimization-barrier")
RESHAPES = ("bitcast", "reshape")
MAX_STEPS = 64  # between a collective and a contraction

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Value:
    """A value on the way, and which dimension of the collective's array each of its own is.

    ``calls``: the operations through which its computation was entered.
    """

    op: HloOp
    dims: Dims
    calls: tuple[HloOp, ...] = ()


Uses = Mapping[tuple[str, str], Sequence[tuple[HloOp, int]]]
"""By computation and name of a value: what uses it, and as which operand."""


def find_uses(graph: HloGraph) -> Uses:
    """The uses of every value of a program."""
    found: dict[tuple[str, str], list[tuple[HloOp, int]]] = {}
    for op in graph.every():
        for place, operand in enumerate(op.operands):
            key = (op.computation, operand.partition("#")[0])
            found.setdefault(key, []).append((op, place))
    return found


def find_pair(graph: HloGraph, uses: Uses, op: HloOp, made: ImportedCollective) -> Derived | None:
    """The contraction next to a collective with it as the fused move, None if there is none."""
    if made.split_axis >= 0 and made.split_axis == made.concat_axis:
        return None  # blocks of one dimension change places, which no operator does
    if made.shape == (1,) or len(made.shape) > MAX_NDIM or op.opcode == "all-to-all-start":
        return None
    place = int(made.name.partition("#")[2] or 0)
    if made.kind in FUSED_BEFORE and (found := _forward(graph, uses, op, made, place)):
        dot, operand, dims = found
        return _derived(graph, dot, ("lhs", "rhs")[operand], dims, made)
    if made.kind in FUSED_AFTER and (back := _backward(graph, uses, op, made, place)):
        return _derived(graph, back[0], "out", back[1], made)
    return None


def _forward(
    graph: HloGraph, uses: Uses, op: HloOp, made: ImportedCollective, place: int
) -> tuple[HloOp, int, Dims] | None:
    """The contraction that uses the result, as which operand, and its dimensions."""
    value = _Value(op, tuple(range(len(made.shape))))
    for _ in range(MAX_STEPS):
        users = [found for found in _users(graph, uses, value) if not _of_another(found[0], place)]
        if len(users) != 1:
            return None
        user, operand = users[0]
        if user.opcode == "dot":
            return user, operand, value.dims
        if user.opcode == "get-tuple-element":
            value = _Value(user, value.dims, value.calls)
            continue
        dims = _through(value.op, user, value.dims)
        if user.opcode == "fusion" and len(user.calls) == 1:
            inner = [
                found
                for found in graph.ops[user.calls[0]].values()
                if found.opcode == "parameter" and found.ints.get("index") == (operand,)
            ]
            if len(inner) != 1:
                return None
            value = _Value(inner[0], value.dims, (*value.calls, user))
        elif dims is None:
            return None
        else:
            value = _Value(user, dims, value.calls)
    return None


def _of_another(user: HloOp, place: int) -> bool:
    """Whether a use takes another array than the one at ``place`` from a collective of several."""
    return user.opcode == "get-tuple-element" and user.ints.get("index") != (place,)


def _users(graph: HloGraph, uses: Uses, value: _Value) -> Iterator[tuple[HloOp, int]]:
    """What uses a value, and as which operand; at the end of a fusion what uses the fusion."""
    name, computation = value.op.name, value.op.computation
    if value.calls and graph.roots.get(computation) == name:
        caller = value.calls[-1]
        yield from _users(graph, uses, _Value(caller, value.dims, value.calls[:-1]))
    elif graph.roots.get(computation) == name:
        yield value.op, -1  # the program's result needs it
    yield from uses.get((computation, name), ())


def _backward(
    graph: HloGraph, uses: Uses, op: HloOp, made: ImportedCollective, place: int
) -> tuple[HloOp, Dims] | None:
    """The contraction whose result is exchanged, and its dimensions."""
    calls: tuple[HloOp, ...] = ()
    dims = tuple(range(len(made.shape)))
    user, name = op, op.operands[place]
    for _ in range(MAX_STEPS):
        source = graph.ops[user.computation].get(name)
        if source is None:
            return None
        if len(list(_users(graph, uses, _Value(source, dims, calls)))) != 1:
            return None
        if source.opcode == "dot":
            return source, dims
        if source.opcode == "fusion" and len(source.calls) == 1:
            calls = (*calls, source)
            inner = graph.ops[source.calls[0]]
            root = inner[graph.roots[source.calls[0]]]
            if root.opcode == "dot":
                return root, dims
            source = root
        elif source.opcode == "parameter" and calls:
            caller, calls = calls[-1], calls[:-1]
            index = source.ints.get("index", (-1,))[0]
            if not 0 <= index < len(caller.operands):
                return None
            user, name = caller, caller.operands[index]
            continue
        if len(source.operands) != 1:
            return None
        argument = graph.ops[source.computation].get(source.operands[0])
        found = _through(argument, source, None) if argument is not None else None
        if argument is None or found is None:
            return None
        # ``found`` maps dimensions of the source's result to those of its argument.
        back = {mine: theirs for mine, theirs in enumerate(found) if theirs >= 0}
        turned = [-1] * _ndim(argument)
        for mine, theirs in back.items():
            turned[theirs] = dims[mine] if mine < len(dims) else -1
        dims = tuple(turned)
        user, name = source, source.operands[0]
    return None


def _ndim(op: HloOp) -> int:
    return len(op.types[0].shape) if op.types else 0


def _through(source: HloOp, user: HloOp, dims: Dims | None) -> Dims | None:
    """The dimensions of ``user``'s result, each as one of ``source``'s (or of ``dims``); or None.

    -1 stands for one that is made of several or of a part.
    """
    if len(user.types) != 1 or not source.types:
        return None
    before, after = source.types[-1].shape, user.types[0].shape
    if user.opcode.endswith("-done") or (user.opcode in SAME and before == after):
        found: Sequence[int] = range(len(after))
    elif user.opcode == "transpose":
        found = user.ints.get("dimensions", ())
        if sorted(found) != list(range(len(before))) or after != tuple(before[i] for i in found):
            return None
    elif user.opcode in RESHAPES:
        found = _reshaped(before, after)
    else:
        return None
    if dims is None:
        return tuple(found)
    return tuple(dims[i] if 0 <= i < len(dims) else -1 for i in found)


def _reshaped(before: Sequence[int], after: Sequence[int]) -> Dims:
    """For each extent after a reshape the dimension before it that it is, or -1."""
    sizes = [math.prod(before[:i]) for i in range(len(before))]
    found = []
    for i, extent in enumerate(after):
        ahead = math.prod(after[:i])
        same = [
            j for j, size in enumerate(before) if size == extent and sizes[j] == ahead and size > 1
        ]
        found.append(same[0] if len(same) == 1 else -1)
    return tuple(found)


def _derived(
    graph: HloGraph, dot: HloOp, place: str, dims: Dims, made: ImportedCollective
) -> Derived | None:
    """The pair; ``dims`` says what the dimensions of the dot's array at ``place`` are."""
    shapes = [_operand_shape(graph, dot, i) for i in range(len(dot.operands))]
    try:
        formula = dot_formula(dot, shapes)
    except InputError:
        return None  # a contraction of parts that are not read, such as arguments of a region
    operands, out = formula.split("->")
    lhs, rhs = operands.split(",")
    letters = {"lhs": lhs, "rhs": rhs, "out": out}[place]
    gather, scatter = (
        letters[dims.index(axis)] if axis >= 0 and axis in dims[: len(letters)] else ""
        for axis in (made.concat_axis, made.split_axis)
    )
    if (made.concat_axis >= 0 and not gather) or (made.split_axis >= 0 and not scatter):
        return None
    members = made.members
    sizes = dict(zip(lhs + rhs, (*shapes[0], *shapes[1]), strict=True))
    shape = [sizes[letter] for letter in letters]
    if [one.shape for one in dot.types] != [tuple(sizes[letter] for letter in out)]:
        return None
    if place != "out":  # the contraction sees the array after the exchange
        for letter, up in ((gather, False), (scatter, True)):
            if letter:
                at = letters.index(letter)
                shape[at] = shape[at] * members if up else shape[at] // members
    move = Move(place, made.kind, (AXIS,), gather, scatter, tuple(shape))
    return Derived(
        lhs, rhs, out,
        mesh=((AXIS, members),),
        before=() if place == "out" else (move,),
        after=(move,) if place == "out" else (),
        fused=move,
        computed=(),
    )  # fmt: skip


def _operand_shape(graph: HloGraph, dot: HloOp, at: int) -> tuple[int, ...]:
    """Extents of an operand; none if they are not known."""
    if len(dot.operand_types) == len(dot.operands):
        return dot.operand_types[at].shape
    source = graph.ops[dot.computation].get(dot.operands[at])
    return source.types[-1].shape if source is not None and source.types else ()
