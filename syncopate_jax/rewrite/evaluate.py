"""Running a traced program with its pairs swapped for operators, and all else as it was."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from syncopate_jax.ops import auto_axes, explicit_axes, kept
from syncopate_jax.ops.contraction import contract
from syncopate_jax.ops.derived import contraction_of
from syncopate_jax.ops.gradients import remark
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options
from syncopate_jax.rewrite import equal, rings
from syncopate_jax.rewrite import graph as graphs
from syncopate_jax.rewrite.fusable import refusal
from syncopate_jax.rewrite.graph import COLLECTIVES, Graph, Node, Value, varying
from syncopate_jax.rewrite.pairs import match
from syncopate_jax.rewrite.report import ON_AUTO_AXES, Asked, Left, Replaced, Report
from syncopate_jax.rewrite.steps import Step
from syncopate_jax.rewrite.swaps import Operand, Place, Swap, Taken
from syncopate_jax.rewrite.typed_dots import (
    AskedDot,
    TypedDot,
    left_reshard,
    match_auto,
    match_typed,
)
from syncopate_jax.runtime import custom_call

OPAQUE = ("custom_jvp_call", "custom_linear_solve")
"""Calls with a gradient rule of their own, which a change inside would leave behind."""

Function = Callable[..., list[Any]]
Known = dict[Value, Any]
Problem = tuple[
    Contraction,
    tuple[tuple[int, ...], tuple[int, ...]],
    int,
    tuple[jnp.dtype, jnp.dtype],
    tuple[str, ...],
]
Numbers = Mapping[str, Any]
"""Known integers on every rank of each mesh axis, as in ``rings.Rings``."""


@dataclass(eq=False, slots=True)
class Rewriter:
    """Rewrites jaxprs, nested ones first, and keeps the account of what it did.

    Attributes:
      options: of the operators.
      auto_axes: whether the partitioner of auto mesh axes shall ask for dots.
      traced: rewritten bodies of ``jit``, by what they were, for the next call: the same body is
        compiled once.
      asks_of_gradients: whether the account shall say what becomes of gradients, which takes as
        long as to build them.
      replaced, left: the account.
      why: of the body being read and those around it, as in ``rings.Rings``.
      results: which results of the body just read are known integers.
      numbers: the same of all ``shard_map`` so far, by value, mesh and sharding.
    """

    options: Options
    auto_axes: bool
    traced: dict[Any, Any] = field(default_factory=dict)
    asks_of_gradients: bool = False
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)
    results: list[Numbers] = field(default_factory=list)
    numbers: dict[tuple[Value, Any, Any], Numbers] = field(default_factory=dict)

    def report(self) -> Report:
        return Report(tuple(self.replaced), tuple(self.left), tuple(self.asked))

    def rewrite(
        self, jaxpr: Any, place: Place | None, numbers: Mapping[int, Numbers] | None = None
    ) -> Function | None:
        """A function of the jaxpr's inputs that does the same; None if nothing was replaced.

        ``place`` is None outside ``shard_map``; ``numbers`` are inputs that are known integers.
        """
        program = graphs.read(jaxpr, inline=place is not None)
        taken = Taken()
        typed: dict[Node, TypedDot] = {}
        asked: dict[Node, AskedDot] = {}
        inner: dict[Node, Callable[..., list[Any]]] = {}
        outside = self.why
        made: Mapping[Value, Numbers] = {}
        if place is not None:
            given = {program.inputs[i]: known for i, known in (numbers or {}).items()}
            made = self._rings(program, place, taken, given)
        for node in program.nodes:
            if node in taken.gone:
                continue
            if place is not None and node.name in COLLECTIVES:
                self._pair(node, program, place, taken)
            elif place is None and node.name == "dot_general":
                self._typed(node, typed, taken.gone)
                self._ask(node, asked, taken.gone)
            elif graphs.bodies(node) and (run := self._enter(node, place)) is not None:
                inner[node] = run
        self.why = outside
        self.results = [made.get(value, {}) for value in program.outputs]
        for node in program.nodes if place is None else ():
            if node.name == "reshard" and node not in taken.gone and (r := left_reshard(node)):
                self.left.append(Left(node.name, r, node.source))
        if not taken.made and not typed and not asked and not inner:
            return None
        return _Program(program, taken, typed, asked, inner, self.options).run

    def _rings(
        self, program: Graph, place: Place, taken: Taken, given: Mapping[Value, Numbers]
    ) -> Mapping[Value, Numbers]:
        found = rings.find(program, place, lambda swap: self._unfusable(swap, place), given)
        self.why = {**found.why, **self.why}
        for swap in found.found:
            self._take(swap, place, taken)
        taken.gone |= found.gone
        taken.rebuilt |= {one.value: one for one in found.rebuilt}
        return found.numbers

    def _pair(self, node: Node, program: Graph, place: Place, taken: Taken) -> None:
        if node.name == "ppermute":
            self.left.append(Left(node.name, rings.reason(node, self.why), node.source))
            return
        joined = equal.join(node, program, taken)
        found = self._match(node, place, taken)
        if isinstance(found, str) and joined.nodes:  # each by itself, then
            joined.undo(taken)
            joined = equal.NONE
            found = self._match(node, place, taken)
        if isinstance(found, str):
            self.left.append(Left(node.name, found, node.source))
            return
        self._take(found, place, taken, tuple(x.source for x in joined.nodes))

    def _match(self, node: Node, place: Place, taken: Taken) -> Swap | str:
        found = match(node, place, taken)
        reason = self._unfusable(found, place) if isinstance(found, Swap) else None
        return reason or found

    def _take(self, swap: Swap, place: Place, taken: Taken, equals: tuple[str, ...] = ()) -> None:
        taken.add(swap)
        node, readers = swap.collective, swap.kept.readers if swap.kept else ()
        said = self._of_gradients(swap, place) if self.asks_of_gradients else ""
        sources = (node.source, swap.dot.source)
        self.replaced.append(
            Replaced(node.name, swap.spec, swap.axis_names, *sources, readers, said, equals)
        )

    def _typed(self, node: Node, typed: dict[Node, TypedDot], gone: set[Node]) -> None:
        found = match_typed(node, self.options, gone)
        if isinstance(found, str):
            self.left.append(Left(node.name, found, node.source))
        elif found is not None:
            typed[node] = found
            gone.update(found.gone)
            move = found.derived.fused
            assert move is not None
            spec = contraction_of(found.derived)
            written = next((x for x in found.gone if x.index < node.index), node)
            said = found.of_gradients() if self.asks_of_gradients else ""
            sources = (written.source, node.source)
            self.replaced.append(
                Replaced(written.name, spec, move.axis_names, *sources, gradients=said)
            )

    def _ask(self, node: Node, asked: dict[Node, AskedDot], gone: set[Node]) -> None:
        found = match_auto(node, self.options)
        if isinstance(found, AskedDot) and not self.auto_axes:
            found = ON_AUTO_AXES
        if isinstance(found, str):
            self.left.append(Left(node.name, found, node.source))
        elif found is not None:
            asked[node] = found
            gone.update(found.gone)
            self.asked.append(Asked(found.product.formula, node.source, found.of_gradients()))

    def _unfusable(self, swap: Swap, place: Place) -> str | None:
        """Why the backend that was asked for cannot do what ``xla`` could; None if it can."""
        if self.options.backend not in ("auto", "xla") and place.automatic:
            axes = ", ".join(place.automatic)
            return f"a fused launch spans all devices, and shard_map left {axes} to the compiler"
        if swap.kept and (reason := kept.refusal(swap.spec, self.options)):
            return f"others read its result too ({', '.join(swap.kept.readers)}), and {reason}"
        return refusal(*_problem(swap, place), self.options)

    def _of_gradients(self, swap: Swap, place: Place) -> str:
        if swap.kept and self.options.backend not in ("auto", "xla"):
            return "xla computes them, with what was kept"
        return remark(*_problem(swap, place), self.options)

    def _enter(self, node: Node, place: Place | None) -> Function | None:
        """An operation whose bodies were rewritten; None if nothing in them was replaced."""
        if node.name in OPAQUE:
            reason = f"it is inside a {node.name}, whose gradient is a rule of its own"
            self._leave(node, place, reason)
            return None
        if node.name == "shard_map":
            return self._shard_map(node, place)
        if node.name == "custom_vjp_call":
            return self._custom_vjp(node, place)
        runs = {
            name: [(self.rewrite(jaxpr, place), jaxpr) for jaxpr in jaxprs]
            for name, jaxprs in graphs.bodies(node).items()
        }
        if all(run is None for pairs in runs.values() for run, _ in pairs):
            return None

        def bind(*args: Any) -> list[Any]:
            # Only now: bodies are traced where their mesh axes are bound.
            changed = {}
            for name, pairs in runs.items():
                new = tuple(j if run is None else self._retrace(run, j, place) for run, j in pairs)
                changed[name] = new if isinstance(node.params[name], tuple) else new[0]
            return node.bind(args, changed)

        return bind

    def _retrace(self, run: Function, jaxpr: Any, place: Place | None) -> Any:
        """The rewritten body as a jaxpr."""
        if place is not None:
            return graphs.retrace(run, jaxpr)
        if jaxpr not in self.traced:
            self.traced[jaxpr] = graphs.retrace(run, jaxpr)
        return self.traced[jaxpr]

    def _custom_vjp(self, node: Node, place: Place | None) -> Function | None:
        """The function and its forward rule rewritten; its backward rule runs as it was written."""
        jaxpr = node.params["call_jaxpr"]
        if node.is_own:
            self._leave(node, place, "it is inside an operator of this package", node.source)
            return None
        run = self.rewrite(jaxpr, place)
        if run is None:
            return None

        def forward(jaxpr: Any) -> Any:
            again = Rewriter(self.options, self.auto_axes)  # the account is the function's
            run = again.rewrite(jaxpr, place)
            return jaxpr if run is None else graphs.retrace(run, jaxpr)

        def bind(*args: Any) -> list[Any]:
            rule = graphs.changed_forward_rule(node, forward)
            return node.bind(args, {"call_jaxpr": self._retrace(run, jaxpr, place), **rule})

        return bind

    def _leave(self, node: Node, place: Place | None, reason: str, source: str = "") -> None:
        """Accounts for the collectives in a call that is not entered; all at ``source``, if any."""
        for jaxprs in graphs.bodies(node).values():
            for jaxpr in jaxprs:
                for found in graphs.read(jaxpr, inline=True).nodes:
                    if place is None and found.name == "dot_general":
                        implied = match_typed(found, self.options), match_auto(found, self.options)
                        if any(one is not None for one in implied):
                            self.left.append(Left(found.name, reason, source or found.source))
                    elif place is not None and found.name in COLLECTIVES:
                        self.left.append(Left(found.name, reason, source or found.source))
                    self._leave(found, place, reason, source)

    def _shard_map(self, node: Node, outer: Place | None) -> Function | None:
        params = node.params
        mesh, manual = params["mesh"], params["newly_manual_axes"]

        def bound(fn: Callable[[], Any]) -> Any:
            found: list[Any] = []

            def call() -> tuple[()]:
                found.append(fn())
                return ()

            mapped = jax.shard_map(
                call,
                mesh=mesh,
                in_specs=(),
                out_specs=(),
                axis_names=set(manual),
                check_vma=params["check_vma"],
            )
            trace = functools.partial(jax.eval_shape, mapped)
            _ = trace() if outer is None else outer.bound(trace)
            return found[0]

        place = _place(mesh, {*manual, *mesh.manual_axes}, params["check_vma"], bound)
        # What a forward pass leaves for the backward pass is the same array on every rank there.
        given = {
            i: self.numbers[value, mesh, spec]
            for i, (value, spec) in enumerate(zip(node.inputs, params["in_specs"], strict=True))
            if (value, mesh, spec) in self.numbers
        }
        run = self.rewrite(params["jaxpr"], place, given)
        for value, spec, known in zip(node.outputs, params["out_specs"], self.results, strict=True):
            self.numbers[value, mesh, spec] = known
        if run is None:
            return None
        mapped = jax.shard_map(
            lambda *args: tuple(run(*args)),
            mesh=mesh,
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(manual),
            check_vma=params["check_vma"],
        )
        return lambda *args: list(mapped(*args))


def _problem(swap: Swap, place: Place) -> Problem:
    """Operator, shapes of local operands, ranks, dtypes of operands and result, and axes."""
    shapes = (swap.lhs.shape, swap.rhs.shape)
    ranks = math.prod(place.sizes[name] for name in swap.axis_names)
    dtypes = (jnp.dtype(swap.dot.inputs[0].aval.dtype), swap.out_dtype)
    return swap.spec, shapes, ranks, dtypes, swap.axis_names


def surrounding_place() -> Place | None:
    """Where the caller is traced: None outside ``shard_map``."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return None
    return _place(mesh, set(mesh.manual_axes), custom_call.tracks_varying_axes(), lambda fn: fn())


