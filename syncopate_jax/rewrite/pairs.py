"""Finding a dot to each collective, and the operator that is both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from syncopate_jax.ops.operands import DTYPES
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.rewrite import steps
from syncopate_jax.rewrite.graph import Node, Value, one_use, varying
from syncopate_jax.rewrite.layout import Layout
from syncopate_jax.rewrite.letters import Letters, letters
from syncopate_jax.rewrite.steps import Step

SUMS = ("psum", "psum_invariant", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a body runs: its mesh axes, and whether ``shard_map`` tracks what varies.

    Attributes:
      sizes: extent of every mesh axis.
      automatic: axes of several ranks that are left to the compiler.
      tracked: as ``check_vma`` of the ``shard_map``.
    """

    sizes: Mapping[str, int]
    automatic: tuple[str, ...]
    tracked: bool


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One operand of the operator: a value, steps on it, and its extents by letters."""

    value: Value
    steps: tuple[Step, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """An operator that stands for a dot and a collective.

    Attributes:
      collective, dot: the two operations; ``at`` is the later one, whose place it takes.
      gone: the operations that it does the work of.
      spec, axis_names, out_dtype, lhs, rhs: the operator, and its operands.
      shape: what its result is reshaped to before ``steps``.
      steps: the operations that stood between dot and collective.
    """

    collective: Node
    dot: Node
    gone: tuple[Node, ...]
    spec: Contraction
    axis_names: tuple[str, ...]
    out_dtype: jnp.dtype
    lhs: Operand
    rhs: Operand
    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    @property
    def at(self) -> Node:
        return self.gone[-1]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A collective as kind, axes and the layout of its value on the dot's side."""

    kind: str
    axis_names: tuple[str, ...]
    layout: Layout


def match(node: Node, place: Place) -> Swap | str:
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
        return _into(node, names, ranks, place)
    if node.name == "all_gather":
        return _out_of(node, names, ranks, place)
    before = _into(node, names, ranks, place)
    if isinstance(before, Swap):
        return before
    after = _out_of(node, names, ranks, place)
    return after if isinstance(after, Swap) else f"after a dot: {before}; before a dot: {after}"


def _tracked_axes(value: Value) -> frozenset[str]:
    """Axes along which a value truly differs: before it was cast to vary."""
    while value.node is not None and value.node.name in (*steps.CASTS, *_SHAPING):
        value = value.node.inputs[0]
    if value.node is not None and value.node.name == "dot_general":
        return _tracked_axes(value.node.inputs[0]) | _tracked_axes(value.node.inputs[1])
    return varying(value)


_SHAPING = (*steps.RESHAPES, "transpose", "convert_element_type")


