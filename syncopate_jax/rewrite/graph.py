"""A jaxpr as a graph whose values know their uses, with small calls written out in place.

Private parts of JAX in use, read at 0.11.2 and 0.12.0.1, all of them in this file: the source
lines and name stack of an equation (``source_info_util``), the effect of talking along a mesh axis
(``core.NamedAxisEffect``) and the context that an equation was
traced in (``JaxprEqn.ctx``), which ``jax.extend.core`` shows but does not let one restore,
``ft_in`` of a ``scan``, the tree of its arguments, ``fwd_jaxpr_thunk`` of a
``custom_vjp_call``, its forward rule, and ``jvp_jaxpr_fun`` of a ``custom_jvp_call``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax._src import core as jax_core
from jax._src import source_info_util as jax_source
from jax.extend import core as extend_core
from jax.extend import linear_util

from syncopate_jax.rewrite import operations

COLLECTIVES = (
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "all_to_all",
    "pmax",
    "pmin",
    "ppermute",
    "psum",
    "psum_invariant",
    "ragged_all_to_all",
    "reduce_scatter",
    "unreduced_psum",
    "unreduced_reduce_scatter",
)

OWN_OPERATIONS = ("fused_call", "reverse_only", "reverse_only_tangent")
OWN_FILES = str(Path(__file__).parents[1] / "ops") + os.sep


@dataclass(eq=False, slots=True)
class Value:
    """One value of a program.

    Attributes:
      aval: its type.
      node: what computes it; None for inputs and constants.
      known: what a constant or literal is; None for others.
      uses: the nodes that read it, once a reading; None stands for the program's own results.
    """

    aval: Any
    node: Node | None = None
    known: Any = None
    uses: list[Node | None] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Node:
    """One operation of a program, with the equation it came from.

    Attributes:
      eqn: the equation.
      inputs, outputs: what it reads and makes.
      index: its place in the program.
    """

    eqn: Any
    inputs: list[Value]
    outputs: list[Value]
    index: int

    @property
    def name(self) -> str:
        return str(self.eqn.primitive.name)

    @property
    def params(self) -> Mapping[str, Any]:
        return self.eqn.params

    @property
    def side_effects(self) -> bool:
        """Whether it does more than give results and talk to other ranks."""
        return any(not isinstance(e, jax_core.NamedAxisEffect) for e in self.eqn.effects)

    @property
    def marks(self) -> tuple[Any, ...]:
        """What the program said of the operation by contexts around it."""
        return self.eqn.ctx.compute_type, self.eqn.ctx.xla_metadata

    @property
    def is_own(self) -> bool:
        """Whether it is, or is part of, an operator of this package."""
        if self.name != "custom_vjp_call":
            return self.name in OWN_OPERATIONS
        written = self.params["call_jaxpr"].debug_info.func_filename  # objects have none
        return (written or "").startswith(OWN_FILES)

    @property
    def title(self) -> str:
        """What messages call it."""
        return "an operator of this package" if self.is_own else self.name

    @property
    def source(self) -> str:
        """Where the user wrote it, ``file:line (function)``; of an operator, where it is called."""
        frames = tuple(jax_source.user_frames(self.eqn.source_info.traceback))
        if not frames:
            return "unknown place"
        calls = (frame for frame in frames if not frame.file_name.startswith(OWN_FILES))
        frame = next(calls, frames[0])
        return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"

    def bind(self, args: Sequence[Any], changed: Mapping[str, Any] | None = None) -> list[Any]:
        """The operation on other arguments, with some of its parameters changed."""
        primitive = self.eqn.primitive
        params = primitive.get_bind_params({**self.params, **(changed or {})})
        with self.context():
            outs = primitive.bind(*args, **params)
        return list(outs) if primitive.multiple_results else [outs]

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """What is traced inside gets the source line, name and context of this operation."""
        info = self.eqn.source_info
        stack = jax_source.current_name_stack() + info.name_stack
        with jax_source.user_context(info.traceback, name_stack=stack), self.eqn.ctx.manager:
            yield


@dataclass(eq=False, slots=True)
class Graph:
    """A jaxpr's inputs, operations in order, and results."""

    inputs: list[Value]
    nodes: list[Node]
    outputs: list[Value]


def read(jaxpr: Any, *, inline: bool) -> Graph:
    """The graph of a jaxpr; ``inline`` writes out calls of ``jit`` that hold dots or collectives.

    Pairs are often split by such calls, because ``jnp.einsum`` is one. So are those of several
    shapes or results, as ``jnp.where`` is of a mask: what varies along what, their operations tell.
    """
    inputs = [Value(v.aval) for v in jaxpr.invars]
    nodes: list[Node] = []
    outputs = _read(jaxpr, inputs, nodes, inline)
    for node in nodes:
        for value in node.inputs:
            value.uses.append(node)
    for value in outputs:
        value.uses.append(None)
    return Graph(inputs, nodes, outputs)


