"""Which rings of a body become operators, and what else of them is needed and made from these.

Rings share what goes around: a forward pass and the gradient of its weight multiply the same parts.
They are given up together. One operator gathers and keeps what it gathered; other products with it,
and parts that anything else reads, are made from that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncopate_jax.rewrite import graph as graphs
from syncopate_jax.rewrite import swaps
from syncopate_jax.rewrite.graph import Graph, Node, Value
from syncopate_jax.rewrite.ring_values import Ints, Known, Part, Stack, is_number
from syncopate_jax.rewrite.steps import Step
from syncopate_jax.rewrite.swaps import Kept, Rebuilt, Swap


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """A ring by the operator that it is.

    Attributes:
      swap: the operator.
      source: what it gathers, along ``dim``; None if it gathers nothing.
      order: how the result of its dot is transposed.
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
      refuses: why a backend does not do an operator; None if it does.
    """

    program: Graph
    axis: str
    ranks: int
    known: dict[Value, Known]
    refuses: Callable[[Swap], str | None]

    def choose(self, candidates: Sequence[Ring], rings: Rings) -> None:
        """Adds those that can be given up to ``rings``."""
        chosen, dead = list(candidates), _dead(self.program)
        while chosen:
            gone, needed = self._give_up(chosen, dead)
            made = [self._realise(*group) for group in self._groups(chosen, needed)]
            bad = {ring: _USED for ring in chosen if not _is_gone(ring, gone)}
            needs = {one.value: one.reads for _, _, more in made for one in more}
            for ring, swap, _ in made:
                needs |= dict.fromkeys([swap.result], _ends(ring))
                needs |= dict.fromkeys([swap.kept.value] if swap.kept else [], _ends(ring))
            for ring, swap, _ in made:
                if swap.kept and _waits(_ends(ring), swap.kept.value, needs):
                    bad.setdefault(ring, _USED)
                if reason := self.refuses(swap):
                    bad.setdefault(ring, reason)
            if not bad:
                rings.found += [swap for _, swap, _ in made]
                rings.rebuilt += [one for _, _, more in made for one in more]
                rings.rebuilt += [self._cut(value) for value in needed if self._is_home(value)]
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
                ends.update(filter(None, map(self._made_of, read)))
        return {node for node in gone if node in behind or ring_axes(node)}, needed

    def _groups(
        self, chosen: Sequence[Ring], needed: Sequence[Value]
    ) -> Iterator[tuple[Ring, list[Ring], list[Value]]]:
        """The first ring that gathers an array, the others that do, and parts that are read."""
        first: dict[tuple[Value, int], Ring] = {}
        for ring in chosen:
            first.setdefault((ring.source or ring.swap.result, ring.dim), ring)
        served: set[Value] = set()
        for (source, dim), leader in first.items():
            others = [r for r in chosen if r is not leader and (r.source, r.dim) == (source, dim)]
            values = [
                v
                for v in needed
                if self._made_of(v) is source and not self._is_home(v) and v not in served
            ]
            served.update(values)
            yield leader, others, values

    def _items(self, value: Value) -> tuple[Known, ...]:
        known = self.known.get(value)
        return known.items if isinstance(known, Stack) else (known,)

    def _made_of(self, value: Value) -> Value | None:
        """The one array of whose parts a value is made; None if it is made of none or of others."""
        sources = {item.source for item in self._items(value) if isinstance(item, Part)}
        return sources.pop() if len(sources) == 1 else None

    def _is_home(self, value: Value) -> bool:
        """Whether a value is made of numbers, and of parts of what its rank has."""
        return not any(isinstance(x, Part) and not x.at_home() for x in self._items(value))

    def _can_make(self, value: Value, sources: set[Value]) -> bool:
        """Whether a value can be made without what goes around."""
        items = self._items(value)
        source = self._made_of(value)
        if source is value or not all(isinstance(item, Part | Ints) for item in items):
            return False
        if source is None:
            return is_number(self.known.get(value))
        return source in sources or self._is_home(value)

    def _realise(
        self, leader: Ring, others: Sequence[Ring], values: Sequence[Value]
    ) -> tuple[Ring, Swap, list[Rebuilt]]:
        """The operator of a ring, and what is made of what it gathers."""
        swap, source, dim = leader.swap, leader.source, leader.dim
        if source is None or not (others or values):
            return leader, swap, []
        extent = source.aval.shape[dim]
        shape = tuple(n * self.ranks if d == dim else n for d, n in enumerate(source.aval.shape))
        whole = Value(source.aval.update(shape=shape), swap.result.node)
        names = (*(ring.swap.dot.name for ring in others), *("dynamic_slice" for _ in values))
        kept = Kept(whole, (Step(swaps.reshaper(shape)),), names)
        made = [_product(ring, whole) for ring in others]
        step = np.eye(len(shape), dtype=int)[dim] * extent
        made += [self._cut(value, whole, step) for value in values]
        return leader, replace(swap, kept=kept), made

    def _cut(self, value: Value, whole: Value | None = None, step: np.ndarray | int = 0) -> Rebuilt:
        """Parts of an array, numbers, or a stack of such; a rank's block is ``step`` behind that of
        the rank before it, in each dimension, in the ``whole`` array."""
        source = whole or self._made_of(value)

        def part(item: Known, *arrays: jax.Array) -> jax.Array:
            me = lax.axis_index(self.axis)
            if isinstance(item, Ints):
                return jnp.asarray(item.at.astype(value.aval.dtype))[me]
            assert isinstance(item, Part)
            starts = item.starts + item.ranks[:, None] * step
            at = [jnp.asarray(start)[me] for start in starts.T]
            return lax.dynamic_slice(arrays[0], at, item.shape)

        def apply(*arrays: jax.Array) -> jax.Array:
            parts = [part(item, *arrays) for item in self._items(value)]
            return jnp.stack(parts) if isinstance(self.known[value], Stack) else parts[0]

        return Rebuilt(value, (source,) if source else (), apply)


_USED = "with a dot, but what goes around is used elsewhere too"


def _product(ring: Ring, whole: Value) -> Rebuilt:
    """The result of a ring whose operand another one gathers."""
    swap = ring.swap
    left = swap.spec.place == "lhs"

    def apply(x: jax.Array, other: jax.Array) -> jax.Array:
        (out,) = swap.dot.bind([x, other] if left else [other, x])
        return lax.transpose(out, ring.order)

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
