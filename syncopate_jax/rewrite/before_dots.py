"""Collectives whose result a dot reads, alone or beside others.

Where others read the result too, the operator gives back what it exchanged, so that nothing is
sent again: of several dots (queries, keys and values; gate and up; a forward pass and the gradient
of its weight) one is fused with the collective and the others read what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax import lax

from syncopate_jax.rewrite import operations, regions, steps, swaps
from syncopate_jax.rewrite.graph import COLLECTIVES, Node, Value, uses_of
from syncopate_jax.rewrite.layout import Layout
from syncopate_jax.rewrite.letters import letters
from syncopate_jax.rewrite.regions import Around, Region
from syncopate_jax.rewrite.steps import Step
from syncopate_jax.rewrite.swaps import Kept, Operand, Place, Swap, Taken


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """The way from a collective towards a dot: the value reached, and what lies behind."""

    value: Value
    layout: Layout
    done: tuple[Step, ...]
    gone: tuple[Node, ...]
    undo: tuple[Step, ...] = ()


def before_dot(
    node: Node, names: tuple[str, ...], ranks: int, place: Place, taken: Taken
) -> Swap | str:
    """The operator of a collective and a dot that reads its result, or why there is none."""
    if node.name == "all_to_all" and node.params["split_axis"] == node.params["concat_axis"]:
        return "it splits and joins one dimension"
    exchange = swaps.read_exchange(node, names, ranks, into=False)
    path = _Path(
        node.outputs[0],
        exchange.layout,
        (Step(swaps.reshaper(exchange.layout.outside)),),
        (node,),
    )
    while path.value.uses:
        user = path.value.uses[0]
        if len(path.value.uses) > 1:
            region = regions.ahead(path.value, Around(path.layout, names, place))
            if isinstance(region, str):
                break
            path = _beyond(path, region)
            continue
        if user is None or user.name == "dot_general":
            break
        moved = _over(user, path, names, place)
        if isinstance(moved, str):
            return moved
        path = moved
    if not path.value.uses:
        return "nothing reads its result"
    found: list[Swap] = []
    reasons: list[str] = []
    for user in dict.fromkeys(path.value.uses):
        swap = _by_way_of(user, path, node, exchange, taken)
        if isinstance(swap, str):
            reasons.append(swap)
        elif swap is not None:
            found.append(swap)
    if found:
        return min(found, key=_cost)
    if reasons and len(path.value.uses) == 1:
        return reasons[0]
    last = f": {reasons[0]}" if reasons else ""
    return f"no dot that reads its result can be one operator with it; {uses_of(path.value)}{last}"


def _over(user: Node, path: _Path, names: tuple[str, ...], place: Place) -> _Path | str:
    """The path behind one more operation, moved to the other side of the collective."""
    value, layout = path.value, path.layout
    if len(user.outputs) != 1:
        return f"its result goes into {user.title}, which has {len(user.outputs)} results"
    result = user.outputs[0]
    step: Step | str | None
    if user.name == "convert_element_type":
        if reason := swaps.unmovable_cast(value, result, widens="before it moves"):
            return reason
        step = Step(swaps.caster(result.aval.dtype))
    elif regions.is_elementwise(user):
        region = regions.ahead(value, Around(layout, names, place))
        return region if isinstance(region, str) else _beyond(path, region)
    else:
        moved = steps.follow(user, result, layout, backward=False)
        if isinstance(moved, str):
            return moved
        layout, step = moved.layout, moved.step
    done = (*path.done, step) if step else path.done
    return _Path(result, layout, done, (*path.gone, user), path.undo)


def _beyond(path: _Path, region: Region) -> _Path:
    done, gone = (*path.done, region.step), (*path.gone, *region.nodes)
    return _Path(region.end, path.layout, done, gone, path.undo)


def _by_way_of(
    user: Node | None, path: _Path, node: Node, exchange: swaps.Exchange, taken: Taken
) -> Swap | str | None:
    """The operator with the dot that ``user`` is or leads to; None if it leads to none.

    Beyond a value with several readers only what can be undone is walked over: reshapes and
    transposes.
    """
    shared = path.value
    while user is not None and user.name in (*operations.RESHAPES, *operations.CASTS, "transpose"):
        moved = steps.follow(user, user.outputs[0], path.layout, backward=False)
        if isinstance(moved, str):
            return moved
        done = (*path.done, moved.step) if moved.step else path.done
        undo = (*_undo(user), *path.undo)
        result = user.outputs[0]
        path = _Path(result, moved.layout, done, (*path.gone, user), undo)
        if len(result.uses) != 1:
            return f"what {user.name} makes of it has several readers; {uses_of(result)}"
        user = result.uses[0]
    if user is None or user.name != "dot_general":
        return None
    if user in taken.gone:
        return f"its dot, at {user.source}, is already one operator with another"
    if reason := swaps.unfit(user):
        return reason
    side = 0 if user.inputs[0] is path.value else 1
    other = user.inputs[1 - side]
    if other is path.value:
        return "its result is both operands of the dot"
    swap = _with(user, side, path, node, exchange)
    if len(shared.uses) == 1:
        return swap
    if reason := taken.unready(other, shared):
        return f"the dot's other operand {reason}"
    readers = [reader for reader in shared.uses if reader not in swap.gone]
    kept = Kept(
        shared,
        (Step(swaps.reshaper(path.value.aval.shape)), *path.undo),
        tuple("the result of the function" if r is None else r.name for r in readers),
    )
    return replace(swap, kept=kept)


def _with(dot: Node, side: int, path: _Path, node: Node, exchange: swaps.Exchange) -> Swap:
    spelt = letters(dot, side, path.layout)
    operands = [
        Operand(
            node.inputs[0] if i == side else dot.inputs[i],
            path.done if i == side else (),
            tuple(f.outside if i == side else f.inside for f in factors),
        )
        for i, factors in enumerate((spelt.lhs, spelt.rhs))
    ]
    return swaps.make(node, dot, (*path.gone, dot), exchange, spelt, ("lhs", "rhs")[side], operands)


def _undo(node: Node) -> tuple[Step, ...]:
    """From the result of a reshape or transpose to its operand."""
    if node.name in operations.CASTS:
        return ()
    if node.name == "transpose":
        order: Sequence[int] = node.params["permutation"]
        inverse = sorted(range(len(order)), key=lambda d: order[d])
        return (Step(lambda x: lax.transpose(x, inverse)),)
    return (Step(swaps.reshaper(node.inputs[0].aval.shape)),)


def _cost(swap: Swap) -> tuple[bool, int, int]:
    """Least first: a dot that no other collective can use, the one that hides most, the first."""
    lhs, _ = (value.aval.shape for value in swap.dot.inputs)
    (contracted, _), _ = swap.dot.params["dimension_numbers"]
    work = math.prod(swap.dot.outputs[0].aval.shape) * math.prod(lhs[d] for d in contracted)
    return _feeds_a_collective(swap.dot), -work, swap.dot.index


def _feeds_a_collective(dot: Node) -> bool:
    value = dot.outputs[0]
    while len(value.uses) == 1 and value.uses[0] is not None:
        user = value.uses[0]
        if user.name in COLLECTIVES:
            return True
        if user.name not in operations.ONE_TO_ONE:
            return False
        value = user.outputs[0]
    return False
