"""Alpa's names of how one contraction is sharded, such as ``SR = SS x SR @ {0,1} (allreduce @ 1)``.

The two letters of an array are its two dimensions, lhs as (space, contracted), rhs as (contracted,
space) and the result as (space of lhs, space of rhs): S is cut, R is whole. The numbers in braces
are the logical mesh dimensions that cut, in the order space of lhs, contracted, space of rhs.
``Sb = Sb x Sb`` cuts batch dimensions, ``Sb_1`` the second of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from syncopate_jax.errors import FormatError

_NAME = re.compile(
    r"(\w+) = (\w+) x (\w+) @ \{(\d{1,3}(?:,\d{1,3})*)\}"
    r"(?: \((allreduce|reduce-scatter) @ (\d{1,3}|\{\d{1,3}(?:,\d{1,3})*\})\))?",
    re.ASCII,
)
_PAIR = re.compile(r"[SR]{2}")
_ONE = {  # of a mesh of one dimension
    ("Si", "Si", "R"): ("SR", "SR", "RR"),
    ("Sj", "R", "Sj"): ("RS", "RR", "RS"),
    ("R", "Sk", "Sk"): ("RR", "RS", "SR"),
}
ROLES = ("lhs_space", "contracted", "rhs_space")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one contraction is cut.

    Attributes:
      name: as Alpa writes it.
      cuts: (role, mesh dimension): a role is one of ``ROLES``, or ``batch`` and a number.
      scatters: role of the result's dimension that a reduce-scatter shards, or empty.
    """

    name: str
    cuts: tuple[tuple[str, int], ...]
    scatters: str = ""

    @property
    def by_role(self) -> Mapping[str, int]:
        """The mesh dimension of each role that is cut."""
        return dict(self.cuts)


def read_strategy(name: str) -> Strategy:
    """The strategy called ``name``; raises FormatError when its parts contradict each other."""
    found = _NAME.fullmatch(name.strip())
    if found is None:
        raise FormatError(
            f"strategy {name[:80]!r}: needs the form 'SR = SS x SR @ {{0,1}} (allreduce @ 1)'"
        )
    out, lhs, rhs, listed, kind, reduced = found.groups()
    dims = [int(d) for d in listed.split(",")]
    if len(set(dims)) != len(dims):
        raise FormatError(f"strategy {name!r}: a mesh dimension is named twice")
    if lhs == rhs == "Sb":
        return _batch(name, out, dims, kind)
    out, lhs, rhs = _ONE.get((out, lhs, rhs), (out, lhs, rhs))
    if not all(_PAIR.fullmatch(part) for part in (out, lhs, rhs)):
        raise FormatError(f"strategy {name!r}: an array needs two letters of S and R")
    if lhs[1] != rhs[0]:
        raise FormatError(f"strategy {name!r}: the contracted dimension is cut on one side")
    roles = [role for role, cut in zip(ROLES, (lhs[0], lhs[1], rhs[1]), strict=True) if cut == "S"]
    if len(roles) != len(dims):
        raise FormatError(
            f"strategy {name!r}: cuts {len(roles)} dimensions, names {len(dims)} of the mesh"
        )
    cuts = tuple(zip(roles, dims, strict=True))
    contracted = dict(cuts).get("contracted")
    if (contracted is None) != (kind is None) or (kind and reduced.strip("{}") != str(contracted)):
        raise FormatError(
            f"strategy {name!r}: the contracted dimension is cut by mesh dimension "
            f"{contracted}, the reduction is over {reduced}"
        )
    return Strategy(name.strip(), cuts, _scattered(name, out, lhs[0], rhs[1], kind))


def _scattered(name: str, out: str, lhs: str, rhs: str, kind: str | None) -> str:
    """The dimension of the result that is cut though no operand is."""
    more = [
        role
        for role, own, cut in (("lhs_space", lhs, out[0]), ("rhs_space", rhs, out[1]))
        if own != cut
    ]
    if not more and kind != "reduce-scatter":
        return ""
    if len(more) == 1 and kind == "reduce-scatter" and "S" in (out[0] * (lhs == "R"), out[1]):
        return more[0]
    raise FormatError(f"strategy {name!r}: the result {out!r} does not follow from its operands")


def _batch(name: str, out: str, dims: list[int], kind: str | None) -> Strategy:
    found = re.fullmatch(r"Sb(?:_(\d{1,2}))?", out)
    if found is None or kind is not None or (found[1] is not None and len(dims) != 1):
        raise FormatError(f"strategy {name!r}: batches are cut as 'Sb_0 = Sb x Sb @ {{0}}'")
    first = int(found[1] or 0)
    return Strategy(name.strip(), tuple((f"batch{first + i}", d) for i, d in enumerate(dims)))
