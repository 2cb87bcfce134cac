"""The factors of a dot's operands and result, and a letter for each of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from syncopate_jax.rewrite.graph import Node
from syncopate_jax.rewrite.layout import Dims, Factor, Layout

LETTERS = "bacdefghijlopqrstuvwxyz"
"""Spare letters: all but those that a local kernel cuts into tiles."""


@dataclass(frozen=True, slots=True)
class Letters:
    """A dot by the factors of its dimensions.

    Attributes:
      lhs, rhs, out: factors in order; a contracted or batch dimension's are those of both sides.
      names: letter of each factor, by its ``id``.
    """

    lhs: list[Factor]
    rhs: list[Factor]
    out: list[Factor]
    names: dict[int, str]

    def spell(self, factors: Sequence[Factor]) -> str:
        return "".join(self.names[id(factor)] for factor in factors)


def letters(dot: Node, known: int, layout: Layout) -> Letters:
    """Letters for a dot; ``layout`` is of its lhs (``known`` 0), rhs (1) or result (2).

    Of the free dimensions of lhs, those of rhs and the contracted ones, the largest get ``m``,
    ``n`` and ``k``, the letters that a local kernel cuts into tiles; a dot that has none of one
    kind gets one of extent 1.
    """
    shapes = [value.aval.shape for value in dot.inputs]
    dims: tuple[dict[int, list[Factor]], dict[int, list[Factor]]] = ({}, {})
    out: Dims = []
    kind_of: dict[int, str] = {}
    for kind, pairs in _kinds(dot).items():
        for pair in pairs:
            at = pair[known] if known < 2 else len(out) if kind != "k" else None
            size = next(shapes[i][d] for i, d in enumerate(pair) if d is not None)
            own = [Factor(size, size)] if size != 1 else []
            group = own if at is None else layout.dims[at]
            kind_of |= dict.fromkeys(map(id, group), kind)
            for i, d in enumerate(pair):
                if d is not None:
                    dims[i][d] = group
            if kind != "k":
                out.append(group)
    lists = [[f for d in sorted(own) for f in own[d]] for own in dims]
    lists.append([f for group in out for f in group])
    for kind, where in (("m", (0, 2)), ("n", (1, 2)), ("k", (0, 1))):
        if kind not in kind_of.values():
            unit = Factor(1, 1)
            kind_of[id(unit)] = kind
            for i in where:
                lists[i].append(unit)
    while _merge(lists, kind_of):
        pass
    return Letters(lists[0], lists[1], lists[2], _name(lists, kind_of))


def _merge(lists: list[list[Factor]], kind_of: dict[int, str]) -> bool:
    """Makes one factor of two that stand side by side wherever they are; False if there are none.

    The second must not be moved: blocks of the first are then blocks of the product.
    """
    for a, b in [pair for own in lists for pair in itertools.pairwise(own)]:
        together = all(
            (a in own) == (b in own) and (a not in own or own.index(b) == own.index(a) + 1)
            for own in lists
        )
        if together and not b.role:
            both = Factor(a.inside * b.inside, a.outside * b.outside, a.role)
            kind_of[id(both)] = kind_of[id(a)]
            for own in lists:
                if a in own:
                    own[own.index(a) : own.index(b) + 1] = [both]
            return True
    return False


def _name(lists: list[list[Factor]], kind_of: dict[int, str]) -> dict[int, str]:
    everything = {id(f): f for own in lists for f in own}
    names: dict[int, str] = {}
    for kind in "mnk":
        largest = max(
            (f for key, f in everything.items() if kind_of[key] == kind), key=lambda f: f.inside
        )
        names[id(largest)] = kind
    spare = iter(LETTERS)
    for key in everything:
        if key not in names:
            names[key] = next(spare)
    return names


def formula_of(dot: Node) -> str:
    """A dot with a letter for each dimension, as an einsum formula, tiled letters as above."""
    shapes = [value.aval.shape for value in dot.inputs]
    names: tuple[dict[int, str], dict[int, str]] = ({}, {})
    spare = iter(LETTERS)
    out = ""
    for kind, pairs in _kinds(dot).items():
        sizes = [next(shapes[i][d] for i, d in enumerate(p) if d is not None) for p in pairs]
        largest = sizes.index(max(sizes)) if sizes and kind != "batch" else -1
        for at, pair in enumerate(pairs):
            letter = kind if at == largest else next(spare)
            for i, d in enumerate(pair):
                if d is not None:
                    names[i][d] = letter
            out += letter if kind != "k" else ""
    lhs, rhs = ("".join(own[d] for d in sorted(own)) for own in names)
    return f"{lhs},{rhs}->{out}"


def _kinds(dot: Node) -> dict[str, list[tuple[int | None, int | None]]]:
    """The dimensions of both operands by what they are to the dot, in the order of its result."""
    contracted, batch = dot.params["dimension_numbers"]
    rest = [
        [d for d in range(value.aval.ndim) if d not in (*contracted[i], *batch[i])]
        for i, value in enumerate(dot.inputs)
    ]
    return {
        "batch": list(zip(*batch, strict=True)),
        "m": [(d, None) for d in rest[0]],
        "n": [(None, d) for d in rest[1]],
        "k": list(zip(*contracted, strict=True)),
    }
