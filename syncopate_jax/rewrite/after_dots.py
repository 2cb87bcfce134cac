"""Collectives that move what a dot makes."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from syncopate_jax.ops.operands import DTYPES
from syncopate_jax.rewrite import operations, regions, steps, swaps
from syncopate_jax.rewrite.graph import Node, Value, uses_of
from syncopate_jax.rewrite.letters import letters
from syncopate_jax.rewrite.regions import Around
from syncopate_jax.rewrite.steps import Step
from syncopate_jax.rewrite.swaps import SUMS, Operand, Place, Swap, Taken


def after_dot(
    node: Node, names: tuple[str, ...], ranks: int, place: Place, taken: Taken
) -> Swap | str:
    """The operator of a collective and the dot whose result it moves, or why there is none."""
    if node.name == "all_to_all" and node.params["split_axis"] == node.params["concat_axis"]:
        return "it splits and joins one dimension"
    exchange = swaps.read_exchange(node, names, ranks, into=True)
    layout, value = exchange.layout, node.inputs[0]
    done: list[Step] = []
    gone = [node]
    narrowed = None
    sums = node.name in SUMS
    while True:
        user = value.node
        if user is None:
            return _not_a_dot(user)
        if user.name in ("add", "add_any") and all(_is_product(x) for x in user.inputs):
            return f"{user.name} stands between: it sums several dots, an operator has one"
        if len(user.outputs) != 1 or not user.inputs:
            return _not_a_dot(user)
        if any(reader not in gone for reader in value.uses):
            return f"the dot's result must go into it alone, but {uses_of(value)}"
        if user.name == "dot_general":
            break
        if user.name == "convert_element_type":
            value_before = user.inputs[0]
            dtype = jnp.dtype(value.aval.dtype)
            reason = swaps.unmovable_cast(value_before, value, widens="after the sum")
            if reason and (sums or narrowed or str(dtype) not in DTYPES):
                return reason
            if reason:
                done.insert(0, Step(swaps.caster(dtype)))
            else:
                narrowed = narrowed or dtype
        elif regions.is_elementwise(user):
            around = Around(layout, names, place)
            reason = regions.refusal_before_a_sum(user, around) if sums else None
            if reason or narrowed:
                maker = _maker(value)
                if maker is None or maker.name != "dot_general":
                    return _not_a_dot(maker)
                return reason or f"a cast stands after {user.name}, and does not commute with it"
            region = regions.behind(value, around)
            if isinstance(region, str):
                return region
            done.insert(0, region.step)
            gone[:0] = region.nodes
            value = region.end
            continue
        else:
            if user.name not in (*operations.RESHAPES, *operations.CASTS, "transpose"):
                return _not_a_dot(user)
            value_before = user.inputs[0]
            moved = steps.follow(user, value_before, layout, backward=True)
            if isinstance(moved, str):
                return moved
            layout = moved.layout
            if moved.step:
                done.insert(0, moved.step)
        gone.insert(0, user)
        value = value_before
    if user in taken.gone:
        return f"its dot, at {user.source}, is already one operator with another"
    if reason := swaps.unfit(user):
        return reason
    if narrowed and narrowed.itemsize < user.inputs[0].aval.dtype.itemsize:
        return f"a cast to {narrowed} rounds more than the dot's operands are rounded"
    spelt = letters(user, 2, layout)
    operands = [
        Operand(value, (), tuple(f.inside for f in factors))
        for value, factors in zip(user.inputs, (spelt.lhs, spelt.rhs), strict=True)
    ]
    swap = swaps.make(node, user, [user, *gone], exchange, spelt, "out", operands)
    out_dtype = narrowed or swap.out_dtype
    done.append(Step(swaps.reshaper(node.outputs[0].aval.shape)))
    return replace(swap, out_dtype=out_dtype, shape=layout.outside, steps=tuple(done))


def _not_a_dot(maker: Node | None) -> str:
    if maker is None:
        return "what it moves is not made by a dot here"
    return f"what it moves is made by {maker.title}, not by a dot"


def _maker(value: Value) -> Node | None:
    """What is behind elementwise operations and reshapes: a dot if there is one."""
    left, found = [value], list[Node]()
    for value in left:
        node = value.node
        if node is None or node.name == "dot_general":
            found = [node, *found] if node else found
        elif regions.is_elementwise(node) or node.name in operations.ONE_TO_ONE:
            left += [x for x in node.inputs if x not in left]
        else:
            found.append(node)
    return found[0] if found else None


def _is_product(value: Value) -> bool:
    """Whether a value is a dot's result, or a sum of such."""
    while value.node is not None:
        name, reads = value.node.name, value.node.inputs
        if name in ("add", "add_any"):
            return all(_is_product(read) for read in reads)
        if name not in operations.ONE_TO_ONE:
            return name == "dot_general"
        value = reads[0]
    return False
