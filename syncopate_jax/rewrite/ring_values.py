"""What the values around a ring are on every rank: parts of arrays, sums of products, blocks.

Straight code and loops of known length are read once for all ranks, loops step by step. What is
followed is whose data a value holds (``Part``), which products of such parts it is the sum of
(``Sum``), which of these were written where (``Blocks``), what a loop stacks of these (``Stack``),
and small integers (``Ints``), from which offsets are made. All else is None: nothing is known of
it, and nothing that it goes into is understood either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax import lax

from syncopate_jax.rewrite import graph as graphs
from syncopate_jax.rewrite.graph import Node, Value
from syncopate_jax.rewrite.operations import CASTS

DTYPES = ("int32", "int64", "bool")
"""Of numbers that are followed: offsets are seldom unsigned or narrow, and those wrap."""
ADDED = -1
LONGEST = 64
"""Steps of the longest loop that is read."""


@dataclass(frozen=True, slots=True, eq=False)
class Ints:
    """A scalar, int64 or bool: [ranks]. In the program it is of ``DTYPES``, and has the same value:
    what does not fit, or is of another dtype, is None."""

    at: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A box of what ``source`` is on some rank.

    Attributes:
      source: a value of the program.
      ranks: [ranks] whose it is.
      starts: [ranks, dims] where the box starts in it.
      shape: of the box.
    """

    source: Value
    ranks: np.ndarray
    starts: np.ndarray
    shape: tuple[int, ...]

    def whole(self) -> bool:
        return self.shape == self.source.aval.shape

    def at_home(self) -> bool:
        """Whether every rank's is its own."""
        return bool(np.array_equal(self.ranks, np.arange(len(self.ranks))))

    def moved(self, sender: np.ndarray) -> Part:
        return replace(self, ranks=self.ranks[sender], starts=self.starts[sender])

    def cut(self, starts: np.ndarray, shape: tuple[int, ...]) -> Part:
        return replace(self, starts=self.starts + starts, shape=shape)


@dataclass(frozen=True, slots=True, eq=False)
class Holed:
    """A ``part`` into which zeros were written at ``holes`` ([ranks, dims] and shape of each)."""

    part: Part
    holes: tuple[tuple[np.ndarray, tuple[int, ...]], ...]

    def cut(self, starts: np.ndarray, shape: tuple[int, ...]) -> Part | None:
        """A box of it; None where it has a hole."""
        for at, size in self.holes:
            if np.any(np.all((starts < at + size) & (at < starts + shape), axis=1)):
                return None
        return self.part.cut(starts, shape)


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A product of two parts, which ``dot`` computes.

    ``order`` is how its result is transposed, with ``ADDED`` where a dimension of 1 was added.
    """

    dot: Node
    lhs: Part
    rhs: Part
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """Products that were added; none of them is zero.

    Attributes:
      terms: the products.
      part: the same as a value of the program, on whatever rank that is.
    """

    terms: tuple[Term, ...] = ()
    part: Part | None = None

    def moved(self, sender: np.ndarray) -> Sum:
        terms = [replace(t, lhs=t.lhs.moved(sender), rhs=t.rhs.moved(sender)) for t in self.terms]
        return Sum(tuple(terms), self.part and self.part.moved(sender))

    def transposed(self, permutation: Sequence[int]) -> Sum:
        terms = [replace(t, order=tuple(t.order[d] for d in permutation)) for t in self.terms]
        return Sum(tuple(terms))

    def widened(self, at: int) -> Sum:
        """With a dimension of 1 before dimension ``at``."""
        terms = [replace(t, order=(*t.order[:at], ADDED, *t.order[at:])) for t in self.terms]
        return Sum(tuple(terms))


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """A product written to a box that starts at ``starts`` [ranks, dims]."""

    starts: np.ndarray
    shape: tuple[int, ...]
    term: Term


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """An array that products were written into, in order.

    Attributes:
      writes: the products.
      zero: whether it is zero elsewhere.
      part: as of a ``Sum``.
    """

    writes: tuple[Write, ...]
    zero: bool
    part: Part | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """What a loop made in each of its steps."""

    items: tuple[Known, ...]


def laid_out(x: Any, order: Sequence[int]) -> Any:
    """A product's result as its ``order`` says."""
    x = lax.transpose(x, [d for d in order if d != ADDED])
    return lax.expand_dims(x, [at for at, d in enumerate(order) if d == ADDED])


