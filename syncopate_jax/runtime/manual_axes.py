"""Mesh axes inside ``jax.shard_map``: their sizes, and which of them a value varies over."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

from syncopate_jax.errors import InputError, MeshError


def axis_tuple(axis_name: str | tuple[str, ...]) -> tuple[str, ...]:
    """Axis names as a tuple; raises InputError on none, on repeats and on what is no name."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not names or len(set(names)) != len(names):
        raise InputError(
            f"axis_name: needs a mesh axis name or a tuple of different ones, found {axis_name!r}"
        )
    return names


def axis_size(names: tuple[str, ...], operator: str) -> int:
    """Number of ranks along ``names``; raises MeshError where they are not bound."""
    try:
        return lax.axis_size(names)
    except NameError as error:
        raise MeshError(
            f"{operator}: mesh axis {', '.join(map(repr, names))} is not bound here; call the "
            f"operator inside jax.shard_map over a mesh that has it (arrays sharded outside "
            f"shard_map would have to be gathered first)"
        ) from error


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which ``x`` may differ (none with ``check_vma=False``)."""
    return jax.typeof(x).manual_axis_type.varying


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """``x`` marked as varying over ``axes`` too, so that gradients are summed where they must be."""
    missing = tuple(sorted(set(axes) - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def transpose_of_psum(ct: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    """The cotangent of the summands of a ``psum``, given that of the sum.

    With ``check_vma`` it is the same value marked as varying, without it a ``psum``: asking JAX
    keeps to the convention of the shard_map that surrounds the call.
    """
    summand = vary(jnp.zeros_like(ct), (*varying_axes(ct), *axis_names))
    _, transpose = jax.vjp(lambda partial: lax.psum(partial, axis_names), summand)
    return transpose(ct)[0]