def _read(jaxpr: Any, inputs: Sequence[Value], nodes: list[Node], inline: bool) -> list[Value]:
    constants = [Value(v.aval, known=c) for v, c in zip(jaxpr.constvars, jaxpr.consts, strict=True)]
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))

    def look(atom: Any) -> Value:
        if isinstance(atom, extend_core.Literal):
            return Value(atom.aval, known=atom.val)
        return env[atom]

    for eqn in jaxpr.eqns:
        args = [look(atom) for atom in eqn.invars]
        if inline and _worth_inlining(eqn):
            outs = _read(eqn.params["jaxpr"], args, nodes, inline)
        else:
            node = Node(eqn, args, [Value(v.aval) for v in eqn.outvars], len(nodes))
            for value in node.outputs:
                value.node = node
            nodes.append(node)
            outs = node.outputs
        env.update(zip(eqn.outvars, outs, strict=True))
    return [look(atom) for atom in jaxpr.outvars]


def _worth_inlining(eqn: Any) -> bool:
    if eqn.primitive.name != "jit" or eqn.params["compiler_options_kvs"]:
        return False
    return _is_mixed(eqn) or any(
        inner.primitive.name in ("dot_general", *COLLECTIVES) or _worth_inlining(inner)
        for inner in eqn.params["jaxpr"].eqns
    )


def _is_mixed(eqn: Any) -> bool:
    """Whether a call of ``jit`` is elementwise, but for the shapes of its arguments and results."""
    shapes = {atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)} - {()}
    return (len(shapes) > 1 or len(eqn.outvars) > 1) and _is_elementwise(eqn)


def _is_elementwise(eqn: Any) -> bool:
    if eqn.primitive.name == "jit":
        return all(_is_elementwise(inner) for inner in eqn.params["jaxpr"].eqns)
    return eqn.primitive.name in _ELEMENTWISE


_ELEMENTWISE = operations.ELEMENTWISE | operations.RESHAPES | operations.CASTS | {"transpose"}


def one_use(value: Value) -> str | None:
    """None if one operation reads the value once; else what reads it, as a reason."""
    if len(value.uses) == 1 and value.uses[0] is not None:
        return None
    return "nothing reads it" if not value.uses else uses_of(value)


def uses_of(value: Value) -> str:
    """What reads a value, in words."""
    readers = ", ".join(
        "the result of the function" if user is None else user.title for user in value.uses
    )
    times = "once" if len(value.uses) == 1 else f"{len(value.uses)} times"
    return f"it is used {times}: {readers}"


def bodies(node: Node) -> dict[str, tuple[Any, ...]]:
    """The jaxprs among an operation's parameters."""
    found = {}
    for name, value in node.params.items():
        items = value if isinstance(value, tuple) else (value,)
        if items and all(isinstance(item, extend_core.Jaxpr) for item in items):
            found[name] = items
    return found


def scan_arguments(node: Node) -> tuple[int, int]:
    """How many of a ``scan``'s arguments are constants, and how many are carried."""
    constants, carried, _ = node.params["ft_in"].unpack()
    return len(constants), len(carried)


def retrace(fn: Callable[..., list[Any]], jaxpr: Any) -> Any:
    """``fn`` as a jaxpr that can stand where ``jaxpr`` stood."""
    return jax.make_jaxpr(fn)(*jaxpr.in_avals)


def changed_forward_rule(node: Node, change: Callable[[Any], Any]) -> dict[str, Any]:
    """A ``custom_vjp_call``'s parameters that make ``change`` of its forward rule's jaxpr.

    The rule is traced when the call is differentiated, for the arguments that take part in that.
    """
    original = node.params["fwd_jaxpr_thunk"]

    def rule(*taking_part: bool) -> tuple[Any, Any]:
        jaxpr, constants = original.call_wrapped(*taking_part)
        avals = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]

        def run(*args: Any) -> list[Any]:
            found: list[Any] = jax_core.eval_jaxpr(jaxpr, constants, *args)
            return found

        changed = change(jax.make_jaxpr(run)(*avals[len(constants) :]))
        return changed, changed.consts

    return {"fwd_jaxpr_thunk": linear_util.wrap_init(rule, debug_info=original.debug_info)}


def jvp_rule(node: Node) -> tuple[Graph, Sequence[bool]] | None:
    """The derivative rule of a ``custom_jvp_call``, of its arguments and all their tangents.

    It gives all results, then the tangents of those that are not said to be zero. None for a rule
    that closes over arrays. To be called where the mesh axes of the call are bound.
    """
    rule = node.params["jvp_jaxpr_fun"]
    try:
        jaxpr, constants, zeros = rule.call_wrapped(*[False] * len(node.inputs))
    except jax.errors.UnexpectedTracerError:  # of the function around, which has been traced
        return None
    return None if constants or jaxpr.constvars else (read(jaxpr, inline=False), zeros)


def varying(value: Value) -> frozenset[str]:
    """Mesh axes along which a value differs, as far as ``shard_map`` tracks them."""
    found: frozenset[str] = value.aval.manual_axis_type.varying
    return found
