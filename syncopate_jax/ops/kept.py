"""A contraction that also gives back the operand it exchanged, for a program that reads it again.

Nothing is sent twice: the gradient of the other operand is a local product with what was kept, and
the cotangents of result and kept operand are added before the one exchange that mirrors the first.

Each of the two has a gradient rule of its own. A rule of both would be wrong under ``vmap`` where
a batch shares the exchanged operand: the kept one has one cotangent for all of the batch, which a
rule that also takes the cotangents of the results would add once for each of them.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

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
    lhs, rhs = promoted(spec, lhs, rhs, axis_names)
    backend = fused.choose_backend(spec, options)
    out = whole = None
    if backend == "xla":
        fused.check_plan(call, lhs, rhs)
    else:
        asked = replace(call, options=options.using(backend=backend))
        out, whole = fused.contract_and_keep(asked, *lax.stop_gradient((lhs, rhs)))
    if spec.place == "lhs":
        lhs = whole = _exchanged(call, lhs, whole)
    else:
        rhs = whole = _exchanged(call, rhs, whole)
    return _product(call, lhs, rhs, out), whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(call: Call, x: jax.Array, whole: jax.Array | None) -> jax.Array:
    """``x`` after the exchange: ``whole`` where that is known; its gradient is ``x``'s alone."""
    return exchange(x, call.spec.exchange, call.axis_names) if whole is None else whole


def _exchanged_backward(call: Call, _saved: None, ct: jax.Array) -> tuple[jax.Array, None]:
    """The mirror of the exchange: what the gradient of the exchanged operand ends with."""
    spec = call.spec
    dual = spec.lhs_gradient() if spec.place == "lhs" else spec.rhs_gradient()
    return exchange(ct, dual.exchange, call.axis_names), None


_exchanged.defvjp(lambda *args: (_exchanged(*args), None), _exchanged_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: Call, lhs: jax.Array, rhs: jax.Array, out: jax.Array | None) -> jax.Array:
    """The product after the exchange: ``out`` where that is known."""
    return product(call.spec, lhs, rhs, call.out_dtype) if out is None else out


def _forward(
    call: Call, lhs: jax.Array, rhs: jax.Array, out: jax.Array | None
) -> tuple[jax.Array, Pair]:
    return _product(call, lhs, rhs, out), (lhs, rhs)


def _backward(call: Call, saved: Pair, ct: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs = saved
    local = replace(call.spec, kind="none", place="out", gather="", scatter="")
    d_lhs = product(local.lhs_gradient(), ct, rhs, lhs.dtype)
    d_rhs = product(local.rhs_gradient(), lhs, ct, rhs.dtype)
    return d_lhs, d_rhs, None


_product.defvjp(_forward, _backward)
