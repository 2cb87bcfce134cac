"""A contraction with an exchange as a differentiable function of local arrays."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from syncopate_jax.backends import xla
from syncopate_jax.ops import fused, gradients
from syncopate_jax.ops.spec import Call, Contraction
from syncopate_jax.options import Options
from syncopate_jax.runtime import custom_call, mesh
from syncopate_jax.runtime.reverse_only import reverse_only

Pair = tuple[jax.Array, jax.Array]


def contract(
    spec: Contraction,
    lhs: jax.Array,
    rhs: jax.Array,
    axis_names: tuple[str, ...],
    options: Options,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """The contraction of local arrays, differentiable; the exchange runs over ``axis_names``."""
    call = Call(spec, axis_names, options, jnp.dtype(out_dtype))
    return _contract(call, *promoted(spec, lhs, rhs, axis_names))


def promoted(
    spec: Contraction, lhs: jax.Array, rhs: jax.Array, axis_names: tuple[str, ...]
) -> Pair:
    """Both operands in one dtype, varying over the same axes, ``axis_names`` among them.

    Their tangents are refused: the operator that takes them has gradients in reverse mode alone.
    """
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    lhs, rhs = custom_call.vary_alike((lhs.astype(dtype), rhs.astype(dtype)), axis_names)
    name = f"{spec.kind} with {spec.lhs},{spec.rhs}->{spec.out}"
    return reverse_only(lhs, name), reverse_only(rhs, name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(call: Call, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    options = fused.choose(call, lhs, rhs)
    if call.spec.kind == "none" or options.backend == "xla":
        return _unfused(call, lhs, rhs)
    return fused.contract(replace(call, options=options), lhs, rhs)


def _unfused(call: Call, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The contraction as the program that fusion replaces: one collective beside one dot."""
    spec = call.spec
    if spec.place == "lhs":
        lhs = exchange(lhs, spec.exchange, call.axis_names)
    if spec.place == "rhs":
        rhs = exchange(rhs, spec.exchange, call.axis_names)
    out = product(spec, lhs, rhs, call.out_dtype)
    return exchange(out, spec.exchange, call.axis_names) if spec.place == "out" else out


def product(spec: Contraction, lhs: jax.Array, rhs: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The contraction without its exchange; a sum of nothing is zero."""
    if 0 in (*lhs.shape, *rhs.shape):  # as a dot, XLA fails where a collective takes its result
        sizes = dict(zip(spec.lhs + spec.rhs, lhs.shape + rhs.shape, strict=True))
        return custom_call.vary_as(jnp.zeros([sizes[x] for x in spec.out], dtype), (lhs, rhs))
    return multiply(f"{spec.lhs},{spec.rhs}->{spec.out}", lhs, rhs, dtype)


def multiply(formula: str, lhs: jax.Array, rhs: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``jnp.einsum`` into ``dtype``, which rounds the result alone.

    Asked for a dtype that is narrower than an operand's, ``jnp.einsum`` may round that operand.
    """
    operands = jnp.promote_types(lhs.dtype, rhs.dtype)
    wide = jnp.promote_types(operands, dtype)
    lhs, rhs = lhs.astype(operands), rhs.astype(operands)
    return jnp.einsum(formula, lhs, rhs, preferred_element_type=wide).astype(dtype)


def exchange(x: jax.Array, what: xla.Exchange, axis_names: tuple[str, ...]) -> jax.Array:
    """``xla.exchange``, of an empty array too, which XLA's collectives do not take."""
    if x.size or what.kind == "none":
        return xla.exchange(x, what, axis_names)
    shape, ranks = list(x.shape), mesh.ranks(axis_names)
    if what.gather >= 0:
        shape[what.gather] *= ranks
    if what.scatter >= 0:
        shape[what.scatter] //= ranks
    summed = axis_names if what.kind == "all_reduce" else ()
    return custom_call.vary_as(jnp.zeros(shape, x.dtype), (x,), but=summed)


def _forward(call: Call, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Pair]:
    return _contract(call, lhs, rhs), (lhs, rhs)


def _backward(call: Call, saved: Pair, ct: jax.Array) -> Pair:
    lhs, rhs = saved
    spec, axis_names = call.spec, call.axis_names
    if spec.kind == "all_reduce":
        # Untracked, each rank has a share of the cotangent of a sum that all of them got.
        ct = ct if custom_call.tracks_varying_axes() else lax.psum(ct, axis_names)
    options = gradients.product_options(call.options, ct.dtype, lhs.dtype)
    d_lhs = contract(spec.lhs_gradient(), ct, rhs, axis_names, options, lhs.dtype)
    d_rhs = contract(spec.rhs_gradient(), lhs, ct, axis_names, options, rhs.dtype)
    return d_lhs, d_rhs


_contract.defvjp(_forward, _backward)
