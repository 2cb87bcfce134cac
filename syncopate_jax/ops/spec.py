"""What an operator is: one contraction with one exchange, by letters, and the gradients of that.

Dimensions are letters, as in einsum. The exchange happens to ``lhs`` or ``rhs`` before the
contraction, or to ``out`` after it. The gradients of such an operator are again such operators
(design decision 9), so five operators in either direction need one rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from syncopate_jax.backends import xla
from syncopate_jax.options import Options

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


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a contraction, but for its arrays.

    Attributes:
      spec: what is contracted, and what is exchanged.
      axis_names: mesh axes over whose ranks it is exchanged.
      options: how it is realised.
      out_dtype: of the result.
    """

    spec: Contraction
    axis_names: tuple[str, ...]
    options: Options
    out_dtype: jnp.dtype
