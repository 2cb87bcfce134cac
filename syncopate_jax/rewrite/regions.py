"""Elementwise parts of a program between a collective and a dot: one value in, one value out.

A value may be used several times on the way, as ``gelu`` does, if all that is made of it joins
again. A call is such an operation too, if its body is elementwise: of ``jit``, and of
``custom_jvp``, whose own derivative rule then runs on what is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncopate_jax.ops.operands import DTYPES
from syncopate_jax.rewrite import graph as graphs
from syncopate_jax.rewrite import operations, steps
from syncopate_jax.rewrite.graph import Graph, Node, Value
from syncopate_jax.rewrite.layout import Layout
from syncopate_jax.rewrite.steps import Step
from syncopate_jax.rewrite.swaps import Place
from syncopate_jax.runtime import custom_call

CALLS = frozenset({"jit", "custom_jvp_call"})
NO_NAMES = frozenset[str]()


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Elementwise operations with one moved value in and one out.

    Attributes:
      nodes: the operations, in order.
      end: the value at the other end: what comes out, or what goes in if found backwards.
      step: all of them on the other side of the collective.
    """

    nodes: tuple[Node, ...]
    end: Value
    step: Step


@dataclass(frozen=True, slots=True)
class Around:
    """Where operations stand: the layout of what is moved, over which axes, and in which body."""

    layout: Layout
    axis_names: tuple[str, ...]
    place: Place

    def refusal(self, node: Node, others: Sequence[Value]) -> str | None:
        """Why an operation cannot be done on the other side; None if it can."""
        if node.name in CALLS:
            if not _is_elementwise_call(node, self.place):
                return f"{node.name} of {_label(node)} stands between and is not elementwise"
        elif node.name not in operations.ELEMENTWISE or len(node.outputs) != 1:
            return f"{node.title} stands between, which does not commute with it"
        for value in others:
            reason = steps.varies(node, value, self.layout, self.axis_names, self.place.tracked)
            if reason:
                return reason
        return None


def is_elementwise(node: Node) -> bool:
    """Whether an operation is one that may be elementwise, to be looked at closely."""
    return node.name in (operations.ELEMENTWISE - {"convert_element_type"}) | CALLS


def refusal_before_a_sum(node: Node, around: Around) -> str | None:
    """Why an elementwise operation on what is summed cannot follow the sum; None if it can.

    A factor that all ranks share can; but in float16 it may be what keeps the sum finite.
    """
    if node.name in operations.LINEAR:
        return None
    found = {
        x: steps.varies(node, x, around.layout, around.axis_names, around.place.tracked)
        for x in node.inputs
    }
    first, moved = steps.carried(node), [x for x in node.inputs if found[x]]
    if (node.name == "mul" and len(moved) == 1) or (
        node.name == "div" and moved == node.inputs[:1]
    ):
        if node.outputs[0].aval.dtype == jnp.float16:
            return f"{node.name} stands between, without which the sum may overflow in float16"
        return None
    others = [why for x, why in found.items() if why and x is not first]
    if node.name in ("mul", "div") and others and first is node.inputs[0]:
        return others[0]
    name = _label(node) if node.name in CALLS else node.title
    return f"{name} stands between, which does not commute with a sum"


def ahead(value: Value, around: Around) -> Region | str:
    """The shortest part that reads ``value`` and whose result alone goes on; else why none does."""
    made = {value}
    nodes: list[Node] = []
    while True:
        users = [user for one in made for user in one.uses if user not in nodes]
        if None in users or not users:
            return graphs.uses_of(value)
        node = min((user for user in users if user is not None), key=lambda user: user.index)
        reason = around.refusal(node, [x for x in node.inputs if x not in made])
        if reason or node.outputs[0].aval.shape != value.aval.shape:
            return reason or f"{node.name} stands between and repeats what is moved"
        nodes.append(node)
        made.add(node.outputs[0])
        left = [one for one in made if any(user not in nodes for user in one.uses)]
        if left == node.outputs and _is_moved(left[0], value):
            return Region(tuple(nodes), left[0], _step(nodes, value, left[0], around.layout))


def behind(value: Value, around: Around) -> Region | str:
    """The shortest part that makes ``value`` of one value that nothing else reads; else why none.

    ``value`` is the result of an elementwise operation.
    """
    opened, nodes = {value}, list[Node]()
    while True:
        last = max(opened, key=lambda one: -1 if one.node is None else one.node.index)
        if nodes and len(opened) == 1 and _is_moved(last, value):
            return Region(tuple(nodes), last, _step(nodes, last, value, around.layout))
        node = last.node
        if node is None or not (is_elementwise(node) or node.name == "convert_element_type"):
            return _mixed(nodes, around)
        if nodes and any(user not in nodes for user in last.uses):
            return f"the dot's result must go into it alone, but {graphs.uses_of(last)}"
        carried = [
            x for x in node.inputs
            if steps.varies(node, x, around.layout, around.axis_names, around.place.tracked)
        ]  # fmt: skip
        if reason := around.refusal(node, ()):
            return reason
        if not carried or any(x.aval.shape != value.aval.shape for x in carried):
            return _mixed([*nodes, node], around)
        nodes.insert(0, node)
        opened = {*opened, *carried} - {last}


def _mixed(nodes: Sequence[Node], around: Around) -> str:
    """Why operations do not come from one value: the operand beside what is nearest to a dot."""
    for node in nodes:
        first = steps.carried(node)
        reason = around.refusal(node, [x for x in node.inputs if x is not first])
        if reason:
            return reason
    return f"what it moves is made by {nodes[0].name}, not by a dot"


