"""A contraction that also gives back the operand it exchanged, for a program that reads it again.

Nothing is sent twice: the gradient of the other operand is a local product with what was kept, and
the cotangents of result and kept operand are added before the one exchange that mirrors the first.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from syncopate_jax.backends import xla
from syncopate_jax.backends.interface import KeepsGathered
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ops import fused
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options
from syncopate_jax.registry import backends
from syncopate_jax.runtime import custom_call, mesh

Pair = tuple[jax.Array, jax.Array]


def refusal(spec: Contraction, options: Options) -> str | None:
    """Why the backend does not give back what it exchanged; None if it does."""
    backend = fused.choose_backend(spec, options)
    if isinstance(backends.get(backend), KeepsGathered):
        return None
    return f"backend {backend} does not give back what it gathered; use backend 'xla'"


def contract_and_keep(
    spec: Contraction,
    lhs: jax.Array,
    rhs: jax.Array,
    axis_names: tuple[str, ...],
    options: Options,
    out_dtype: jax.typing.DTypeLike,
) -> Pair:
    """``contraction.contract`` of local arrays, and its exchanged operand; differentiable.

    ``spec`` exchanges an operand, ``lhs`` or ``rhs``.

    Raises:
      UnsupportedError: the backend does not give the exchanged operand back.
    """
    if reason := refusal(spec, options):
        raise UnsupportedError(f"{spec.kind}: {reason}")
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    lhs, rhs = custom_call.vary_alike((lhs.astype(dtype), rhs.astype(dtype)), axis_names)
    return _keep(spec, axis_names, options, jnp.dtype(out_dtype), lhs, rhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _keep(
    spec: Contraction,
    axis_names: tuple[str, ...],
    options: Options,
    out_dtype: jnp.dtype,
    lhs: jax.Array,
    rhs: jax.Array,
) -> Pair:
    backend = fused.choose_backend(spec, options)
    if backend != "xla":
        options = options.using(backend=backend)
        return fused.contract_and_keep(spec, axis_names, options, out_dtype, lhs, rhs)
    arrays = {"lhs": lhs, "rhs": rhs}
    whole = arrays[spec.place] = _exchange(arrays[spec.place], spec.exchange, axis_names)
    return _product(spec, arrays["lhs"], arrays["rhs"], out_dtype), whole


def _exchange(x: jax.Array, what: xla.Exchange, axis_names: tuple[str, ...]) -> jax.Array:
    """``xla.exchange``, of an empty array too, which XLA's collectives do not take."""
    if x.size:
        return xla.exchange(x, what, axis_names)
    shape, ranks = list(x.shape), mesh.ranks(axis_names)
    if what.gather >= 0:
        shape[what.gather] *= ranks
    if what.scatter >= 0:
        shape[what.scatter] //= ranks
    return custom_call.vary_alike((jnp.zeros(shape, x.dtype), x))[0]


def _product(spec: Contraction, x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The contraction without its exchange."""
    return jnp.einsum(f"{spec.lhs},{spec.rhs}->{spec.out}", x, y, preferred_element_type=dtype)


def _forward(
    spec: Contraction,
    axis_names: tuple[str, ...],
    options: Options,
    out_dtype: jnp.dtype,
    lhs: jax.Array,
    rhs: jax.Array,
) -> tuple[Pair, Pair]:
    out, whole = _keep(spec, axis_names, options, out_dtype, lhs, rhs)
    return (out, whole), ((whole, rhs) if spec.place == "lhs" else (lhs, whole))


def _backward(
    spec: Contraction,
    axis_names: tuple[str, ...],
    _options: Options,
    _out_dtype: jnp.dtype,
    saved: Pair,
    cts: Pair,
) -> Pair:
    lhs, rhs = saved
    ct, ct_whole = cts
    local = replace(spec, kind="none", place="out", gather="", scatter="")
    d_lhs = _product(local.lhs_gradient(), ct, rhs, lhs.dtype)
    d_rhs = _product(local.rhs_gradient(), lhs, ct, rhs.dtype)
    # The mirror of the exchange: what the gradient of the exchanged operand ends with.
    if spec.place == "lhs":
        mirror = spec.lhs_gradient().exchange
        return _exchange(d_lhs + ct_whole, mirror, axis_names), d_rhs
    mirror = spec.rhs_gradient().exchange
    return d_lhs, _exchange(d_rhs + ct_whole, mirror, axis_names)


_keep.defvjp(_forward, _backward)