Known = Ints | Part | Holed | Sum | Blocks | Stack | None


def is_number(known: Known) -> bool:
    """Whether it is integers alone."""
    items = known.items if isinstance(known, Stack) else (known,)
    return all(isinstance(item, Ints) for item in items)


def own(value: Value, ranks: int) -> Part:
    """A value as each rank has it."""
    shape = value.aval.shape
    return Part(value, np.arange(ranks), np.zeros((ranks, len(shape)), np.int64), shape)


@dataclass(slots=True)
class Reader:
    """Reads the operations of a body for a ring along one mesh axis.

    Attributes:
      axis: the mesh axis.
      ranks: its extent.
      rows: what steps of loops get of an array of the program, by which row it is.
      spoilt: the first operation that used what goes around in a way that is not followed.
    """

    axis: str
    ranks: int
    spoilt: Node | None = None
    rows: dict[Value, tuple[Value, int]] = field(default_factory=dict)
    _rows: dict[tuple[Value, int], Value] = field(default_factory=dict)

    def results(self, node: Node, args: Sequence[Known]) -> list[Known]:
        """What is known of an operation's results."""
        if node.name == "scan":
            return self._scan(node, args)
        if node.name == "jit":
            body = graphs.read(node.params["jaxpr"], inline=True)
            return self.body(body, args)
        found = self._result(node, args)
        if found is None and any(_travels(arg) for arg in args):
            self.spoilt = self.spoilt or node
        return [found] + [None] * (len(node.outputs) - 1)

    def body(self, body: graphs.Graph, args: Sequence[Known]) -> list[Known]:
        """What is known of a body's results; its own values are no sources."""
        env = dict(zip(body.inputs, args, strict=True))
        for node in body.nodes:
            env.update(
                zip(node.outputs, self.results(node, self.look(node.inputs, env)), strict=True)
            )
        return self.look(body.outputs, env)

    def look(self, values: Iterable[Value], env: Mapping[Value, Known]) -> list[Known]:
        return [env[v] if v in env else self._literal(v) for v in values]

    def _literal(self, value: Value) -> Known:
        if value.known is None or np.ndim(value.known):
            return None
        return _held(np.full(self.ranks, value.known), value.aval.dtype)

    def _scan(self, node: Node, args: Sequence[Known]) -> list[Known]:
        params = node.params
        length = params["length"]
        consts, carries = graphs.scan_arguments(node)
        stacked: list[list[Known]] = [[None] * length for _ in node.outputs[carries:]]
        body = graphs.read(params["jaxpr"], inline=True)
        if length > LONGEST or not any(x.name == "ppermute" for x in body.nodes):
            return [None] * len(node.outputs)
        fixed, carry = list(args[:consts]), list(args[consts : consts + carries])
        xs = list(zip(node.inputs, args, strict=True))[consts + carries :]
        for step in range(length):
            at = length - 1 - step if params["reverse"] else step
            items = [self._item(*x, at) for x in xs]
            results = self.body(body, [*fixed, *carry, *items])
            carry = results[:carries]
            for made, item in zip(stacked, results[carries:], strict=True):
                made[at] = item
        return [*carry, *(Stack(tuple(items)) for items in stacked)]

    def _item(self, value: Value, known: Known, at: int) -> Known:
        if isinstance(known, Stack):
            return known.items[at]
        if isinstance(known, Part) and known.source is value and value.aval.ndim > 1:
            if (value, at) not in self._rows:
                row = Value(value.aval.update(shape=value.aval.shape[1:]), value.node)
                self._rows[value, at] = row
                self.rows[row] = (value, at)
            return own(self._rows[value, at], self.ranks)
        counted = value.node is not None and value.node.name == "iota"
        if not counted or value.aval.ndim != 1:
            return None
        return _held(np.full(self.ranks, at), value.aval.dtype)

    def _result(self, node: Node, args: Sequence[Known]) -> Known:
        name, params, out = node.name, node.params, node.outputs[0].aval
        if name == "axis_index":
            return Ints(np.arange(self.ranks)) if params["axis_name"] == self.axis else None
        if name in CASTS:
            return args[0] if _is_int(out.dtype) else _sum_if_zero(node.inputs[0], args[0])
        if name == "convert_element_type" and not _is_int(out.dtype):
            known = _sum_if_zero(node.inputs[0], args[0])
            zero = _is_empty(known) or (isinstance(known, Ints) and not known.at.any())
            return Sum() if zero and out.shape == () else None
        if name == "ppermute" and isinstance(args[0], Part | Sum):
            sender = _senders(node, self.axis, self.ranks)
            return None if sender is None else args[0].moved(sender)
        if name == "broadcast_in_dim" and isinstance(args[0], Ints) and out.shape == (1,):
            return Stack((args[0],))
        if name in ("broadcast_in_dim", "reshape") and isinstance(args[0], Sum) and args[0].terms:
            at = _added_dim(node.inputs[0].aval.shape, out.shape)
            turned = params.get("dimensions") is not None  # of a reshape that transposes first
            return None if at is None or turned else args[0].widened(at)
        if name == "broadcast_in_dim":
            found = _sum_if_zero(node.inputs[0], args[0])
            return found if out.shape == () or _is_empty(found) else None
        if name in ("squeeze", "reshape") and isinstance(args[0], Stack) and out.shape == ():
            return args[0].items[0]
        if name == "dynamic_slice" and (cut := _boxed(args[0])):
            starts = self._starts(args[1:], node.inputs[0].aval.shape, params["slice_sizes"])
            return None if starts is None else cut.cut(starts, params["slice_sizes"])
        if name == "slice" and (cut := _boxed(args[0])) and params["strides"] is None:
            starts = np.tile(np.array(params["start_indices"]), (self.ranks, 1))
            return cut.cut(starts, out.shape)
        if name == "dot_general":
            lhs, rhs = map(_part, args)
            order = tuple(range(out.ndim))
            return Sum((Term(node, lhs, rhs, order),)) if lhs and rhs else None
        if name in ("add", "add_any"):
            added = list(map(_sum_if_zero, node.inputs, args))
            if all(isinstance(arg, Sum | Blocks) for arg in added):
                return _added(added)
        if name == "transpose" and isinstance(args[0], Sum):
            return args[0].transposed(params["permutation"])
        if name == "dynamic_update_slice":
            return self._write(node, args)
        if out.shape == () and all(isinstance(arg, Ints) for arg in args):
            return _integers(node, [arg.at for arg in args if isinstance(arg, Ints)])
        return None

    def _write(self, node: Node, args: Sequence[Known]) -> Known:
        into, update = args[:2]
        shape, sizes = node.inputs[0].aval.shape, node.inputs[1].aval.shape
        starts = self._starts(args[2:], shape, sizes)
        if starts is None or not isinstance(update, Sum) or len(update.terms) > 1:
            return None
        if not update.terms:
            part, holes = (into.part, into.holes) if isinstance(into, Holed) else (_part(into), ())
            return Holed(part, (*holes, (starts, sizes))) if part else None
        before = into.writes if isinstance(into, Blocks) else ()
        zero = into.zero if isinstance(into, Blocks) else _is_empty(into)
        return Blocks((*before, Write(starts, sizes, update.terms[0])), zero)

    def _starts(
        self, args: Sequence[Known], shape: Sequence[int], sizes: Sequence[int]
    ) -> np.ndarray | None:
        """[ranks, dims], clamped as JAX does."""
        if not all(isinstance(arg, Ints) for arg in args):
            return None
        starts = np.stack([arg.at for arg in args if isinstance(arg, Ints)], -1)
        return np.clip(starts, 0, np.array(shape) - np.array(sizes))


