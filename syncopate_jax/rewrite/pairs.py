"""Finding a dot to each collective, and the operator that is both."""

from __future__ import annotations

import math

from syncopate_jax.rewrite import operations
from syncopate_jax.rewrite.after_dots import after_dot
from syncopate_jax.rewrite.before_dots import before_dot
from syncopate_jax.rewrite.graph import Node, Value, varying
from syncopate_jax.rewrite.swaps import SUMS, Place, Swap, Taken


def match(node: Node, place: Place, taken: Taken) -> Swap | str:
    """The operator for a collective and the dot beside it, or why there is none."""
    if node.params.get("axis_index_groups") is not None:
        return "it runs in groups of ranks (axis_index_groups), which no operator does"
    if node.name not in ("all_gather", "all_to_all", *SUMS):
        return f"no operator does a {node.name}"
    names = node.params.get("axis_name", node.params.get("axes"))
    names = tuple(names) if isinstance(names, tuple | list) else (names,)
    if not all(isinstance(name, str) for name in names):
        return "it also runs over an axis of jax.vmap"
    ranks = math.prod(place.sizes[name] for name in names)
    if ranks == 1:
        return f"there is a single rank along {', '.join(names)}"
    if place.tracked and (same := set(names) - _tracked_axes(node.inputs[0])):
        return (
            f"what it moves is the same on every rank of {', '.join(sorted(same))}, so it is no "
            f"part of a sharded product"
        )
    if node.name in SUMS:
        return after_dot(node, names, ranks, place, taken)
    if node.name == "all_gather":
        return before_dot(node, names, ranks, place, taken)
    before = after_dot(node, names, ranks, place, taken)
    if isinstance(before, Swap):
        return before
    after = before_dot(node, names, ranks, place, taken)
    return after if isinstance(after, Swap) else f"after a dot: {before}; before a dot: {after}"


def _tracked_axes(value: Value) -> frozenset[str]:
    """Axes along which a value truly differs: before it was cast to vary."""
    while value.node is not None and value.node.name in operations.ONE_TO_ONE:
        value = value.node.inputs[0]
    if value.node is not None and value.node.name == "dot_general":
        return _tracked_axes(value.node.inputs[0]) | _tracked_axes(value.node.inputs[1])
    return varying(value)
