"""Equal collectives, which XLA merges but would not as operators: one, with the readers of all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from syncopate_jax.rewrite import operations
from syncopate_jax.rewrite.graph import COLLECTIVES, Graph, Node, Value
from syncopate_jax.rewrite.swaps import Rebuilt, Taken


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Collectives whose readers read an equal one.

    Attributes:
      nodes: the collectives.
      before: lists of the graph that were changed, and what was in them.
    """

    nodes: tuple[Node, ...]
    before: tuple[tuple[list[Any], list[Any]], ...]

    def undo(self, taken: Taken) -> None:
        """Their readers read them again."""
        for changed, items in self.before:
            changed[:] = items
        taken.gone.difference_update(self.nodes)
        for node in self.nodes:
            del taken.rebuilt[node.outputs[0]]


NONE = Joined((), ())


def join(node: Node, program: Graph, taken: Taken) -> Joined:
    """Has the readers of all later collectives that equal ``node`` read ``node``."""
    later = program.nodes[node.index + 1 :]
    nodes = tuple(x for x in later if x not in taken.gone and _are_equal(node, x))
    result = node.outputs[0]
    theirs = {x.outputs[0]: result for x in nodes}
    readers = [user for value in theirs for user in value.uses]
    reads: list[list[Any]] = [program.outputs, *(user.inputs for user in {*readers} if user)]
    touched = (value for x in nodes for value in (*x.inputs, *x.outputs))
    uses: list[list[Any]] = [result.uses, *(value.uses for value in touched)]
    before = tuple((x, list(x)) for x in (*reads, *uses))
    for read in reads:
        read[:] = [theirs.get(value, value) for value in read]
    result.uses.extend(readers)
    result.uses.sort(key=lambda user: math.inf if user is None else user.index)
    for x in nodes:
        x.outputs[0].uses.clear()
        for value in x.inputs:
            value.uses.remove(x)
        # For operators found before, which may read it.
        taken.rebuilt[x.outputs[0]] = Rebuilt(x.outputs[0], (result,), lambda found: found)
    taken.gone.update(nodes)
    return Joined(nodes, before)


def _are_equal(one: Node, other: Node) -> bool:
    """Whether two collectives, of one result each, do the same to equal values."""
    return (
        one.name == other.name
        and one.name in COLLECTIVES
        and len(one.outputs) == len(other.outputs) == 1
        and not (one.side_effects or other.side_effects)
        and _do_the_same(one, other)
    )


def _do_the_same(one: Node, other: Node) -> bool:
    return (
        one.eqn.primitive == other.eqn.primitive
        and one.marks == other.marks
        and len(one.inputs) == len(other.inputs)
        and one.params == other.params
        and all(_are_same(a, b) for a, b in zip(one.inputs, other.inputs, strict=True))
    )


def _are_same(one: Value, other: Value) -> bool:
    """Whether two values are one, or made of one by the same casts, reshapes and transposes."""
    if one is other:
        return True
    a, b = one.node, other.node
    return (
        a is not None and b is not None and a.name in operations.ONE_TO_ONE and _do_the_same(a, b)
    )