def _is_moved(new: Value, old: Value) -> bool:
    """Whether ``new`` may be moved in the place of ``old``: a float of no more bytes."""
    dtype, before = jnp.dtype(new.aval.dtype), jnp.dtype(old.aval.dtype)
    return dtype == before or (str(dtype) in DTYPES and dtype.itemsize <= before.itemsize)


def _step(nodes: Sequence[Node], start: Value, end: Value, layout: Layout) -> Step:
    """All operations of a region on the other side."""
    inner = {start, *(node.outputs[0] for node in nodes)}
    reads = dict.fromkeys(x for node in nodes for x in node.inputs if x not in inner)
    spread = {x: steps.source_of(x) for x in reads}
    shape = layout.outside

    def apply(x: jax.Array, *others: Any) -> Any:
        known = {start: x}
        for (value, (source, dims)), other in zip(spread.items(), others, strict=True):
            known[value] = jnp.asarray(other, source.aval.dtype).astype(value.aval.dtype)
            if value.aval.ndim:
                known[value] = lax.broadcast_in_dim(known[value], shape, dims)
        _run(nodes, known, shape)
        return known[end]

    return Step(apply, tuple(source for source, _ in spread.values()))


# --- operations on arrays of another shape ----------------------------------------------------


def _run(nodes: Sequence[Node], known: dict[Value, Any], shape: tuple[int, ...]) -> None:
    """Elementwise operations, where whole arrays have ``shape`` and others are scalars."""
    for node in nodes:
        args = [known[x] if x in known else jnp.asarray(x.known, x.aval.dtype) for x in node.inputs]
        if node.name == "jit":
            outs = _evaluate(graphs.read(node.params["jaxpr"], inline=False), args, shape)
        elif node.name == "custom_jvp_call":
            outs = _with_own_rule(node, args, shape)
        elif node.name == "broadcast_in_dim":
            outs = [args[0] if args[0].ndim else jnp.broadcast_to(args[0], shape)]
        elif node.name in operations.CASTS:
            outs = args
        else:
            outs = node.bind(custom_call.vary_alike(args))
        known.update(zip(node.outputs, outs, strict=True))


def _evaluate(program: Graph, args: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    known = dict(zip(program.inputs, args, strict=True))
    _run(program.nodes, known, shape)
    return [known[x] if x in known else jnp.asarray(x.known, x.aval.dtype) for x in program.outputs]


def _with_own_rule(node: Node, args: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    """A call of a ``custom_jvp`` function: its derivative is what its rule says."""

    @jax.custom_jvp
    def call(*args: Any) -> tuple[Any, ...]:
        return tuple(_evaluate(graphs.read(node.params["call_jaxpr"], inline=False), args, shape))

    @call.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        found = graphs.jvp_rule(node)
        assert found is not None  # as _has_plain_rule saw
        program, zeros = found
        outs = _evaluate(program, (*primals, *tangents), shape)
        primal, given = outs[: len(zeros)], iter(outs[len(zeros) :])
        return tuple(primal), tuple(
            jnp.zeros_like(x) if zero else next(given)
            for x, zero in zip(primal, zeros, strict=True)
        )

    return list(call(*custom_call.vary_alike(args)))


def _is_elementwise_call(node: Node, place: Place) -> bool:
    """Whether a call's body is elementwise, and its derivative rule if it has one."""
    shape = node.outputs[0].aval.shape if len(node.outputs) == 1 else None
    if shape is None or not _is_plain(node, shape):
        return False
    rules = [x for x in (node, *_within(node)) if x.name == "custom_jvp_call"]
    return not rules or bool(place.bound(lambda: all(_has_plain_rule(x, shape) for x in rules)))


def _has_plain_rule(node: Node, shape: tuple[int, ...], known: frozenset[str] = NO_NAMES) -> bool:
    """Whether a derivative rule, and those of what it calls, are elementwise."""
    floats = all(jnp.issubdtype(x.aval.dtype, np.floating) for x in node.inputs)
    rule = graphs.jvp_rule(node) if floats and not node.params["symbolic_zeros"] else None
    if rule is None or not all(_is_plain(x, shape) for x in rule[0].nodes):
        return False
    known |= {_label(node)}  # a function that its own rule calls
    within = [y for x in rule[0].nodes for y in (x, *(_within(x) if x.name in CALLS else ()))]
    calls = [x for x in within if x.name == "custom_jvp_call" and _label(x) not in known]
    return all(_has_plain_rule(x, shape, known) for x in calls)


def _within(node: Node) -> list[Node]:
    """All operations in the body of a call."""
    body = graphs.read(node.params["jaxpr" if node.name == "jit" else "call_jaxpr"], inline=False)
    return [y for x in body.nodes for y in (x, *(_within(x) if x.name in CALLS else ()))]


def _is_plain(node: Node, shape: tuple[int, ...]) -> bool:
    """Whether an operation of arrays of ``shape`` and scalars is elementwise."""
    if any(x.aval.shape not in ((), shape) for x in (*node.inputs, *node.outputs)):
        return False
    if node.name in CALLS:
        return all(_is_plain(x, shape) for x in _within(node))
    return node.name in operations.ELEMENTWISE | operations.CASTS | {"broadcast_in_dim"}


def _label(node: Node) -> str:
    if node.name == "jit":
        return str(node.params["name"])
    return str(node.params["call_jaxpr"].debug_info.func_name)