def _added(args: Sequence[Known]) -> Known:
    """The sum of two sums, or of blocks of arrays that are zero elsewhere."""
    sums = [arg for arg in args if isinstance(arg, Sum)]
    if len(sums) == len(args):
        return Sum(tuple(term for arg in sums for term in arg.terms))
    blocks = [arg for arg in args if isinstance(arg, Blocks) and arg.zero]
    if len(blocks) + sum(_is_empty(arg) for arg in args) == len(args):
        return Blocks(tuple(write for arg in blocks for write in arg.writes), True)
    return None


def _added_dim(before: Sequence[int], after: Sequence[int]) -> int | None:
    """Where a dimension of 1 was added, if that is all that a reshape or a broadcast does."""
    wanted = (*before,)
    places = (d for d, n in enumerate(after) if n == 1 and (*after[:d], *after[d + 1 :]) == wanted)
    return next(places, None)


def _is_empty(known: Known) -> bool:
    """Whether it is zero."""
    return isinstance(known, Sum) and not known.terms


def _boxed(known: Known) -> Part | Holed | None:
    return known if isinstance(known, Holed) else _part(known)


def _part(known: Known) -> Part | None:
    if isinstance(known, Sum | Blocks):
        return known.part
    return known if isinstance(known, Part) else None


def _travels(known: Known) -> bool:
    """Whether it has left its rank, or is made of what has."""
    if isinstance(known, Part):
        return not known.at_home()
    if isinstance(known, Sum):
        return not all(term.lhs.at_home() and term.rhs.at_home() for term in known.terms)
    if isinstance(known, Blocks):
        return any(_travels(Sum((write.term,))) for write in known.writes)
    return isinstance(known, Stack) and any(_travels(item) for item in known.items)