def _place(
    mesh: Any, manual: set[str], tracked: bool, bound: Callable[[Callable[[], Any]], Any]
) -> Place:
    sizes = dict(mesh.shape)
    automatic = tuple(sorted(x for x in sizes if x not in manual and sizes[x] > 1))
    return Place(sizes, automatic, tracked, bound)


@dataclass(eq=False, slots=True)
class _Program:
    graph: Graph
    taken: Taken
    typed: dict[Node, TypedDot]
    asked: dict[Node, AskedDot]
    inner: dict[Node, Function]
    options: Options

    def run(self, *args: Any) -> list[Any]:
        known = dict(zip(self.graph.inputs, args, strict=True))
        for node in self.graph.nodes:
            made = node.outputs and all(out in known for out in node.outputs)
            if node not in self.taken.gone and not made:
                self._make(node, known)
        self._need(self.graph.outputs, known)
        return [_look(value, known) for value in self.graph.outputs]

    def _need(self, values: Sequence[Value], known: Known) -> None:
        """Makes values, and first what they are made of.

        An operator that keeps what it gathers may stand before operations that its other operand
        comes from.
        """
        stack = list(values)
        while stack:
            value = stack[-1]
            if value in known or self._is_given(value):
                stack.pop()
                continue
            missing = [x for x in self._reads(value) if x not in known and not self._is_given(x)]
            if missing:
                stack += missing
                continue
            if value in self.taken.made:
                known.update(self._operator(self.taken.made[value], known))
            elif value in self.taken.rebuilt:
                one = self.taken.rebuilt[value]
                known[value] = _typed(one.apply(*(_look(x, known) for x in one.reads)), value)
            elif value.node is not None:
                self._run(value.node, known)
            # Else it would be made for ever.
            assert value in known, f"what makes {value.aval} was taken for another value"

    def _is_given(self, value: Value) -> bool:
        """Whether nothing makes a value: inputs and constants."""
        return value.node is None and value not in self.taken.rebuilt

    def _reads(self, value: Value) -> Sequence[Value]:
        """What must be known before the value can be made."""
        if value in self.taken.made:
            return self.taken.made[value].reads
        if value in self.taken.rebuilt:
            return self.taken.rebuilt[value].reads
        assert value.node is not None
        return self._operands(value.node)

    def _operands(self, node: Node) -> Sequence[Value]:
        found = self.typed.get(node) or self.asked.get(node)
        return found.operands if found else node.inputs

    def _make(self, node: Node, known: Known) -> None:
        self._need(self._operands(node), known)
        self._run(node, known)

    def _run(self, node: Node, known: Known) -> None:
        """An operation of the program whose operands are known."""
        if node in self.typed:
            found = self.typed[node]
            with node.context():
                x, w = (_look(value, known) for value in found.operands)
                known[found.result] = explicit_axes.product(found.product, *found.specs, x, w)
            return
        if node in self.asked:
            dot = self.asked[node]
            with node.context():
                x, w = (_look(value, known) for value in dot.operands)
                known[node.outputs[0]] = auto_axes.product(dot.product, dot.tied, x, w)
            return
        args = [_look(value, known) for value in node.inputs]
        outs = self.inner[node](*args) if node in self.inner else node.bind(args)
        known.update(zip(node.outputs, outs, strict=True))

    def _operator(self, swap: Swap, known: Known) -> Known:
        """What the operator makes: its result, and what it keeps."""

        def take(x: Any, steps: Sequence[Step]) -> Any:
            for step in steps:
                x = step.apply(x, *(_look(value, known) for value in step.others))
            return x

        def operand(of: Operand) -> jax.Array:
            x: jax.Array = take(_look(of.value, known), of.steps)
            return x.reshape(of.shape)

        with swap.collective.context():
            given = (swap.spec, operand(swap.lhs), operand(swap.rhs), swap.axis_names, self.options)
            if swap.kept is None:
                x = contract(*given, swap.out_dtype)
                return {swap.result: _typed(take(x.reshape(swap.shape), swap.steps), swap.result)}
            x, whole = kept.contract_and_keep(*given, swap.out_dtype)
            return {
                swap.result: _typed(take(x.reshape(swap.shape), swap.steps), swap.result),
                swap.kept.value: _typed(take(whole, swap.kept.undo), swap.kept.value),
            }


def _look(value: Value, known: Known) -> Any:
    return known.get(value, value.known)


def _typed(x: jax.Array, out: Value) -> jax.Array:
    """``x`` varying over the axes that the program's own value varies over."""
    if not custom_call.tracks_varying_axes():
        return x
    missing = varying(out) - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x
