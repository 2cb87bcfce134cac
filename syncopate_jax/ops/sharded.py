"""Operator: a matrix product under plain ``jit``, its communication read from the shardings.

On a mesh whose axes are *explicit* (what ``jax.make_mesh`` makes), the shardings are part of the
operands' types, and the product becomes a ``shard_map`` at trace time. On *auto* axes they are
settled by the partitioner, which asks this operator for the product of what it settled on
(``jax.experimental.custom_partitioning``). Either way the moves are ``shardings.derive``'s.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from syncopate_jax.backends import xla
from syncopate_jax.errors import InputError, MeshError
from syncopate_jax.importers.resharding import Move
from syncopate_jax.importers.shardings import Derived, derive
from syncopate_jax.ops.contraction import contract
from syncopate_jax.ops.operands import check_arrays, result_dtype
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options


def run(
    derived: Derived,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    options: Options,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """A sharded contraction on one rank's arrays, where its mesh axes are bound."""
    arrays = {"lhs": lhs, "rhs": rhs}
    for move in derived.before:
        if move is not derived.fused:
            arrays[move.place] = _move(arrays[move.place], move, derived)
    fused = derived.fused
    spec = Contraction(derived.lhs, derived.rhs, derived.out)
    axis_names: tuple[str, ...] = ()
    if fused is not None:
        axis_names = fused.axis_names
        spec = Contraction(
            derived.lhs,
            derived.rhs,
            derived.out,
            fused.kind,
            fused.place,
            gather=fused.gather,
            scatter=fused.scatter,
        )
    out = contract(spec, arrays["lhs"], arrays["rhs"], axis_names, options, out_dtype)
    for move in derived.after:
        if move is not fused:
            out = _move(out, move, derived)
    return out


def _move(x: jax.Array, move: Move, derived: Derived) -> jax.Array:
    """A move on its own."""
    letters = derived.letters(move.place)
    gather = letters.index(move.gather) if move.gather else -1
    scatter = letters.index(move.scatter) if move.scatter else -1
    if move.kind == "slice":
        size = x.shape[scatter] // lax.axis_size(move.axis_names)
        at = lax.axis_index(move.axis_names) * size
        return lax.dynamic_slice_in_dim(x, at, size, axis=scatter)
    return xla.exchange(x, xla.Exchange(move.kind, gather, scatter), move.axis_names)


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    out_sharding: PartitionSpec | NamedSharding | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
    target: str | None = None,
    split: int | None = None,
    tiles: Mapping[str, int] | None = None,
) -> jax.Array:
    """``x @ w`` of sharded arrays outside ``shard_map``, its communication fused with it.

    The moves are those of ``docs/shardings.md``: a sharded operand is moved as ``out_sharding``
    needs it and no more. The gradients are such products too, sharded as the operands are.

    Args:
      x: [..., M, K].
      w: [K, N].
      out_sharding: of the result. By default rows are sharded as those of ``x`` and columns as
        those of ``w``, but for the axes that the rows have; on auto axes, as the partitioner
        likes.
      preferred_element_type: dtype of the result; default that of the promoted operands.
      backend, target, split, tiles: as in ``syncopate_jax.options.Options``.

    Returns:
      [..., M, N].

    Raises:
      InputError: when shapes, dtypes, shardings or options do not fit; the message has the numbers.
      MeshError: inside ``shard_map``, where arrays are one rank's and the other operators serve.
    """
    check_arrays("matmul", x, w)
    out_dtype = result_dtype("matmul", preferred_element_type, x, w)
    if x.shape[-1] != w.shape[0]:
        raise InputError(
            f"matmul: contracted dimensions differ: x {x.shape} gives {x.shape[-1]}, w {w.shape} "
            f"gives {w.shape[0]}"
        )
    mesh = _mesh(x, w)
    if mesh.manual_axes:
        raise MeshError(
            f"matmul was called inside jax.shard_map over {', '.join(mesh.manual_axes)}, where "
            f"arrays are one rank's; use all_gather_matmul and its like there"
        )
    letters = "abcdefghij"[: x.ndim - 2]
    how = _How(
        f"{letters}mk,kn->{letters}mn",
        Options(backend=backend, target=target, split=split, tiles=tiles),
        jnp.dtype(out_dtype),
    )
    dtype = jnp.promote_types(x.dtype, w.dtype)
    x, w = x.astype(dtype), w.astype(dtype)
    explicit = [a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
                if kind == AxisType.Explicit]  # fmt: skip
    if explicit:
        out = _spec_of(out_sharding)
        if out is None:
            out = _default(jax.typeof(x).sharding.spec, jax.typeof(w).sharding.spec, x.ndim)
        return _explicit(how, out, x, w)
    y = _auto(how, x, w)
    return y if out_sharding is None else lax.with_sharding_constraint(y, out_sharding)


