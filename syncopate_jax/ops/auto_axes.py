"""A product on a mesh with auto axes: the partitioner settles the shardings, then asks for it."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from syncopate_jax.importers.shardings import Derived, derive
from syncopate_jax.ops.contraction import multiply
from syncopate_jax.ops.derived import Product, run
from syncopate_jax.runtime.reverse_only import reverse_only


def product(how: Product, tied: bool, x: jax.Array, w: jax.Array) -> jax.Array:
    """The product of whole arrays; its gradients are sharded as ``x`` and ``w``.

    ``tied``: shardings of the operands spread to the result and to each other; else the result's
    comes from what is done with it.
    """
    name = f"the product {how.formula}"
    return _product(how, tied, reverse_only(x, name), reverse_only(w, name))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(how: Product, tied: bool, x: jax.Array, w: jax.Array) -> jax.Array:
    result: jax.Array = _partitioned(how, tied)(x, w)
    return result


def _forward(
    how: Product, tied: bool, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(how, tied, x, w), (x, w)


def _backward(
    how: Product, _tied: bool, saved: tuple[jax.Array, jax.Array], ct: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    for_lhs, for_rhs = how.gradients(x.dtype, w.dtype)
    d_lhs, d_rhs = product(for_lhs, False, ct, w), product(for_rhs, False, x, ct)
    return _alike(d_lhs, x), _alike(d_rhs, w)


_product.defvjp(_forward, _backward)


@functools.cache
def _partitioned(how: Product, tied: bool) -> Any:
    """The product as an operation that the partitioner asks how to cut."""

    def whole_product(x: jax.Array, w: jax.Array) -> jax.Array:
        return multiply(how.formula, x, w, how.out_dtype)

    product = custom_partitioning(whole_product)

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        x, w = args
        if mesh.empty:  # no argument of the program is sharded: there are no axes to move along
            devices = sorted(result.sharding.device_set, key=lambda device: device.id)
            mesh = Mesh(np.array(devices), ("all",))
            whole = NamedSharding(mesh, PartitionSpec())
            return mesh, whole_product, whole, (whole, whole)
        specs, derived, padded = _settled(how.formula, (x, w, result), dict(mesh.shape))
        lhs, rhs, out = (NamedSharding(mesh, spec) for spec in specs)

        # The partitioner binds the axes; that all of them are manual it says to nobody.
        manual = mesh.abstract_mesh.update_axis_types(
            dict.fromkeys(mesh.axis_names, AxisType.Manual)
        )

        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            with jax.sharding.use_abstract_mesh(manual):
                x = _without_padding(x, derived.lhs, lhs.spec, padded)
                w = _without_padding(w, derived.rhs, rhs.spec, padded)
                return run(derived, x, w, options=how.options, out_dtype=how.out_dtype)

        return mesh, local, out, (lhs, rhs)

    product.def_partition(partition=partition, sharding_rule=_rule(how.formula, tied))
    batchable = custom_vmap(lambda x, w: product(x, w))

    @batchable.def_vmap
    def batch(_size: int, batched: list[bool], x: jax.Array, w: jax.Array) -> Any:
        operands, out = how.formula.split("->")
        new = next(letter for letter in string.ascii_letters if letter not in how.formula)
        lhs, rhs = (new * has + own for own, has in zip(operands.split(","), batched, strict=True))
        wider = replace(how, formula=f"{lhs},{rhs}->{new}{out}")
        return _partitioned(wider, tied)(x, w), True

    return batchable


def _settled(
    formula: str, arrays: Sequence[Any], mesh: Mapping[str, int]
) -> tuple[list[PartitionSpec], Derived, dict[str, int]]:
    """The shardings that a product is made for, its moves, and extents whose padding is summed.

    The shardings are those that the partitioner settled on. Where ranks do not divide a letter's
    extent, it pads the last blocks. Padding of a letter that is not moved stays the result's, or is
    to be zero where the letter is summed over; a letter that is moved is whole in all arrays
    instead, and so are then the others.
    """
    letters = formula.replace("->", ",").split(",")
    specs = [array.sharding.spec for array in arrays]
    ranks = math.prod(mesh.values())
    sizes: dict[str, int] = {}
    uneven: dict[str, int] = {}  # extents that any axes divide, in place of theirs
    for own, array, spec in zip(letters, arrays, specs, strict=True):
        sizes |= dict(zip(own, array.shape, strict=True))
        for letter, entry in zip(own, spec, strict=False):
            names = () if entry is None else (entry,) if isinstance(entry, str) else entry
            if sizes[letter] % math.prod(mesh[axis] for axis in names):
                uneven[letter] = -(-sizes[letter] // ranks) * ranks

    def derived(specs: Sequence[PartitionSpec], sizes: Mapping[str, int]) -> Derived:
        lhs, rhs = (tuple(sizes[letter] for letter in own) for own in letters[:2])
        return derive(formula, *specs, shapes=(lhs, rhs), mesh=mesh)

    found = derived(specs, sizes | uneven)
    touched = {letter for move in found.moves for letter in (move.gather, move.scatter)}
    if uneven.keys() & touched:
        specs = [
            PartitionSpec(*(None if x in uneven else e for x, e in zip(own, spec, strict=False)))
            for own, spec in zip(letters, specs, strict=True)
        ]
        return specs, derived(specs, sizes), {}
    return specs, found, {letter: sizes[letter] for letter in uneven.keys() - set(letters[2])}


def _without_padding(
    x: jax.Array, letters: str, spec: PartitionSpec, padded: Mapping[str, int]
) -> jax.Array:
    """One rank's array, zero beyond the extents in ``padded``."""
    for dimension, (letter, entry) in enumerate(zip(letters, spec, strict=False)):
        if letter in padded:
            at = lax.broadcasted_iota(jnp.int32, x.shape, dimension)
            at += lax.axis_index(entry) * x.shape[dimension]
            x = jnp.where(at < padded[letter], x, 0)
    return x


def _rule(formula: str, tied: bool) -> str:
    """The letters as a Shardy rule; each array's are its own unless ``tied``."""
    operands, out = formula.split("->")
    *given, made = [
        " ".join(letter if tied else f"{letter}{place}" for letter in own)
        for place, own in enumerate((*operands.split(","), out))
    ]
    return f"{', '.join(given)} -> {made}"


@jax.custom_vjp
def _alike(x: jax.Array, like: jax.Array) -> jax.Array:
    """``x``, with a hint to the partitioner to shard it as ``like``."""
    result: jax.Array = _first(x.ndim)(x, like)
    return result


_alike.defvjp(
    lambda x, like: (_alike(x, like), like),
    lambda like, ct: (_alike(ct, like), jnp.zeros_like(like)),
)


@functools.cache
def _first(ndim: int) -> Any:
    """An operation whose first operand the partitioner shards as the second, if nothing forbids."""

    @custom_partitioning
    def first(x: jax.Array, like: jax.Array) -> jax.Array:
        return x

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        x, like = args
        return mesh, lambda x, like: x, x.sharding, (x.sharding, like.sharding)

    letters = " ".join(string.ascii_lowercase[:ndim])
    first.def_partition(partition=partition, sharding_rule=f"{letters}, {letters} -> {letters}")
    batchable = custom_vmap(lambda x, like: first(x, like))

    @batchable.def_vmap
    def batch(size: int, batched: list[bool], x: jax.Array, like: jax.Array) -> Any:
        x, like = (
            array if has else jnp.broadcast_to(array, (size, *array.shape))
            for array, has in zip((x, like), batched, strict=True)
        )
        return _first(ndim + 1)(x, like), True

    return batchable