def _senders(node: Node, axis: str, ranks: int) -> np.ndarray | None:
    """[ranks] whose data each rank gets; None unless each gets some."""
    names = node.params["axis_name"]
    if (names if isinstance(names, str) else tuple(names)) not in (axis, (axis,)):
        return None
    found = {dst: src for src, dst in node.params["perm"]}
    return np.array([found[r] for r in range(ranks)]) if len(found) == ranks else None


def _is_zero(value: Value) -> bool:
    return value.known is not None and np.ndim(value.known) == 0 and not value.known


def _sum_if_zero(value: Value, known: Known) -> Known:
    """A number that is zero is the sum of nothing."""
    return Sum() if _is_zero(value) else known


def _is_int(dtype: Any) -> bool:
    return np.issubdtype(dtype, np.integer) or dtype == np.bool_


def _held(at: np.ndarray, dtype: Any) -> Ints | None:
    """Numbers that become of this dtype; None where they are not followed there."""
    if str(dtype) not in DTYPES or at.dtype.kind not in "biu":
        return None
    if str(dtype) == "bool":
        return Ints(at.astype(np.bool_))
    at, fits = at.astype(np.int64), np.iinfo(dtype)
    return Ints(at) if np.all((fits.min <= at) & (at <= fits.max)) else None


_INTEGERS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "rem": np.fmod,
    "div": lambda x, y: (x - np.fmod(x, y)) // y,
    "sign": np.sign,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "select_n": lambda which, *cases: np.choose(which.astype(np.int64), cases, mode="clip"),
    "convert_element_type": lambda x: x,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "squeeze": lambda x: x,
    "reshape": lambda x: x,
}


def _integers(node: Node, args: Sequence[np.ndarray]) -> Known:
    compute = _INTEGERS.get(node.name)
    if compute is None or not args or (node.name in ("div", "rem") and not np.all(args[1])):
        return None
    return _held(np.asarray(compute(*args)), node.outputs[0].aval.dtype)
