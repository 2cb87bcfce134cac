"""A contraction that also gives back the operand it exchanged, for a program that reads it again.

Nothing is sent twice: the gradient of the other operand is a local product with what was kept, and
the cotangents of result and kept operand are added before the one exchange that mirrors the first.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from syncopate_jax.backends.interface import KeepsGathered
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ops import fused
from syncopate_jax.ops.contraction import Pair, exchange, product, promoted
from syncopate_jax.ops.spec import Call, Contraction
from syncopate_jax.options import Options
from syncopate_jax.registry import backends


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
    call = Call(spec, axis_names, options, jnp.dtype(out_dtype))
    return _keep(call, *promoted(spec, lhs, rhs, axis_names))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _keep(call: Call, lhs: jax.Array, rhs: jax.Array) -> Pair:
    backend = fused.choose_backend(call.spec, call.options)
    if backend != "xla":
        call = replace(call, options=call.options.using(backend=backend))
        return fused.contract_and_keep(call, lhs, rhs)
    fused.check_plan(call, lhs, rhs)
    arrays, place = {"lhs": lhs, "rhs": rhs}, call.spec.place
    whole = arrays[place] = exchange(arrays[place], call.spec.exchange, call.axis_names)
    return product(call.spec, arrays["lhs"], arrays["rhs"], call.out_dtype), whole


def _forward(call: Call, lhs: jax.Array, rhs: jax.Array) -> tuple[Pair, Pair]:
    out, whole = _keep(call, lhs, rhs)
    return (out, whole), ((whole, rhs) if call.spec.place == "lhs" else (lhs, whole))


def _backward(call: Call, saved: Pair, cts: Pair) -> Pair:
    lhs, rhs = saved
    ct, ct_whole = cts
    spec = call.spec
    local = replace(spec, kind="none", place="out", gather="", scatter="")
    d_lhs = product(local.lhs_gradient(), ct, rhs, lhs.dtype)
    d_rhs = product(local.rhs_gradient(), lhs, ct, rhs.dtype)
    # The mirror of the exchange: what the gradient of the exchanged operand ends with.
    if spec.place == "lhs":
        mirror = spec.lhs_gradient().exchange
        return exchange(d_lhs + ct_whole, mirror, call.axis_names), d_rhs
    mirror = spec.rhs_gradient().exchange
    return d_lhs, exchange(d_rhs + ct_whole, mirror, call.axis_names)


_keep.defvjp(_forward, _backward)