@dataclass(frozen=True, slots=True)
class _How:
    """The static part of a product."""

    formula: str
    options: Options
    out_dtype: jnp.dtype

    def gradients(self) -> tuple[str, str]:
        """The formulas of (cotangent, rhs) -> lhs and (lhs, cotangent) -> rhs."""
        operands, out = self.formula.split("->")
        lhs, rhs = operands.split(",")
        return f"{out},{rhs}->{lhs}", f"{lhs},{out}->{rhs}"

    def of(self, formula: str, dtype: jnp.dtype) -> _How:
        return _How(formula, self.options, dtype)


def _mesh(*arrays: jax.Array) -> Any:
    """The mesh in use: the surrounding one, or that of the arrays' types."""
    mesh = jax.sharding.get_abstract_mesh()
    for array in arrays:
        if mesh.empty:
            mesh = jax.typeof(array).sharding.mesh
    return mesh


def _spec_of(sharding: PartitionSpec | NamedSharding | None) -> PartitionSpec | None:
    if sharding is None or isinstance(sharding, PartitionSpec):
        return sharding
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    raise InputError(
        f"matmul: out_sharding must be a PartitionSpec or NamedSharding, found {sharding!r}"
    )


def _default(x: PartitionSpec, w: PartitionSpec, ndim: int) -> PartitionSpec:
    """Rows as in ``x``, columns as in ``w`` without the axes that rows have."""
    rows = (*x, *(None,) * ndim)[: ndim - 1]
    used = {axis for entry in rows for axis in _axes(entry)}
    columns = tuple(axis for axis in _axes((*w, None, None)[1]) if axis not in used)
    return PartitionSpec(*rows, columns or None)


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _explicit(how: _How, out: PartitionSpec, x: jax.Array, w: jax.Array) -> jax.Array:
    """The product on a mesh with explicit axes; gradients are sharded as ``x`` and ``w``."""
    return _typed(how, jax.typeof(x).sharding.spec, jax.typeof(w).sharding.spec, out, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _typed(
    how: _How,
    lhs: PartitionSpec,
    rhs: PartitionSpec,
    out: PartitionSpec,
    x: jax.Array,
    w: jax.Array,
) -> jax.Array:
    mesh = _mesh(x, w)
    names = {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
             if kind == AxisType.Explicit}  # fmt: skip
    sizes = {name: mesh.shape[name] for name in mesh.axis_names if name in names}
    derived = derive(how.formula, lhs, rhs, out, shapes=(x.shape, w.shape), mesh=sizes)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return run(derived, x, w, options=how.options, out_dtype=how.out_dtype)

    # Not tracked: a gathered result is the same on every rank, which tracking could not know.
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(lhs, rhs), out_specs=out, axis_names=names, check_vma=False
    )
    result: jax.Array = mapped(x, w)
    return result


def _typed_forward(
    how: _How,
    lhs: PartitionSpec,
    rhs: PartitionSpec,
    out: PartitionSpec,
    x: jax.Array,
    w: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _typed(how, lhs, rhs, out, x, w), (x, w)


def _typed_backward(
    how: _How,
    lhs: PartitionSpec,
    rhs: PartitionSpec,
    out: PartitionSpec,
    saved: tuple[jax.Array, jax.Array],
    ct: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    for_lhs, for_rhs = how.gradients()
    ct = ct.astype(x.dtype)
    d_lhs = _typed(how.of(for_lhs, x.dtype), out, rhs, lhs, ct, w)
    d_rhs = _typed(how.of(for_rhs, w.dtype), lhs, out, rhs, x, ct)
    return d_lhs, d_rhs


_typed.defvjp(_typed_forward, _typed_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _auto(how: _How, x: jax.Array, w: jax.Array) -> jax.Array:
    result: jax.Array = _partitioned(how)(x, w)
    return result


def _auto_forward(
    how: _How, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _auto(how, x, w), (x, w)


def _auto_backward(
    how: _How, saved: tuple[jax.Array, jax.Array], ct: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    for_lhs, for_rhs = how.gradients()
    ct = ct.astype(x.dtype)
    return _auto(how.of(for_lhs, x.dtype), ct, w), _auto(how.of(for_rhs, w.dtype), x, ct)


_auto.defvjp(_auto_forward, _auto_backward)


@functools.cache
def _partitioned(how: _How) -> Any:
    """The product as an operation that the partitioner asks how to cut."""

    @custom_partitioning
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum(how.formula, x, w, preferred_element_type=how.out_dtype)

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        x, w = args
        derived = derive(
            how.formula,
            x.sharding.spec,
            w.sharding.spec,
            result.sharding.spec,
            shapes=(x.shape, w.shape),
            mesh=dict(mesh.shape),
        )

        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            return run(derived, x, w, options=how.options, out_dtype=how.out_dtype)

        return mesh, local, result.sharding, (x.sharding, w.sharding)

    product.def_partition(partition=partition, sharding_rule=_rule(how.formula))
    return product


def _rule(formula: str) -> str:
    """The letters as a Shardy rule."""
    operands, out = formula.split("->")
    return ", ".join(" ".join(own) for own in operands.split(",")) + " -> " + " ".join(out)
