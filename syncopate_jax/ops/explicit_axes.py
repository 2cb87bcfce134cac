"""A product on a mesh with explicit axes: shardings are in the types, and it is a ``shard_map``."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from syncopate_jax.importers.shardings import derive
from syncopate_jax.ops.derived import Product, run
from syncopate_jax.runtime.reverse_only import reverse_only


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """The mesh axes that types speak of."""
    return tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    )


def surrounding_mesh(*arrays: jax.Array) -> Any:
    """The mesh in use, or else that of the arrays' types."""
    mesh = jax.sharding.get_abstract_mesh()
    for array in arrays:
        if mesh.empty:
            mesh = jax.typeof(array).sharding.mesh
    return mesh


def product(
    how: Product,
    lhs: PartitionSpec,
    rhs: PartitionSpec,
    out: PartitionSpec,
    x: jax.Array,
    w: jax.Array,
) -> jax.Array:
    """``x`` and ``w``, sharded as ``lhs`` and ``rhs`` say, to a result sharded as ``out`` says.

    The gradients are such products, sharded as ``x`` and ``w``.
    """
    name = f"the product {how.formula}"
    return _product(how, lhs, rhs, out, reverse_only(x, name), reverse_only(w, name))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _product(
    how: Product,
    lhs: PartitionSpec,
    rhs: PartitionSpec,
    out: PartitionSpec,
    x: jax.Array,
    w: jax.Array,
) -> jax.Array:
    mesh = surrounding_mesh(x, w)
    # JAX 0.11 runs no shard_map outside jit that leaves axes to the partitioner.
    call = _mapped if len(explicit_axes(mesh)) == len(mesh.axis_names) else _jitted
    result: jax.Array = call(how, lhs, rhs, out, x, w)
    return result


def _mapped(
    how: Product,
    lhs: PartitionSpec,
    rhs: PartitionSpec,
    out: PartitionSpec,
    x: jax.Array,
    w: jax.Array,
) -> jax.Array:
    mesh = surrounding_mesh(x, w)
    names = explicit_axes(mesh)
    sizes = {name: mesh.shape[name] for name in names}
    derived = derive(how.formula, lhs, rhs, out, shapes=(x.shape, w.shape), mesh=sizes)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return run(derived, x, w, options=how.options, out_dtype=how.out_dtype)

    # Not tracked: a gathered result is the same on every rank, which tracking could not know.
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(lhs, rhs), out_specs=out, axis_names=set(names), check_vma=False
    )
    result: jax.Array = mapped(x, w)
    return result


_jitted = jax.jit(_mapped, static_argnums=(0, 1, 2, 3))


def _forward(
    how: Product,
    lhs: PartitionSpec,
    rhs: PartitionSpec,
    out: PartitionSpec,
    x: jax.Array,
    w: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(how, lhs, rhs, out, x, w), (x, w)


def _backward(
    how: Product,
    lhs: PartitionSpec,
    rhs: PartitionSpec,
    out: PartitionSpec,
    saved: tuple[jax.Array, jax.Array],
    ct: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    for_lhs, for_rhs = how.gradients(x.dtype, w.dtype)
    return product(for_lhs, out, rhs, lhs, ct, w), product(for_rhs, lhs, out, rhs, x, ct)


_product.defvjp(_forward, _backward)
