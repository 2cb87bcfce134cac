"""Dots outside ``shard_map``, where no collective is written.

On explicit mesh axes types say how operands and result are sharded. A collective is implied by a
dot whose contracted dimension is sharded, by the ``out_sharding`` asked of it, or by a ``reshard``
of its operand. On auto axes the partitioner settles that when the program is traced; it can be made
to ask for the product of what it settled on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from syncopate_jax.errors import InputError
from syncopate_jax.importers.shardings import Derived, derive
from syncopate_jax.ops import gradients
from syncopate_jax.ops.derived import Product
from syncopate_jax.ops.explicit_axes import explicit_axes
from syncopate_jax.options import Options
from syncopate_jax.rewrite.fusable import refusal_of
from syncopate_jax.rewrite.graph import Node, Value, one_use, uses_of
from syncopate_jax.rewrite.letters import formula_of
from syncopate_jax.rewrite.swaps import unfit
from syncopate_jax.runtime import mesh as runtime_mesh

CONSTRAINT = "sharding_constraint"


@dataclass(frozen=True, slots=True, eq=False)
class TypedDot:
    """A dot and the reshardings before and after it, as one product.

    Attributes:
      dot: whose place it takes.
      result: the value that it gives.
      gone: the reshardings that it does the work of.
      product: what it is.
      operands: its operands, before the reshardings.
      specs: shardings of operands and result.
      derived: its moves.
    """

    dot: Node
    result: Value
    gone: tuple[Node, ...]
    product: Product
    operands: tuple[Value, Value]
    specs: tuple[PartitionSpec, PartitionSpec, PartitionSpec]
    derived: Derived

    def of_gradients(self) -> str:
        """What there is to say of its gradients, as ``gradients.remark`` does."""
        lhs, rhs = (value.aval.shape for value in self.operands)
        arrays = list(zip(self.specs, (lhs, rhs, self.result.aval.shape), strict=True))
        dtype = jnp.dtype(self.operands[0].aval.dtype)  # of both: no other dot is a product
        duals = zip(self.product.gradients(dtype, dtype), ((2, 1, 0), (0, 2, 1)), strict=True)
        for product, places in duals:
            specs, shapes = zip(*(arrays[place] for place in places), strict=True)
            given, mesh = shapes[:2], dict(self.derived.mesh)
            found = derive(product.formula, *specs, shapes=given, mesh=mesh)
            if found.fused is None:
                continue
            if said := _of_dtypes(self.product, dtype):
                return said
            dtypes = (jnp.promote_types(dtype, self.product.out_dtype), dtype)
            if reason := refusal_of(found, given, dtypes, product.options):
                return f"one is refused: {reason}"
        return ""


def match_typed(dot: Node, options: Options, gone: Collection[Node] = ()) -> TypedDot | str | None:
    """The product that a dot is, or why none does it; None if it needs no communication.

    ``gone`` are reshardings that other products do the work of.
    """
    out = dot.outputs[0]
    mesh = out.aval.sharding.mesh
    axes = () if mesh.empty or mesh.manual_axes else explicit_axes(mesh)
    if not axes:
        return None
    before = [None if value.node in gone else _before(value) for value in dot.inputs]
    operands = (before[0] or dot.inputs[0], before[1] or dot.inputs[1])
    shapes = (operands[0].aval.shape, operands[1].aval.shape)
    formula = formula_of(dot)
    specs = (_spec(operands[0]), _spec(operands[1]), _spec(out))
    sizes = {name: mesh.shape[name] for name in axes}
    after = _after(out)
    try:
        derived = derive(formula, *specs, shapes=shapes, mesh=sizes)
        if after is not None:
            # Sums that are scattered at once, and not summed onto all first, send half.
            further = derive(formula, *specs[:2], _spec(after), shapes=shapes, mesh=sizes)
            if derived.after and further.elements_sent < derived.elements_sent:
                derived, out, specs = further, after, (*specs[:2], _spec(after))
    except InputError as error:
        return f"its shardings are not understood: {error}"
    if not derived.communicates:
        return None
    if derived.fused is None:
        return f"nothing overlaps what it needs: {derived}"
    if reason := unfit(dot):
        return reason
    dtype = jnp.dtype(out.aval.dtype)
    dtypes = (jnp.dtype(operands[0].aval.dtype), dtype)
    if reason := refusal_of(derived, shapes, dtypes, options):
        return reason
    taken = tuple(
        value.node
        for value, found in zip(dot.inputs, before, strict=True)
        if found is not None and value.node is not None
    )
    if out is after and out.node is not None:
        taken = (*taken, out.node)
    return TypedDot(dot, out, taken, Product(formula, options, dtype), operands, specs, derived)


@dataclass(frozen=True, slots=True, eq=False)
class AskedDot:
    """A dot that the partitioner of auto mesh axes asks for.

    Attributes:
      product: what it is.
      tied: whether shardings of operands and result spread to each other.
      operands: its operands, before constraints that a result constrained itself makes idle.
      gone: these constraints.
    """

    product: Product
    tied: bool
    operands: tuple[Value, ...]
    gone: tuple[Node, ...]

    def of_gradients(self) -> str:
        """What dtypes say of its gradients; what is moved for them is settled later."""
        return _of_dtypes(self.product, jnp.dtype(self.operands[0].aval.dtype))


def match_auto(dot: Node, options: Options) -> AskedDot | str | None:
    """What the partitioner of auto mesh axes can ask for; None where there are no such axes."""
    out = dot.outputs[0]
    mesh = out.aval.sharding.mesh
    if mesh.empty or mesh.manual_axes or explicit_axes(mesh) or mesh.size == 1:
        return None
    if reason := unfit(dot):
        return reason
    if options.backend not in ("auto", "xla") and runtime_mesh.platform() == "cpu":
        return f"backend {options.backend} is interpreted on the CPU, where no partitioner asks"
    product = Product(formula_of(dot), options, jnp.dtype(out.aval.dtype))
    user = None if one_use(out) else out.uses[0]
    settled = user is not None and user.name == CONSTRAINT
    before = [value.node for value in dot.inputs if settled and _constrained(value)]
    gone = tuple(node for node in before if node is not None)
    operands = tuple(v.node.inputs[0] if v.node in gone else v for v in dot.inputs)
    return AskedDot(product, not gone, operands, gone)


def _of_dtypes(product: Product, dtype: jnp.dtype) -> str:
    """Why ``xla`` computes the gradients of a product of ``dtype``; empty if it need not."""
    return gradients.unfused(product.options, product.out_dtype, dtype) or ""


def _constrained(value: Value) -> bool:
    """Whether a value is another one, constrained for its one reader."""
    return value.node is not None and value.node.name == CONSTRAINT and one_use(value) is None


def _before(value: Value) -> Value | None:
    """What an operand was before it was resharded for this dot alone; None if it was not."""
    node = value.node
    if node is None or node.name != "reshard" or one_use(value):
        return None
    source: Value = node.inputs[0]
    same_mesh: bool = source.aval.sharding.mesh == value.aval.sharding.mesh
    return source if same_mesh else None


def _after(value: Value) -> Value | None:
    """What a result is after it is resharded, if nothing else reads it; None if it is not."""
    node = None if one_use(value) else value.uses[0]
    if node is None or node.name != "reshard":
        return None
    result: Value = node.outputs[0]
    return result if result.aval.sharding.mesh == value.aval.sharding.mesh else None


def left_reshard(node: Node) -> str | None:
    """Why a ``reshard`` that no product does the work of is left; None if it sends nothing."""
    value = node.inputs[0]
    mesh = value.aval.sharding.mesh
    if mesh.empty or mesh.manual_axes or mesh != node.outputs[0].aval.sharding.mesh:
        return None
    ndim = value.aval.ndim
    before, after = (_entries(_spec(v), ndim) for v in (value, node.outputs[0]))
    if all(own == new[: len(own)] for own, new in zip(before, after, strict=True)):
        return None
    if reason := one_use(node.outputs[0]):
        return f"its result must be read by one dot alone, but {reason}"
    return f"its result is not read by a dot that takes it over; {uses_of(node.outputs[0])}"


def _entries(spec: Any, ndim: int) -> list[tuple[str, ...]]:
    padded = (*spec, *(None,) * ndim)[:ndim]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in padded]


def _spec(value: Value) -> Any:
    return value.aval.sharding.spec
