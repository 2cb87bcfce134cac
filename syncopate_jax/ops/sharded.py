"""Operator: a matrix product under plain ``jit``, its communication read from the shardings.

On a mesh whose axes are *explicit* (what ``jax.make_mesh`` makes), the shardings are part of the
operands' types, and the product becomes a ``shard_map`` at trace time. On *auto* axes they are
settled by the partitioner, which asks this operator for the product of what it settled on
(``jax.experimental.custom_partitioning``). Either way the moves are ``shardings.derive``'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from syncopate_jax.errors import InputError, MeshError, UnsupportedError
from syncopate_jax.ops import auto_axes, explicit_axes, fused
from syncopate_jax.ops.derived import Product
from syncopate_jax.ops.operands import check_arrays, result_dtype
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Launch, Options
from syncopate_jax.runtime import mesh as runtime_mesh

_LEADING = "abcdefghij"  # letters of x's leading dimensions


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
    launch: Launch | None = None,
) -> jax.Array:
    """``x @ w`` of sharded arrays outside ``shard_map``, its communication fused with it.

    The moves are those of ``docs/shardings.md``: a sharded operand is moved as ``out_sharding``
    needs it and no more. The gradients are such products too, sharded as the operands are.

    On a mesh with explicit and auto axes the product is a ``shard_map`` over the explicit ones, and
    XLA (of JAX 0.12) ends the process on one where an auto axis of more ranks stands before an
    explicit one in the sharding of a dimension: put the explicit axes first there.

    Args:
      x: [..., M, K].
      w: [K, N].
      out_sharding: of the result; a PartitionSpec is of the mesh in use (``jax.set_mesh``), or else
        of the operands'. By default rows are sharded as those of ``x`` and columns as
        those of ``w``, but for the axes that the rows have; on auto axes, as the partitioner
        likes. The ranks must divide the extent, but for auto axes under ``jit``.
      preferred_element_type: dtype of the result; default that of the promoted operands.
      backend, target, split, tiles, launch: as in ``syncopate_jax.options.Options``.

    Returns:
      [..., M, N].

    Raises:
      InputError: when shapes, dtypes, shardings or options do not fit; the message has the numbers.
      UnsupportedError: a fused backend on auto axes of CPU devices, where it is interpreted.
      MeshError: inside ``shard_map``, where arrays are one rank's and the other operators serve.
    """
    x, w = check_arrays("matmul", x, w)
    out_dtype = result_dtype("matmul", preferred_element_type, x, w)
    if x.shape[-1] != w.shape[0]:
        raise InputError(
            f"matmul: contracted dimensions differ: x {x.shape} gives {x.shape[-1]}, w {w.shape} "
            f"gives {w.shape[0]}"
        )
    if x.ndim - 2 > len(_LEADING):
        raise InputError(
            f"matmul: x has {x.ndim} dimensions, at most {len(_LEADING) + 2} fit; reshape the "
            f"leading ones into one"
        )
    mesh = explicit_axes.surrounding_mesh(x, w)
    if mesh.manual_axes:
        raise MeshError(
            f"matmul was called inside jax.shard_map over {', '.join(mesh.manual_axes)}, where "
            f"arrays are one rank's; use all_gather_matmul and its like there"
        )
    out_spec = _spec_of(out_sharding, mesh, x.ndim)
    options = Options(backend=backend, target=target, split=split, tiles=tiles, launch=launch)
    fused.choose_backend(Contraction("mk", "kn", "mn"), options)  # for its checks
    letters = _LEADING[: x.ndim - 2]
    how = Product(f"{letters}mk,kn->{letters}mn", options, jnp.dtype(out_dtype))
    dtype = jnp.promote_types(x.dtype, w.dtype)
    x, w = x.astype(dtype), w.astype(dtype)
    if explicit_axes.explicit_axes(mesh):
        lhs, rhs = jax.typeof(x).sharding.spec, jax.typeof(w).sharding.spec
        out = _default(lhs, rhs, x.ndim) if out_spec is None else out_spec
        how_else = "leave them out, or pad it"
        _check_even((*x.shape[:-1], w.shape[1]), NamedSharding(mesh, out), how_else)
        if not x.shape[-1]:  # a sum over nothing; XLA cannot partition operands without elements
            shape = (*x.shape[:-1], w.shape[1])
            return jnp.zeros(shape, out_dtype, out_sharding=NamedSharding(mesh, out))
        return explicit_axes.product(how, lhs, rhs, out, x, w)
    if backend not in ("auto", "xla") and runtime_mesh.platform() == "cpu":
        raise UnsupportedError(
            f"matmul: backend {backend!r} is interpreted on the CPU, where calls must keep the "
            f"program's order, and the partitioner of auto axes keeps none; use backend 'xla', or "
            f"a mesh with explicit axes"
        )
    y = auto_axes.product(how, out_sharding is None, x, w)
    if isinstance(out_sharding, PartitionSpec):  # of the operands' mesh, where none is in context
        out_sharding = NamedSharding(mesh, out_sharding)
    if out_sharding is None:
        return y
    if not isinstance(y, jax.core.Tracer):
        _check_even(y.shape, out_sharding, "call it in jax.jit, or leave them out")
    return lax.with_sharding_constraint(y, out_sharding)


def _check_even(shape: tuple[int, ...], sharding: NamedSharding, how_else: str) -> None:
    """JAX has no array whose ranks do not divide an extent, but on auto axes in ``jit``."""
    for dimension, (extent, entry) in enumerate(zip(shape, sharding.spec, strict=False)):
        names = () if entry is PartitionSpec.UNCONSTRAINED else _axes(entry)
        ranks = math.prod(sharding.mesh.shape[name] for name in names)
        if extent % ranks:
            raise InputError(
                f"matmul: out_sharding {sharding.spec} cuts dimension {dimension} of the result "
                f"{shape}, an extent of {extent} that the {ranks} ranks of {', '.join(names)} do "
                f"not divide; {how_else}"
            )


def _spec_of(
    sharding: PartitionSpec | NamedSharding | None, mesh: Any, ndim: int
) -> PartitionSpec | None:
    """The spec of a result of ``ndim`` dimensions; raises InputError where it does not fit."""
    if sharding is None:
        return None
    if not isinstance(sharding, PartitionSpec | NamedSharding):
        raise InputError(
            f"matmul: out_sharding must be a PartitionSpec or NamedSharding, found {sharding!r}"
        )
    sizes = dict(mesh.shape)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if isinstance(sharding, NamedSharding):
        own = dict(sharding.mesh.shape)
        if sizes and own != sizes:
            raise InputError(f"matmul: out_sharding is of mesh {own}, the operands are on {sizes}")
        if not explicit_axes.explicit_axes(sharding.mesh):  # whose types the operands would have
            sizes = own
    if not sizes:
        raise InputError(
            f"matmul: out_sharding is {spec}, but there is no mesh here; use jax.set_mesh, or "
            f"shard the operands"
        )
    if len(spec) > ndim:
        raise InputError(
            f"matmul: out_sharding {spec} is for {len(spec)} dimensions, the result has {ndim}"
        )
    open_entries = (None, PartitionSpec.UNCONSTRAINED)
    names = [name for entry in spec if entry not in open_entries for name in _axes(entry)]
    for name in names:
        if name not in sizes:
            raise InputError(
                f"matmul: out_sharding {spec} has {name!r}, which is no axis of the mesh; known: "
                f"{', '.join(sizes)}"
            )
        if names.count(name) > 1:
            raise InputError(f"matmul: out_sharding {spec} has mesh axis {name!r} twice")
    given = sharding.mesh if isinstance(sharding, NamedSharding) else mesh
    typed = [name for name in names if name in explicit_axes.explicit_axes(given)]
    if typed and not explicit_axes.explicit_axes(mesh):
        raise InputError(
            f"matmul: out_sharding {spec} has {typed[0]!r} of a mesh where it is explicit, the "
            f"operands are on one where it is auto; give the PartitionSpec alone"
        )
    known = explicit_axes.explicit_axes(mesh) or tuple(sizes)
    if untyped := [name for name in names if name not in known]:
        raise InputError(
            f"matmul: out_sharding {spec} has mesh axis {untyped[0]!r}, which is auto beside "
            f"explicit {', '.join(known)}; leave it out, and constrain the result along it by "
            f"jax.lax.with_sharding_constraint"
        )
    return spec


def _default(x: PartitionSpec, w: PartitionSpec, ndim: int) -> PartitionSpec:
    """Rows as in ``x``, columns as in ``w`` without the axes that rows have."""
    rows = (*x, *(None,) * ndim)[: ndim - 1]
    used = {axis for entry in rows for axis in _axes(entry)}
    columns = tuple(axis for axis in _axes((*w, None, None)[1]) if axis not in used)
    return PartitionSpec(*rows, columns or None)


def _axes(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else tuple(entry) if isinstance(entry, tuple) else (entry,)
