"""Operators that stand for a dot and a collective: what they are, and when a dot allows for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax

from syncopate_jax.ops.operands import DTYPES
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.rewrite.graph import Node, Value
from syncopate_jax.rewrite.layout import Layout
from syncopate_jax.rewrite.letters import Letters
from syncopate_jax.rewrite.steps import Step

SUMS = ("psum", "psum_invariant", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a body runs: its mesh axes, and whether ``shard_map`` tracks what varies.

    Attributes:
      sizes: extent of every mesh axis.
      automatic: axes of several ranks that are left to the compiler.
      tracked: as ``check_vma`` of the ``shard_map``.
      bound: calls a function where the mesh axes are bound, as tracing a derivative rule needs.
    """

    sizes: Mapping[str, int]
    automatic: tuple[str, ...]
    tracked: bool
    bound: Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One operand of the operator: a value, steps on it, and its extents by letters."""

    value: Value
    steps: tuple[Step, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A value that the operator gives back beside its result: what it exchanged, for other readers.

    Attributes:
      value: the value of the program.
      undo: from the dot's operand to the value.
      readers: the operations that read it beside the dot, by name.
    """

    value: Value
    undo: tuple[Step, ...]
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Rebuilt:
    """A value that is made of what an operator keeps.

    Attributes:
      value: the value.
      reads: what it is made of.
      apply: makes it.
    """

    value: Value
    reads: tuple[Value, ...]
    apply: Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """An operator that stands for a dot and a collective.

    Attributes:
      collective, dot: the two operations.
      gone: the operations that it does the work of.
      result: the value that it gives.
      spec, axis_names, out_dtype, lhs, rhs: the operator, and its operands.
      shape: what its result is reshaped to before ``steps``.
      steps: the operations that stood between dot and collective.
      kept: what it gives back too, if anything reads it.
    """

    collective: Node
    dot: Node
    gone: tuple[Node, ...]
    result: Value
    spec: Contraction
    axis_names: tuple[str, ...]
    out_dtype: jnp.dtype
    lhs: Operand
    rhs: Operand
    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()
    kept: Kept | None = None

    @property
    def reads(self) -> tuple[Value, ...]:
        """All values that must be there before it runs."""
        before = [of.value for of in (self.lhs, self.rhs)]
        every = (*self.lhs.steps, *self.rhs.steps, *self.steps)
        return (*before, *(value for step in every for value in step.others))


@dataclass(eq=False, slots=True)
class Taken:
    """What the operators found so far stand for.

    Attributes:
      gone: the operations that they do the work of.
      made: which operator gives a value.
      rebuilt: how a value is made of what an operator keeps.
    """

    gone: set[Node] = field(default_factory=set)
    made: dict[Value, Swap] = field(default_factory=dict)
    rebuilt: dict[Value, Rebuilt] = field(default_factory=dict)

    def add(self, swap: Swap) -> None:
        self.gone.update(swap.gone)
        self.made[swap.result] = swap
        if swap.kept is not None:
            self.made[swap.kept.value] = swap

    def unready(self, value: Value, shared: Value) -> str | None:
        """Why ``value`` cannot be had before anything reads ``shared``; None if it can."""
        stack, seen = [value], {value}
        while stack:
            value = stack.pop()
            if value is shared:
                return "is made of the result too"
            swap, node = self.made.get(value) or self.rebuilt.get(value), value.node
            if node is None:
                continue
            if shared.node is not None and node.index > shared.node.index and node.side_effects:
                return f"is made by {node.name}, whose side effect would come too early"
            reads = [x for x in (swap.reads if swap else node.inputs) if x not in seen]
            stack += reads
            seen.update(reads)
        return None


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective as kind, axes and the layout of its value on the dot's side."""

    kind: str
    axis_names: tuple[str, ...]
    layout: Layout


def read_exchange(node: Node, names: tuple[str, ...], ranks: int, *, into: bool) -> Exchange:
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
    return Exchange(kind, names, Layout.of(shape, moved))


def make(
    node: Node,
    dot: Node,
    gone: Sequence[Node],
    exchange: Exchange,
    spelt: Letters,
    side: str,
    operands: Sequence[Operand],
) -> Swap:
    """The operator in the place of ``dot`` and the collective ``node``; ``gone`` goes with them."""
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
        result=gone[-1].outputs[0],
        spec=spec,
        axis_names=exchange.axis_names,
        out_dtype=jnp.dtype(dot.outputs[0].aval.dtype),
        lhs=operands[0],
        rhs=operands[1],
        shape=dot.outputs[0].aval.shape,
    )


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


def unmovable_cast(old: Value, new: Value, *, widens: str) -> str | None:
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


def reshaper(shape: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda x: x.reshape(shape)


def caster(dtype: jnp.dtype) -> Callable[[Any], Any]:
    return lambda x: x.astype(dtype)
