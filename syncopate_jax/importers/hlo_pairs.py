"""Which contraction a collective stands next to, and what both are as one operator.

A pair needs a value that goes straight from one to the other, perhaps through casts, copies,
transposes and reshapes that leave the exchanged dimensions whole, and into or out of a fusion. A
value that something else needs as well makes no pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from syncopate_jax.errors import InputError
from syncopate_jax.importers.dot_formula import MAX_NDIM, dot_formula
from syncopate_jax.importers.hlo_axes import BLOCKS, RANKS, Dims, dims_of, through
from syncopate_jax.importers.hlo_ops import HloGraph, HloOp
from syncopate_jax.importers.hlo_tuples import MAX_STEPS, Value, joined, parameters, sliced
from syncopate_jax.importers.program import ImportedCollective
from syncopate_jax.importers.resharding import Move
from syncopate_jax.importers.shardings import FUSED_AFTER, FUSED_BEFORE, Derived

AXIS = "ranks"  # the one mesh axis of a pair: the members of a group

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


def find_pair(graph: HloGraph, uses: Uses, op: HloOp, made: ImportedCollective) -> Derived | str:
    """The contraction next to a collective with it as the fused move, or why there is none."""
    if made.kind not in (*FUSED_BEFORE, *FUSED_AFTER):
        return f"no operator does a {made.kind}"
    if made.members == 1:
        return "a single rank takes part"
    if made.shape == (1,) or len(made.shape) > MAX_NDIM:
        return f"contractions have no arrays of shape {list(made.shape)}"
    finder = _Finder(graph, uses, op, made)
    reasons = []
    if made.kind in FUSED_BEFORE:
        found = finder.after()
        if not isinstance(found, str):
            dot, operand, dims, scatter = found
            return _derived(graph, dot, ("lhs", "rhs")[operand], dims, made, scatter)
        reasons.append(found)
    if made.kind in FUSED_AFTER:
        back = finder.before()
        if not isinstance(back, str):
            dot, dims, gather = back
            return _derived(graph, dot, "out", dims, made, gather)
        reasons.append(back)
    return "; ".join(reasons)


@dataclass(slots=True)
class _Finder:
    """Looks for the contraction next to one collective."""

    graph: HloGraph
    uses: Uses
    op: HloOp
    made: ImportedCollective

    def after(self) -> tuple[HloOp, int, Dims, str] | str:
        """The contraction that reads the result, as which operand, what this is made of, and the
        factor that blocks were taken from; or why there is none."""
        made, place = self.made, int(self.made.name.partition("#")[2] or 0)
        other = f"d{made.split_axis}"
        if made.kind == "all_to_all" and len(self.op.operands) > 1:
            found = joined(self.graph, self.op, self.users)
            if found is None:
                return "its results are not joined, one behind the other, for one reader"
            value = found[0]
            cut = sliced(self.graph, self.op, self.users)
            other = f"d{cut[1]}" if cut else ""
        else:
            shape = made.result
            front = {made.concat_axis: (RANKS, made.members)}
            value = Value(self.op, dims_of(shape, front))
        for _ in range(MAX_STEPS):
            users = [one for one in self.users(value) if not _of_another(one[0], place, value.op)]
            if len(users) != 1:
                return f"its result is read by {_listed(users)}; one contraction alone must read it"
            user, operand = users[0]
            if operand < 0:
                return (
                    "its result is that of the computation around it, and no contraction reads it"
                )
            if user.opcode == "dot":
                return user, operand, value.dims, other
            if user.opcode == "fusion" and len(user.calls) == 1:
                inner = parameters(self.graph, user)
                if operand not in inner:
                    return f"what {user.name} makes of it is not known"
                value = Value(inner[operand], value.dims, (*value.calls, user))
                continue
            taken = user.opcode == "get-tuple-element"
            dims = value.dims if taken else through(user, value.op, value.dims)
            if dims is None:
                return f"its result goes into {_called(user)}, no contraction"
            value = Value(user, dims, value.calls)
        return f"no contraction is within {MAX_STEPS} operations"

    def before(self) -> tuple[HloOp, Dims, str] | str:
        """The contraction whose result is exchanged, what this is made of, and the factor that
        blocks are joined to; or why there is none."""
        made, op = self.made, self.op
        place = int(made.name.partition("#")[2] or 0)
        other = f"d{made.concat_axis}"
        if made.kind == "all_to_all" and len(op.operands) > 1:
            cut = sliced(self.graph, op, self.users)
            if cut is None:
                return "its operands are not the blocks, in order, of one array that it alone reads"
            value, readers = cut[0], len(op.operands)
            found = joined(self.graph, op, self.users)
            other = f"d{found[1]}" if found else ""
        else:
            source = self.graph.ops[op.computation].get(op.operands[place])
            if source is None:
                return "what makes its operand is not known"
            front = {made.split_axis: (BLOCKS, made.members)} if made.split_axis >= 0 else None
            value, readers = Value(source, dims_of(made.shape, front)), 1
        for _ in range(MAX_STEPS):
            source, calls = value.op, value.calls
            users = list(self.users(value))
            if len(users) != readers:
                return f"what it moves is read by {_listed(users)}; it alone must read it"
            if source.opcode == "dot":
                return source, value.dims, other
            if source.opcode == "fusion" and len(source.calls) == 1:
                root = self.graph.ops[source.calls[0]][self.graph.roots[source.calls[0]]]
                value = Value(root, value.dims, (*calls, source))
                continue  # with as many readers
            readers = 1
            name, computation, dims = "", source.computation, value.dims
            if source.opcode == "parameter" and calls:
                caller, calls = calls[-1], calls[:-1]
                index = source.ints.get("index", (-1,))[0]
                if not 0 <= index < len(caller.operands):
                    return f"what {caller.name} is given as {source.name} is not known"
                name, computation = caller.operands[index], caller.computation
            elif len(source.operands) == 1:
                name = source.operands[0]
            argument = self.graph.ops[computation].get(name)
            if argument is None:
                return f"what it moves is made by {_called(source)}, no contraction"
            if source.opcode != "parameter":
                found_dims = through(source, argument, dims, backward=True)
                if found_dims is None:
                    return f"what it moves is made by {_called(source)}, no contraction"
                dims = found_dims
            value = Value(argument, dims, calls)
        return f"no contraction is within {MAX_STEPS} operations"

    def users(self, value: Value) -> Iterator[tuple[HloOp, int]]:
        """What uses a value, and as which operand; at a fusion's end what uses the fusion."""
        name, computation = value.op.name, value.op.computation
        if value.calls and self.graph.roots.get(computation) == name:
            yield from self.users(Value(value.calls[-1], value.dims, value.calls[:-1]))
        elif self.graph.roots.get(computation) == name:
            yield value.op, -1  # the program's result needs it
        yield from self.uses.get((computation, name), ())


