"""The operations that may stand between a collective and a dot, moved to its other side.

A step is an operation on one array that gives, outside the collective, what the program's own
operation gives inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from syncopate_jax.rewrite import operations
from syncopate_jax.rewrite.graph import Node, Value, varying
from syncopate_jax.rewrite.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operation on the other side: ``apply(x, *values of others)``."""

    apply: Callable[..., Any]
    others: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A step, and what walking over its operation leads to.

    Attributes:
      step: None where there is nothing to do.
      layout: of the value on the far side of the operation, towards the dot.
    """

    step: Step | None
    layout: Layout


def follow(node: Node, value: Value, layout: Layout, *, backward: bool) -> Moved | str:
    """Walks over a reshape or a transpose; a sentence where it is neither or cannot be walked.

    ``layout`` is of its result if ``backward``, of its operand if not; ``value`` is the other one.
    """
    if node.name in operations.RESHAPES:
        return _reshape(node, value, layout, backward)
    if node.name == "transpose":
        order = node.params["permutation"]
        inverse = sorted(range(len(order)), key=lambda d: order[d])
        return Moved(
            Step(lambda x: lax.transpose(x, order)),
            layout.transpose(inverse if backward else order),
        )
    if node.name in operations.CASTS:
        return Moved(None, layout)
    return f"{node.title} stands between, which does not commute with it"


def _reshape(node: Node, value: Value, layout: Layout, backward: bool) -> Moved | str:
    if node.name == "broadcast_in_dim" and not _adds_ones(node):
        return "broadcast_in_dim stands between and repeats what is moved"
    if node.params.get("dimensions") is not None:
        return "a reshape with a permutation stands between"
    found = layout.reshape(value.aval.shape)
    if found is None:
        return (
            f"the moved dimension does not survive the reshape from {node.inputs[0].aval.shape} "
            f"to {node.outputs[0].aval.shape} as a whole block a rank"
        )
    shape = layout.outside if backward else found.outside
    return Moved(Step(lambda x: x.reshape(shape)), found)


def _adds_ones(node: Node) -> bool:
    """A broadcast in disguise of a reshape: every dimension it adds has extent 1, in order."""
    kept = node.params["broadcast_dimensions"]
    old, new = node.inputs[0].aval.shape, node.outputs[0].aval.shape
    added = [n for d, n in enumerate(new) if d not in kept]
    return tuple(new[d] for d in kept) == old and all(n == 1 for n in added)


def varies(
    node: Node, value: Value, layout: Layout, axis_names: Sequence[str], tracked: bool
) -> str | None:
    """Why an operand of an elementwise operation cannot be had on the other side; None if it can.

    It must be the same along every moved dimension and on every rank.
    """
    source, dims = source_of(value)
    moved = layout.moved()
    if any(d in moved and source.aval.shape[i] != 1 for i, d in enumerate(dims)):
        return f"{node.name} stands between, whose other operand differs along the moved dimension"
    if not _same_on_every_rank(source, axis_names, tracked):
        return (
            f"{node.name} stands between, whose other operand is not known to be the same on "
            f"every rank of {', '.join(axis_names)}"
        )
    return None


def source_of(value: Value) -> tuple[Value, tuple[int, ...]]:
    """What an operand was before it was broadcast, and along which dimensions that lies.

    It may be of another dtype.
    """
    source = _unvaried(value)
    if source.node is not None and source.node.name == "broadcast_in_dim":
        dims = tuple(source.node.params["broadcast_dimensions"])
        return _unvaried(source.node.inputs[0]), dims
    return source, tuple(range(source.aval.ndim))


def _unvaried(value: Value) -> Value:
    """What a value was before it was said to vary, if need be of another type: a Python number."""
    value = _before_casts(value)
    if value.node is not None and value.node.name == "convert_element_type":
        number = _before_casts(value.node.inputs[0])
        return value if number is value.node.inputs[0] else number
    return value


def carried(node: Node) -> Value:
    """The operand of an elementwise operation that is nearer to a dot."""
    for value in node.inputs:
        source = _unvaried(value)
        if source.node is not None and source.node.name != "broadcast_in_dim":
            return value
    return node.inputs[0]


def _before_casts(value: Value, through: frozenset[str] = operations.CASTS) -> Value:
    """What a value was before JAX was told that it may differ between ranks."""
    while value.node is not None and value.node.name in through:
        value = value.node.inputs[0]
    return value


def _same_on_every_rank(value: Value, axis_names: Sequence[str], tracked: bool) -> bool:
    value = _before_casts(value, operations.CASTS | operations.RESHAPES | {"convert_element_type"})
    if value.node is None and value.known is not None:
        return True
    return tracked and not varying(value) & set(axis_names)
