"""Which rings of a body become operators, and what else of them is needed and made from these.

Rings share what goes around: a forward pass and the gradient of its weight multiply the same parts.
They are given up together. One operator gathers and keeps what it gathered; other products with it,
and parts that anything else reads, are made from that.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncopate_jax.rewrite import graph as graphs
from syncopate_jax.rewrite import swaps
from syncopate_jax.rewrite.graph import Graph, Node, Value
from syncopate_jax.rewrite.ring_values import Ints, Known, Part, Stack, Sum, Term, laid_out
from syncopate_jax.rewrite.steps import Step
from syncopate_jax.rewrite.swaps import Kept, Rebuilt, Swap
from syncopate_jax.runtime import custom_call


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """A ring by the operator that it is.

    Attributes:
      swap: the operator.
      source: what it gathers, along ``dim``; None if it gathers nothing.
      order: how the result of its dot is transposed, once it has the ``shape`` of the swap.
    """

    swap: Swap
    source: Value | None
    dim: int
    order: tuple[int, ...]


@dataclass(slots=True)
class Rings:
    """The rings of one body.

    Attributes:
      found: an operator for each, but for those that multiply what another one gathered.
      rebuilt: what is made from what the operators gathered.
      gone: the operations that all these do the work of.
      numbers: the results of the body that are integers known on each rank, by mesh axis.
      why: per mesh axis what keeps a ring from being one, in words.
    """

    found: list[Swap] = field(default_factory=list)
    rebuilt: list[Rebuilt] = field(default_factory=list)
    gone: set[Node] = field(default_factory=set)
    numbers: dict[Value, dict[str, Known]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


def ring_axes(node: Node) -> set[str]:
    """Mesh axes of the permutations in an operation."""
    if node.name == "ppermute":
        names = node.params["axis_name"]
        return set(names if isinstance(names, tuple | list) else (names,))
    if node.name != "scan":
        return set()
    body = graphs.read(node.params["jaxpr"], inline=True)
    return {name for inner in body.nodes for name in ring_axes(inner)}


@dataclass(slots=True)
class Chooser:
    """Chooses among the rings of a body along one mesh axis.

    Attributes:
      program: the body.
      axis, ranks: the mesh axis, and its extent.
      known: what each value of the body is.
      rows: the arrays that steps of loops get, each as a row of another.
      refuses: why a backend does not do an operator; None if it does.
    """

    program: Graph
    axis: str
    ranks: int
    known: dict[Value, Known]
    rows: Mapping[Value, tuple[Value, int]]
    refuses: Callable[[Swap], str | None]

    def choose(self, candidates: Sequence[Ring], rings: Rings) -> None:
        """Adds those that can be given up to ``rings``."""
        chosen, dead = list(candidates), _dead(self.program)
        while chosen:
            gone, needed = self._give_up(chosen, dead)
            found, rebuilt = self._realise(chosen, needed)
            bad = {ring: _USED for ring in chosen if not _is_gone(ring, gone)}
            needs = {one.value: one.reads for one in rebuilt}
            for ring, swap in found:
                made = [swap.result, *([swap.kept.value] if swap.kept else ())]
                needs |= dict.fromkeys(made, _ends(ring))
            for ring, swap in found:
                if swap.kept and _waits(_ends(ring), swap.kept.value, needs):
                    bad.setdefault(ring, _USED)
                if reason := self.refuses(swap):
                    bad.setdefault(ring, reason)
            if not bad:
                rings.found += [swap for _, swap in found]
                rings.rebuilt += rebuilt
                rings.gone |= gone
                return
            for ring, reason in bad.items():
                ends = f"its ring, which ends at {_last(ring).source}, does {ring.swap.spec.kind}"
                rings.why[self.axis] = f"{ends} {reason}" if reason is _USED else reason
            chosen = [ring for ring in chosen if ring not in bad]

    def _give_up(self, chosen: Sequence[Ring], dead: set[Node]) -> tuple[set[Node], list[Value]]:
        """The operations that nobody needs but for the rings' results and what is made of these.

        And the values that are read, though what makes them is gone: parts of what is gathered.
        """
        results = {ring.swap.result for ring in chosen}
        ends = {value for ring in chosen for value in _ends(ring)}
        sources = {ring.source for ring in chosen if ring.source is not None}
        behind = {node for ring in chosen for node in _behind(ring)}
        behind |= {node for node in self.program.nodes if ring_axes(node) == {self.axis}}
        gone, needed = set(dead), []
        for node in sorted(behind, key=lambda n: -n.index):
            read = [
                out
                for out in node.outputs
                if out not in results
                and (out in ends or any(user is None or user not in gone for user in out.uses))
            ]
            if not node.side_effects and all(self._can_make(out, sources) for out in read):
                gone.add(node)
                needed += read
                ends |= {part.source for out in read for part in self._parts(out)}
        return {node for node in gone if node in behind or ring_axes(node)}, needed

    def _parts(self, value: Value) -> list[Part]:
        """The parts of arrays that a value is made of."""
        found: list[Part] = []
        for item in self._items(value):
            if isinstance(item, Sum):
                found += [part for term in item.terms for part in (term.lhs, term.rhs)]
            elif isinstance(item, Part):
                found.append(item)
        return found

    def _items(self, value: Value) -> tuple[Known, ...]:
        known = self.known.get(value)
        return known.items if isinstance(known, Stack) else (known,)

    def _can_make(self, value: Value, sources: set[Value]) -> bool:
        """Whether a value can be made without what goes around.

        A sum of products only where it is one of several results of a loop: elsewhere the products
        are there anyway.
        """
        kinds: Any = Part | Ints
        if value.node is not None and len(value.node.outputs) > 1:
            kinds |= Sum
        return all(isinstance(item, kinds) for item in self._items(value)) and all(
            part.source is not value and (part.at_home() or part.source in sources)
            for part in self._parts(value)
        )

    def _realise(
        self, chosen: Sequence[Ring], needed: Sequence[Value]
    ) -> tuple[list[tuple[Ring, Swap]], list[Rebuilt]]:
        """The operators: of several rings that gather one array that of the first.

        And what is made of what they gather.
        """
        first: dict[tuple[Value, int], Ring] = {}
        for ring in chosen:
            first.setdefault((ring.source or ring.swap.result, ring.dim), ring)
        found: list[tuple[Ring, Swap]] = []
        rebuilt: list[Rebuilt] = []
        wholes: dict[Value, _Whole] = {}
        for (source, dim), leader in first.items():
            others = [r for r in chosen if r is not leader and (r.source, r.dim) == (source, dim)]
            readers = [
                "dynamic_slice"
                for value in needed
                if any(p.source is source and not p.at_home() for p in self._parts(value))
            ]
            if leader.source is None or source in wholes or not (others or readers):
                found.append((leader, leader.swap))
                continue
            wholes[source] = whole = _Whole.of(leader, dim, self.ranks)
            rebuilt += [_product(ring, whole.value) for ring in others]
            undo = (Step(swaps.reshaper(whole.value.aval.shape)),)
            names = (*(ring.swap.dot.name for ring in others), *readers)
            found.append((leader, replace(leader.swap, kept=Kept(whole.value, undo, names))))
        read = [part.source for value in needed for part in self._parts(value)]
        read += [value for ring in chosen for value in _ends(ring)]
        for row in dict.fromkeys(value for value in read if value in self.rows):
            array, at = self.rows[row]
            rebuilt.append(Rebuilt(row, (array,), _row(at)))
        return found, rebuilt + [self._make_again(value, wholes) for value in needed]

    def _make_again(self, value: Value, wholes: Mapping[Value, _Whole]) -> Rebuilt:
        """Numbers, parts of arrays, sums of products of such (or zeros), or a stack of these."""
        away = dict.fromkeys(p.source for p in self._parts(value) if not p.at_home())
        home = dict.fromkeys(p.source for p in self._parts(value) if p.at_home())
        reads = [wholes[source].value for source in away] + [*home]

        def apply(*arrays: jax.Array) -> jax.Array:
            given = dict(zip(reads, arrays, strict=True))
            shape = value.aval.shape[isinstance(self.known[value], Stack) :]
            me = lax.axis_index(self.axis)

            def part(item: Part) -> jax.Array:
                whole = None if item.at_home() else wholes[item.source]
                starts = item.starts + (item.ranks[:, None] * whole.step if whole else 0)
                at = [jnp.asarray(start)[me] for start in starts.T]
                return lax.dynamic_slice(
                    given[whole.value if whole else item.source], at, item.shape
                )

            def product(term: Term) -> jax.Array:
                operands = custom_call.vary_alike([part(term.lhs), part(term.rhs)])
                return term.dot.bind(operands)[0]

            def make(item: Known) -> jax.Array:
                if isinstance(item, Ints):
                    return jnp.asarray(item.at.astype(value.aval.dtype))[me]
                if isinstance(item, Part):
                    return part(item)
                assert isinstance(item, Sum)
                if not item.terms:
                    return jnp.zeros(shape, value.aval.dtype)
                products = [laid_out(product(term), term.order) for term in item.terms]
                return functools.reduce(operator.add, products)

            made = [make(item) for item in self._items(value)]
            return jnp.stack(made) if isinstance(self.known[value], Stack) else made[0]

        return Rebuilt(value, tuple(reads), apply)


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """What an operator gathers: the value, and in each dimension how far a rank's block is behind
    that of the rank before it."""

    value: Value
    step: np.ndarray

    @staticmethod
    def of(ring: Ring, dim: int, ranks: int) -> _Whole:
        assert ring.source is not None
        aval = ring.source.aval
        shape = tuple(n * ranks if d == dim else n for d, n in enumerate(aval.shape))
        step = np.eye(len(shape), dtype=int)[dim] * aval.shape[dim]
        return _Whole(Value(aval.update(shape=shape), ring.swap.result.node), step)


def _row(at: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x[at]


_USED = "with a dot, but what goes around is used elsewhere too"


def _product(ring: Ring, whole: Value) -> Rebuilt:
    """The result of a ring whose operand another one gathers."""
    swap = ring.swap
    left = swap.spec.place == "lhs"

    def apply(x: jax.Array, other: jax.Array) -> jax.Array:
        (out,) = swap.dot.bind(custom_call.vary_alike([x, other] if left else [other, x]))
        return lax.transpose(out.reshape(swap.shape), ring.order)

    return Rebuilt(swap.result, (whole, (swap.rhs if left else swap.lhs).value), apply)


def _ends(ring: Ring) -> tuple[Value, Value]:
    """Where a ring begins: the operands of its operator."""
    return ring.swap.lhs.value, ring.swap.rhs.value


def _last(ring: Ring) -> Node:
    node = ring.swap.result.node
    assert node is not None
    return node


def _behind(ring: Ring) -> list[Node]:
    """The operations between a ring's operands and its result."""
    ends = _ends(ring)
    found = {_last(ring): None}
    for node in (queue := [_last(ring)]):
        for value in node.inputs:
            if value not in ends and value.node is not None and value.node not in found:
                found[value.node] = None
                queue.append(value.node)
    return queue


def _is_gone(ring: Ring, gone: set[Node]) -> bool:
    """Whether nothing goes around any more."""
    behind = _behind(ring)
    return behind[0] in gone and all(node in gone for node in behind if ring_axes(node))


def _waits(ends: Sequence[Value], kept: Value, needs: Mapping[Value, Sequence[Value]]) -> bool:
    """Whether an operand is made of what its operator keeps."""
    stack = list(ends)
    seen = set(stack)
    while stack:
        value = stack.pop()
        if value is kept:
            return True
        reads = needs.get(value, value.node.inputs if value.node else ())
        stack += [read for read in reads if read not in seen]
        seen.update(reads)
    return False


def _dead(program: Graph) -> set[Node]:
    """Operations whose results nobody reads."""
    dead: set[Node] = set()
    for node in reversed(program.nodes):
        unread = all(user is not None and user in dead for v in node.outputs for user in v.uses)
        if unread and not node.side_effects:
            dead.add(node)
    return dead
