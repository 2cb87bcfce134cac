"""Blocked letters: a contraction with an exchange as a plan's tensor beside a kernel's operands.

A letter that the exchange gathers or scatters is split into its block (``G`` or ``S``, one block a
rank) and its place in the block. A chunk is then a slice along block letters, tiles never straddle
the data of two ranks, and every array the caller sees is a reshape of what the kernel sees.
For ``all_gather`` of ``m`` in ``bmk,kn->bmn``::

    caller:  lhs [b, m, k]         rhs [k, n]   out [b, G*m, n]
    plan:    tensor [G, b, m, k]; rank r starts with block r of G, ends with all of G
    kernel:  lhs [G, b, m, k]      rhs [k, n]   out [b, G, m, n]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncopate_jax.ops.contraction import Contraction


@dataclass(frozen=True, slots=True)
class Blocked:
    """A contraction in blocked letters.

    Attributes:
      lhs, rhs, out: letters of the kernel's operands.
      place: which of them is exchanged; its letters are the plan tensor's.
      sizes: extent of every letter in the kernel.
      plan_shape: the plan tensor's shape.
      gather, scatter: its dimension of ``G`` and of ``S``, -1 if it has none.
      lhs_shape, rhs_shape: what the caller's arrays are reshaped to.
      out_shape: what the result is reshaped to for the caller.
    """

    lhs: str
    rhs: str
    out: str
    place: str
    sizes: tuple[tuple[str, int], ...]
    plan_shape: tuple[int, ...]
    gather: int
    scatter: int
    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    out_shape: tuple[int, ...]

    @property
    def extents(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def exchanged(self) -> str:
        """Letters of the plan tensor."""
        return {"lhs": self.lhs, "rhs": self.rhs, "out": self.out}[self.place]


def block(spec: Contraction, lhs: tuple[int, ...], rhs: tuple[int, ...], ranks: int) -> Blocked:
    """``spec`` in blocked letters for local operands of shapes ``lhs`` and ``rhs``."""
    sizes = _local_sizes(spec, lhs, rhs, ranks)
    scatter = spec.scatter
    if spec.kind == "all_reduce":
        scatter = next((x for x in "mnb" if x in spec.out and sizes[x] % ranks == 0), "")
        sizes |= {scatter: sizes[scatter] // ranks} if scatter else {}
    letters = {"lhs": spec.lhs, "rhs": spec.rhs, "out": spec.out}
    blocked = {place: _block_letters(letters[place], place, spec, scatter) for place in letters}
    on_input = spec.place != "out"
    kernel = sizes | {
        "G": ranks if on_input else 1,
        "S": 1 if on_input else ranks,
    }
    shape = {place: tuple(kernel[x] for x in blocked[place]) for place in letters}
    exchanged = blocked[spec.place]
    whole = kernel | {"G": ranks, "S": ranks}
    if on_input:  # the caller's array is this rank's block of G and every block of S
        own = kernel | {"G": 1, "S": ranks}
        shape[spec.place] = tuple(own[x] for x in exchanged)
    return Blocked(
        **blocked,
        place=spec.place,
        sizes=tuple(sorted((x, n) for x, n in kernel.items() if x in "".join(blocked.values()))),
        plan_shape=tuple(whole[x] for x in exchanged),
        gather=exchanged.find("G"),
        scatter=exchanged.find("S"),
        lhs_shape=shape["lhs"],
        rhs_shape=shape["rhs"],
        out_shape=_result_shape(spec, sizes, scatter, ranks),
    )


def _local_sizes(
    spec: Contraction, lhs: tuple[int, ...], rhs: tuple[int, ...], ranks: int
) -> dict[str, int]:
    """Extent of every letter with the exchanged ones as one rank's block of them."""
    found = {"lhs": dict(zip(spec.lhs, lhs, strict=True))}
    found["rhs"] = dict(zip(spec.rhs, rhs, strict=True))
    sizes: dict[str, int] = found["lhs"] | found["rhs"]
    if spec.place in found:
        sizes |= found[spec.place]
        if spec.scatter:
            sizes[spec.scatter] //= ranks
    elif spec.scatter:
        sizes[spec.scatter] //= ranks
    return sizes


def _block_letters(letters: str, place: str, spec: Contraction, scatter: str) -> str:
    """The letters of one operand with block letters put in.

    Blocks of the caller's own dimensions stand before their letter; a block that the exchange
    adds (its extent for the caller is 1) stands first, so that a chunk is contiguous.
    """
    gather = spec.gather
    if place != spec.place:
        on_input = spec.place != "out"
        split = gather if on_input else scatter
        return letters.replace(split, ("G" if on_input else "S") + split) if split else letters
    if spec.kind == "all_gather":
        return "G" + letters
    if spec.kind == "reduce_scatter":
        return "S" + letters
    if spec.kind == "all_reduce":
        return letters.replace(scatter, "S" + scatter) if scatter else letters
    if spec.place == "out":
        return "S" + letters.replace(gather, "G" + gather)
    return "G" + letters.replace(scatter, "S" + scatter)


def _result_shape(
    spec: Contraction, sizes: Mapping[str, int], scatter: str, ranks: int
) -> tuple[int, ...]:
    """The caller's result: blocks merged with their letters."""
    grown = {spec.gather} if spec.gather else set()
    if spec.kind == "all_reduce" and scatter:
        grown = {scatter}
    return tuple(sizes[x] * (ranks if x in grown else 1) for x in spec.out)