def _read(node: Node, names: tuple[str, ...], ranks: int, *, into: bool) -> _Exchange:
    """The collective with the layout of its operand (``into``) or of its result."""
    params = node.params
    shape = list((node.inputs if into else node.outputs)[0].aval.shape)
    moved: dict[int, tuple[int, str]] = {}
    kind = node.name
    if node.name == "all_gather":
        axis = params["all_gather_dimension"]
        moved[axis] = (shape[axis] // ranks, "gather")
    elif node.name == "all_to_all":
        scatter, gather = params["split_axis"], params["concat_axis"]
        if into:
            moved[scatter] = (shape[scatter] // ranks, "scatter")
            moved[gather] = (shape[gather] * ranks, "gather")
        else:
            moved[scatter] = (shape[scatter] * ranks, "scatter")
            moved[gather] = (shape[gather] // ranks, "gather")
    elif node.name == "reduce_scatter":
        axis = params["scatter_dimension"]
        moved[axis] = (shape[axis] // ranks, "scatter")
    else:
        kind = "all_reduce"
    return _Exchange(kind, names, Layout.of(shape, moved))


def _out_of(node: Node, names: tuple[str, ...], ranks: int, place: Place) -> Swap | str:
    """A collective whose result a dot reads."""
    if node.name == "all_to_all" and node.params["split_axis"] == node.params["concat_axis"]:
        return "it splits and joins one dimension"
    exchange = _read(node, names, ranks, into=False)
    layout, value = exchange.layout, node.outputs[0]
    done: list[Step] = [Step(_reshaper(layout.outside))]
    gone = [node]
    while True:
        if reason := one_use(value):
            return f"its result must be used by one dot alone, but {reason}"
        user = value.uses[0]
        assert user is not None
        if user.name == "dot_general":
            break
        result = user.outputs[0] if len(user.outputs) == 1 else None
        if result is None:
            return f"its result goes into {user.name}"
        if user.name == "convert_element_type":
            if reason := _cast(value, result, widens="before it moves"):
                return reason
            dtype = result.aval.dtype
            done.append(Step(_caster(dtype)))
        elif _is_elementwise(user):
            step = steps.elementwise(user, value, layout, names, place.tracked)
            if isinstance(step, str):
                return step
            done.append(step)
        else:
            moved = steps.follow(user, result, layout, backward=False)
            if isinstance(moved, str):
                return moved
            layout = moved.layout
            done += [moved.step] if moved.step else []
        gone.append(user)
        value = result
    if reason := unfit(user):
        return reason
    side = 0 if user.inputs[0] is value else 1
    if user.inputs[1 - side] is value:
        return "its result is both operands of the dot"
    spelt = letters(user, side, layout)
    operands = [
        Operand(
            node.inputs[0] if i == side else user.inputs[i],
            tuple(done) if i == side else (),
            tuple(f.outside if i == side else f.inside for f in factors),
        )
        for i, factors in enumerate((spelt.lhs, spelt.rhs))
    ]
    return _swap(node, user, [*gone, user], exchange, spelt, ("lhs", "rhs")[side], operands)


def _into(node: Node, names: tuple[str, ...], ranks: int, place: Place) -> Swap | str:
    """A collective that moves what a dot makes."""
    if node.name == "all_to_all" and node.params["split_axis"] == node.params["concat_axis"]:
        return "it splits and joins one dimension"
    exchange = _read(node, names, ranks, into=True)
    layout, value = exchange.layout, node.inputs[0]
    done: list[Step] = []
    gone = [node]
    narrowed = None
    sums = node.name in SUMS
    while True:
        user = value.node
        if user is None:
            return "what it moves is not made by a dot here"
        if len(user.outputs) != 1 or not user.inputs:
            return f"what it moves is made by {user.name}, not by a dot"
        if reason := one_use(value):
            return f"the dot's result must go into it alone, but {reason}"
        if user.name == "dot_general":
            break
        if user.name == "convert_element_type":
            value_before = user.inputs[0]
            dtype = jnp.dtype(value.aval.dtype)
            reason = _cast(value_before, value, widens="after the sum")
            if reason and (sums or narrowed or str(dtype) not in DTYPES):
                return reason
            if reason:
                done.insert(0, Step(_caster(dtype)))
            else:
                narrowed = narrowed or dtype
        elif _is_elementwise(user):
            if sums and user.name not in steps.LINEAR:
                return f"{user.name} stands between, which does not commute with a sum"
            if narrowed:
                return f"a cast stands after {user.name}, and does not commute with it"
            value_before = _carried(user)
            step = steps.elementwise(user, value_before, layout, names, place.tracked)
            if isinstance(step, str):
                return step
            done.insert(0, step)
        else:
            if user.name not in (*steps.RESHAPES, *steps.CASTS, "transpose"):
                return f"what it moves is made by {user.name}, not by a dot"
            value_before = user.inputs[0]
            moved = steps.follow(user, value_before, layout, backward=True)
            if isinstance(moved, str):
                return moved
            layout = moved.layout
            if moved.step:
                done.insert(0, moved.step)
        gone.insert(0, user)
        value = value_before
    if reason := unfit(user):
        return reason
    if narrowed and narrowed.itemsize < user.inputs[0].aval.dtype.itemsize:
        return f"a cast to {narrowed} rounds more than the dot's operands are rounded"
    spelt = letters(user, 2, layout)
    operands = [
        Operand(value, (), tuple(f.inside for f in factors))
        for value, factors in zip(user.inputs, (spelt.lhs, spelt.rhs), strict=True)
    ]
    swap = _swap(node, user, [user, *gone], exchange, spelt, "out", operands)
    out_dtype = narrowed or swap.out_dtype
    done.append(Step(_reshaper(node.outputs[0].aval.shape)))
    return replace(swap, out_dtype=out_dtype, shape=layout.outside, steps=tuple(done))


def _carried(node: Node) -> Value:
    """The operand of an elementwise operation that is nearer to a dot."""
    for value in node.inputs:
        if value.node is not None and value.node.name not in ("broadcast_in_dim", "pvary"):
            return value
    return node.inputs[0]


def _is_elementwise(node: Node) -> bool:
    return node.name in steps.UNARY | steps.BINARY | {"jit"}


def _cast(old: Value, new: Value, *, widens: str) -> str | None:
    """Why a cast cannot be moved with the values kept and no more bytes moved; None if it can."""
    before, after = jnp.dtype(old.aval.dtype), jnp.dtype(new.aval.dtype)
    if str(before) not in DTYPES or str(after) not in DTYPES:
        return f"a cast from {before} to {after} stands between"
    if after.itemsize > before.itemsize:
        return (
            f"a cast from {before} to {after} stands between, which does not commute: it would "
            f"have to happen {widens}"
        )
    return None


def unfit(dot: Node) -> str | None:
    """Why no operator computes this dot; None where one does."""
    lhs, rhs = (value.aval.dtype for value in dot.inputs)
    if lhs != rhs or str(lhs) not in DTYPES or str(dot.outputs[0].aval.dtype) not in DTYPES:
        return f"no operator multiplies {lhs} by {rhs} into {dot.outputs[0].aval.dtype}"
    if dot.params["precision"] not in (None, (lax.Precision.DEFAULT,) * 2, lax.Precision.DEFAULT):
        return f"its dot asks for precision {dot.params['precision']}"
    if any(0 in value.aval.shape for value in (*dot.inputs, *dot.outputs)):
        return "its dot is empty"
    return None


def _swap(
    node: Node,
    dot: Node,
    gone: Sequence[Node],
    exchange: _Exchange,
    spelt: Letters,
    side: str,
    operands: Sequence[Operand],
) -> Swap:
    factors = [*spelt.lhs, *spelt.rhs, *spelt.out]
    moved = {f.role: spelt.names[id(f)] for f in factors if f.role}
    spec = Contraction(
        spelt.spell(spelt.lhs),
        spelt.spell(spelt.rhs),
        spelt.spell(spelt.out),
        exchange.kind,
        side,
        gather=moved.get("gather", ""),
        scatter=moved.get("scatter", ""),
    )
    return Swap(
        collective=node,
        dot=dot,
        gone=tuple(gone),
        spec=spec,
        axis_names=exchange.axis_names,
        out_dtype=jnp.dtype(dot.outputs[0].aval.dtype),
        lhs=operands[0],
        rhs=operands[1],
        shape=dot.outputs[0].aval.shape,
    )


def _reshaper(shape: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda x: x.reshape(shape)


def _caster(dtype: jnp.dtype) -> Callable[[Any], Any]:
    return lambda x: x.astype(dtype)
