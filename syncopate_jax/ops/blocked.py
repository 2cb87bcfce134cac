"""Blocked letters: a contraction with an exchange as a plan's tensor beside a kernel's operands.

A letter that the exchange gathers or scatters is split into its block (``G`` or ``S``, one block a
rank) and its place in the block. A chunk is then a slice along block letters, tiles never straddle
the data of two ranks, and every array the caller sees is a reshape of what the kernel sees.
For ``all_gather`` of ``m`` in ``bmk,kn->bmn``::

    caller:  lhs bmk                       rhs kn   out b(Gm)n
    plan:    tensor Gbmk; rank r starts with block r of G and ends with all of G
    kernel:  lhs Gbmk                      rhs kn   out b(Gm)n
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from syncopate_jax.ops.spec import Contraction
from syncopate_jax.pallas_kernels.matmul_tpu import group_shape, split_groups

_PLACES = ("lhs", "rhs", "out")


@dataclass(frozen=True, slots=True)
class Blocked:
    """A contraction in blocked letters; brackets join a block and its letter in one dimension.

    Attributes:
      lhs, rhs, out: letters of the kernel's operands.
      place: which of them is exchanged; its letters are the plan tensor's.
      sizes: extent of every letter in the kernel.
      ranks: number of ranks.
      gather, scatter: the plan tensor's dimension of ``G`` and of ``S``, -1 if it has none.
      split: the letter that is split into blocks where it is not exchanged, or empty.
      result: extents of the caller's result.
    """

    lhs: str
    rhs: str
    out: str
    place: str
    sizes: tuple[tuple[str, int], ...]
    ranks: int
    gather: int
    scatter: int
    split: str
    result: tuple[int, ...]

    @property
    def extents(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def exchanged(self) -> str:
        """Letters of the plan tensor."""
        return {"lhs": self.lhs, "rhs": self.rhs, "out": self.out}[self.place]

    @property
    def plan_shape(self) -> tuple[int, ...]:
        """Extents of the plan tensor: all blocks."""
        return group_shape(self.exchanged, self.extents | {"G": self.ranks, "S": self.ranks})

    def operand_shape(self, place: str) -> tuple[int, ...]:
        """What the caller's ``lhs`` or ``rhs`` is reshaped to."""
        letters = {"lhs": self.lhs, "rhs": self.rhs}[place]
        own = {"G": 1, "S": self.ranks} if place == self.place else {}
        return group_shape(split_groups(letters), self.extents | own)

    def ungrouped(self) -> Blocked:
        """The same with a dimension for every letter, for tiles that do not divide a block."""
        lhs, rhs, out = ("".join(split_groups(x)) for x in (self.lhs, self.rhs, self.out))
        return replace(self, lhs=lhs, rhs=rhs, out=out)


def block(spec: Contraction, lhs: tuple[int, ...], rhs: tuple[int, ...], ranks: int) -> Blocked:
    """``spec`` in blocked letters for local operands of shapes ``lhs`` and ``rhs``."""
    sizes = _local_sizes(spec, lhs, rhs, ranks)
    scatter = spec.scatter
    if spec.kind == "all_reduce":
        scatter = next((x for x in "mnb" if x in spec.out and sizes[x] % ranks == 0), "")
        sizes |= {scatter: sizes[scatter] // ranks} if scatter else {}
    on_input = spec.place != "out"
    split = spec.gather if on_input else scatter
    blocked = {
        place: _block_letters(getattr(spec, place), spec, scatter)
        if place == spec.place
        else getattr(spec, place).replace(split, f"({'G' if on_input else 'S'}{split})")
        if split
        else getattr(spec, place)
        for place in _PLACES
    }
    kernel = sizes | {"G": ranks if on_input else 1, "S": 1 if on_input else ranks}
    letters = "".join(blocked.values())
    return Blocked(
        **blocked,
        place=spec.place,
        sizes=tuple(sorted((x, n) for x, n in kernel.items() if x in letters)),
        ranks=ranks,
        gather=blocked[spec.place].find("G"),
        scatter=blocked[spec.place].find("S"),
        split=split,
        result=_result_shape(spec, sizes, scatter, ranks),
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


def _block_letters(letters: str, spec: Contraction, scatter: str) -> str:
    """The letters of what is exchanged, with block letters put in.

    Blocks of the caller's own dimensions stand before their letter; a block that the exchange
    adds (its extent for the caller is 1) stands first, so that a chunk is contiguous.
    """
    if spec.kind == "all_gather":
        return "G" + letters
    if spec.kind == "reduce_scatter":
        return "S" + letters
    if spec.kind == "all_reduce":
        return letters.replace(scatter, "S" + scatter) if scatter else letters
    if spec.place == "out":
        return "S" + letters.replace(spec.gather, "G" + spec.gather)
    return "G" + letters.replace(scatter, "S" + scatter)


def _result_shape(
    spec: Contraction, sizes: Mapping[str, int], scatter: str, ranks: int
) -> tuple[int, ...]:
    """The caller's result: blocks merged with their letters."""
    grown = {spec.gather} if spec.gather else set()
    if spec.kind == "all_reduce" and scatter:
        grown = {scatter}
    return tuple(sizes[x] * (ranks if x in grown else 1) for x in spec.out)
