"""A contraction with an exchange as a differentiable function of local arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from syncopate_jax.backends import xla
from syncopate_jax.ops import fused
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options
from syncopate_jax.runtime import custom_call, mesh


def contract(
    spec: Contraction,
    lhs: jax.Array,
    rhs: jax.Array,
    axis_names: tuple[str, ...],
    options: Options,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """The contraction of local arrays, differentiable; the exchange runs over ``axis_names``."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    lhs, rhs = custom_call.vary_alike((lhs.astype(dtype), rhs.astype(dtype)), axis_names)
    return _contract(spec, axis_names, options, jnp.dtype(out_dtype), lhs, rhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _contract(
    spec: Contraction,
    axis_names: tuple[str, ...],
    options: Options,
    out_dtype: jnp.dtype,
    lhs: jax.Array,
    rhs: jax.Array,
) -> jax.Array:
    options = fused.choose(spec, axis_names, options, out_dtype, lhs, rhs)
    unfusable = spec.kind == "none" or options.backend == "xla"
    realise = unfused if unfusable else fused.contract
    return realise(spec, axis_names, options, out_dtype, lhs, rhs)


def unfused(
    spec: Contraction,
    axis_names: tuple[str, ...],
    _options: Options,
    out_dtype: jnp.dtype,
    lhs: jax.Array,
    rhs: jax.Array,
) -> jax.Array:
    """The contraction as the program that fusion replaces: one collective beside one dot."""
    if 0 in (*lhs.shape, *rhs.shape) and spec.kind != "none":
        return _zeros(spec, axis_names, out_dtype, lhs, rhs)
    if spec.place == "lhs":
        lhs = xla.exchange(lhs, spec.exchange, axis_names)
    if spec.place == "rhs":
        rhs = xla.exchange(rhs, spec.exchange, axis_names)
    formula = f"{spec.lhs},{spec.rhs}->{spec.out}"
    out = jnp.einsum(formula, lhs, rhs, preferred_element_type=out_dtype)
    return xla.exchange(out, spec.exchange, axis_names) if spec.place == "out" else out


def _zeros(
    spec: Contraction,
    axis_names: tuple[str, ...],
    out_dtype: jnp.dtype,
    lhs: jax.Array,
    rhs: jax.Array,
) -> jax.Array:
    """The result for an empty operand, which XLA's collectives do not take."""
    ranks = mesh.ranks(axis_names)
    sizes = {"lhs": dict(zip(spec.lhs, lhs.shape, strict=True))}
    sizes["rhs"] = dict(zip(spec.rhs, rhs.shape, strict=True))
    sizes["out"] = sizes["lhs"] | sizes["rhs"]
    changed = sizes[spec.place]
    if spec.gather:
        changed[spec.gather] *= ranks
    if spec.scatter:
        changed[spec.scatter] //= ranks
    found = sizes["out"] if spec.place == "out" else sizes["lhs"] | sizes["rhs"] | changed
    zeros = jnp.zeros([found[letter] for letter in spec.out], out_dtype)
    summed = axis_names if spec.kind == "all_reduce" else ()
    return custom_call.vary_as(zeros, (lhs, rhs), but=summed)


def _forward(
    spec: Contraction,
    axis_names: tuple[str, ...],
    options: Options,
    out_dtype: jnp.dtype,
    lhs: jax.Array,
    rhs: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _contract(spec, axis_names, options, out_dtype, lhs, rhs), (lhs, rhs)


def _backward(
    spec: Contraction,
    axis_names: tuple[str, ...],
    options: Options,
    _out_dtype: jnp.dtype,
    saved: tuple[jax.Array, jax.Array],
    ct: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    lhs, rhs = saved
    if spec.kind == "all_reduce":
        # Untracked, each rank has a share of the cotangent of a sum that all of them got.
        ct = ct if custom_call.tracks_varying_axes() else lax.psum(ct, axis_names)
    options = options.using(plan=None)  # made for the forward exchange, not for its mirror
    d_lhs = contract(spec.lhs_gradient(), ct, rhs, axis_names, options, lhs.dtype)
    d_rhs = contract(spec.rhs_gradient(), lhs, ct, axis_names, options, rhs.dtype)
    return d_lhs, d_rhs


_contract.defvjp(_forward, _backward)