def _called(op: HloOp) -> str:
    return f"{op.opcode} {op.name}"


def _listed(users: Sequence[tuple[HloOp, int]]) -> str:
    """What uses a value, in words."""
    names = [_called(user) if at >= 0 else "the result around it" for user, at in users]
    more = [f"{len(names) - 3} others"] if len(names) > 4 else []
    return ", ".join([*names[: 3 if more else 4], *more]) or "nothing"


def _of_another(user: HloOp, place: int, source: HloOp) -> bool:
    """Whether a use takes another array than the one at ``place`` from a collective of several."""
    several = len(source.types) > 1 and not source.opcode.endswith("-start")
    return several and user.opcode == "get-tuple-element" and user.ints.get("index") != (place,)


def _derived(
    graph: HloGraph, dot: HloOp, place: str, dims: Dims, made: ImportedCollective, other: str
) -> Derived | str:
    """The pair, or why it is none.

    ``dims`` are what the dimensions of the dot's array at ``place`` are made of. An all-to-all
    gathers along one letter and scatters along another. One of them holds the ranks or the blocks;
    the other may be any, and is that of factor ``other`` if it can be.
    """
    shapes = [_operand_shape(graph, dot, i) for i in range(len(dot.operands))]
    try:
        formula = dot_formula(dot, shapes)
    except InputError:
        return f"{_called(dot)} is not understood"  # such as of arguments of a region
    operands, out = formula.split("->")
    lhs, rhs = operands.split(",")
    letters = {"lhs": lhs, "rhs": rhs, "out": out}[place]
    unlike = f"its blocks are not those of one dimension of {_called(dot)}"
    if len(letters) != len(dims):
        return unlike
    moved = RANKS if place != "out" else BLOCKS
    sizes = dict(zip(lhs + rhs, (*shapes[0], *shapes[1]), strict=True))
    if [one.shape for one in dot.types] != [tuple(sizes[letter] for letter in out)]:
        return f"{_called(dot)} has another shape than its operands give"
    for letter, own in zip(letters, dims, strict=True):
        front = [name for name, _ in own].index(moved) if moved in dict(own) else 0
        whole = 0 < math.prod(extent for _, extent in own) == sizes[letter]
        if front and whole and (lhs + rhs).count(letter) == 1:
            # What lies before the blocks, as a batch does that XLA merged with them, gets a letter.
            i, merged = letters.index(letter), min(set(ascii_lowercase) - set(sizes))
            sizes[merged] = math.prod(extent for _, extent in own[:front])
            sizes[letter] //= sizes[merged]
            dims = (*dims[:i], own[:front], own[front:], *dims[i + 1 :])
            lhs, rhs, out, letters = (
                part.replace(letter, merged + letter) for part in (lhs, rhs, out, letters)
            )
            break
    at = [letter for letter, own in zip(letters, dims, strict=True) if own and own[0][0] == moved]
    if len(at) != 1 and made.kind != "all_reduce":
        return unlike
    first, second = at[0] if at else "", ""
    if made.kind == "all_to_all":
        rest = [x for x in letters if x != first]
        near = [x for x in rest if other in {name for name, _ in dims[letters.index(x)]}]
        if not rest:
            return unlike
        alone = [x for x in rest if not dims[letters.index(x)]]  # blocks of extent 1
        second = (near or alone or rest[-1:])[0]
    gather, scatter = (first, second) if place != "out" else (second, first)
    members = made.members
    shape = [sizes[letter] for letter in letters]
    if place != "out":  # the contraction sees the array after the exchange
        for letter, up in ((gather, False), (scatter, True)):
            if letter:
                i = letters.index(letter)
                shape[i] = shape[i] * members if up else shape[i] // members
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
