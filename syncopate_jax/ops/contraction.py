"""One contraction with one exchange: what every operator is, and what its gradients are too.

Dimensions are letters, as in einsum. The exchange happens to ``lhs`` or ``rhs`` before the
contraction, or to ``out`` after it. The gradients of such an operator are again such operators
(design decision 9), so five operators in either direction need one rule.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from syncopate_jax.backends import xla
from syncopate_jax.ops import fused
from syncopate_jax.options import Options
from syncopate_jax.runtime import custom_call, mesh

_MIRROR = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


@dataclass(frozen=True, slots=True)
class Contraction:
    """``out[…] = sum lhs[…] * rhs[…]`` with an exchange of one of the three.

    Attributes:
      lhs, rhs, out: the letters of each.
      kind: of the exchange, as in ``xla.Exchange``.
      place: ``lhs``, ``rhs`` or ``out``: what is exchanged.
      gather: letter that grows by the number of ranks in the exchange, or empty.
      scatter: letter that shrinks by it, or empty.
    """

    lhs: str
    rhs: str
    out: str
    kind: str = "none"
    place: str = "out"
    gather: str = ""
    scatter: str = ""

    @property
    def exchanged(self) -> str:
        """The letters of what is exchanged."""
        return {"lhs": self.lhs, "rhs": self.rhs, "out": self.out}[self.place]

    @property
    def exchange(self) -> xla.Exchange:
        """The exchange with letters turned into dimensions."""
        letters = self.exchanged
        return xla.Exchange(
            self.kind,
            letters.index(self.gather) if self.gather else -1,
            letters.index(self.scatter) if self.scatter else -1,
        )

    def lhs_gradient(self) -> Contraction:
        """The contraction of (cotangent, rhs) that gives the cotangent of lhs."""
        return self._gradient("lhs", replace(self, lhs=self.out, rhs=self.rhs, out=self.lhs))

    def rhs_gradient(self) -> Contraction:
        """The contraction of (lhs, cotangent) that gives the cotangent of rhs."""
        return self._gradient("rhs", replace(self, lhs=self.lhs, rhs=self.out, out=self.rhs))

    def _gradient(self, of: str, dual: Contraction) -> Contraction:
        """``dual`` with the exchange: mirrored on what it is the adjoint of, else kept."""
        if self.kind in ("none", "all_reduce"):
            return replace(dual, kind="none", place="out", gather="", scatter="")
        mirrored = {
            "kind": _MIRROR.get(self.kind, self.kind),
            "gather": self.scatter,
            "scatter": self.gather,
        }
        if self.place == "out":
            return replace(dual, place="lhs" if of == "lhs" else "rhs", **mirrored)
        if self.place == of:
            return replace(dual, place="out", **mirrored)
        return dual


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
    backend = fused.choose_backend(spec, options)
    realise = unfused if spec.kind == "none" or backend == "xla" else fused.contract
    return realise(spec, axis_names, options.using(backend=backend), out_dtype, lhs, rhs)


def unfused(
    spec: Contraction,
    axis_names: tuple[str, ...],
    _options: Options,
    out_dtype: jnp.dtype,
    lhs: jax.Array,
    rhs: jax.Array,
) -> jax.Array:
    """The contraction as the program that fusion replaces: one collective beside one dot."""
    if 0 in (*lhs.shape, *rhs.shape) and spec.kind not in ("none", "all_reduce"):
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
    return custom_call.vary_alike((zeros, lhs, rhs))[0]


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
