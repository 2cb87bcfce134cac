"""From the shardings of a contraction's operands and result to its communication and plans.

Along each mesh axis the product is cut along one letter, or not at all. That choice gives what
each operand must be sharded as when the local product runs, and what the local results are: parts
of the result, or, if the letter is contracted, terms of a sum. The moves follow; of all choices
that is taken which has the fewest moves that no product overlaps, then that which sends least. An
axis that shards an operand always cuts the product: nothing is gathered so that all ranks can
compute the same, unless no letter can be cut.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from syncopate_jax.errors import InputError
from syncopate_jax.importers.resharding import (
    Move,
    Sharding,
    elements_sent,
    ranks_of,
    reshard,
    with_shapes,
)
from syncopate_jax.ir.plan import Plan
from syncopate_jax.registry import importers, templates

FUSED_BEFORE = ("all_gather", "all_to_all")
FUSED_AFTER = ("reduce_scatter", "all_reduce", "all_to_all")
PLACES = ("lhs", "rhs", "out")


@dataclass(frozen=True, slots=True)
class Derived:
    """What a sharded contraction does, step by step.

    Attributes:
      lhs, rhs, out: the letters of each array.
      mesh: extent of each mesh axis.
      before: moves of ``lhs`` and of ``rhs``, each in order, before the local product.
      after: moves of its result.
      fused: the move that is one operator with the product, None if there is none: the one of
        those next to it that sends most. The others run on their own, by their plans.
      computed: the letter that each mesh axis cuts the product along.
    """

    lhs: str
    rhs: str
    out: str
    mesh: tuple[tuple[str, int], ...]
    before: tuple[Move, ...]
    after: tuple[Move, ...]
    fused: Move | None
    computed: tuple[tuple[str, str], ...]

    @property
    def formula(self) -> str:
        """The letters of all arrays, as in ``jnp.einsum``."""
        return f"{self.lhs},{self.rhs}->{self.out}"

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves, in order."""
        return (*self.before, *self.after)

    @property
    def communicates(self) -> bool:
        """Whether anything is sent."""
        return any(move.kind != "slice" for move in self.moves)

    @property
    def elements_sent(self) -> int:
        """Elements that one rank sends in all."""
        return sum(elements_sent(move, dict(self.mesh)) for move in self.moves)

    @property
    def left_alone(self) -> int:
        """How many moves send something without being fused with the product."""
        return sum(move.kind != "slice" and move is not self.fused for move in self.moves)

    def letters(self, place: str) -> str:
        """The letters of ``lhs``, ``rhs`` or ``out``."""
        return {"lhs": self.lhs, "rhs": self.rhs, "out": self.out}[place]

    def plan(self, move: Move, *, dtype: str = "bfloat16", template: str | None = None) -> Plan:
        """The plan of one of the moves, from its usual template or another.

        Raises:
          InputError: the move is a slice, for which there is nothing to plan.
        """
        if move.kind == "slice":
            raise InputError(f"{move}: it needs no communication, so no plan")
        ranks = ranks_of(move, dict(self.mesh))
        letters = self.letters(move.place)
        extents = dict(zip(letters, move.shape, strict=True))
        make = templates.get(template or move.template)
        if move.kind == "all_to_all":
            extents[move.gather] *= ranks
            axes = {
                "split_from": letters.index(move.gather),
                "split_to": letters.index(move.scatter),
            }
        else:
            if move.kind == "all_gather":
                extents[move.gather] *= ranks
            letter = move.gather or move.scatter
            axes = {"axis": letters.index(letter) if letter else 0}
        produced = move.place == "out"
        made: Plan = make(ranks, tuple(extents.values()), dtype=dtype, produced=produced, **axes)
        return made

    def __str__(self) -> str:
        parts = [
            f"[{move} + dot]" if move is self.fused else str(move)
            for move in (*self.before, *((None,) if self.fused is None else ()), *self.after)
            if move is not None
        ]
        if self.fused is None:
            parts.insert(len(self.before), "dot")
        return "; ".join(parts)


@importers.register("shardings")
def derive(
    formula: str,
    lhs: Any,
    rhs: Any,
    out: Any,
    *,
    shapes: tuple[Sequence[int], Sequence[int]],
    mesh: Mapping[str, int] | jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    cut: Mapping[str, Sequence[str]] | None = None,
) -> Derived:
    """The communication of a contraction whose operands and result are sharded so.

    Args:
      formula: letters, as in ``jnp.einsum``: ``"bmk,kn->bmn"``. Each letter is in two of the
        three arrays, or in all (a batch letter).
      lhs, rhs, out: PartitionSpec or NamedSharding of each.
      shapes: whole extents of ``lhs`` and ``rhs``, in elements.
      mesh: extent of each axis; may be left out if a NamedSharding has it.
      cut: the mesh axes that cut the product along each letter, where that is decided already;
        None: chosen so that the fewest moves are left without a product to overlap with.

    Returns:
      The moves, and which of them is fused with the product.

    Raises:
      InputError: formula, shapes or shardings do not fit each other.
    """
    letters = _letters(formula)
    sizes = _sizes(letters, shapes)
    axes = _mesh(mesh, (lhs, rhs, out))
    held: list[dict[str, tuple[str, ...]]] = [
        _sharding(name, spec, own, sizes, axes)
        for name, spec, own in zip(PLACES, (lhs, rhs, out), letters, strict=True)
    ]
    if cut is not None:
        return _moves(letters, held, _decided(letters, cut, sizes, axes), sizes, axes)
    options = (_moves(letters, held, cut, sizes, axes) for cut in _cuts(letters, held, sizes, axes))
    return min(options, key=lambda d: (d.left_alone, d.elements_sent, len(d.moves)))


def formula_of(dimension_numbers: Any, lhs_rank: int, rhs_rank: int) -> str:
    """The formula of a ``lax.dot_general``, by its dimension numbers and its operands' ranks."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    names = iter("abcdefghijklmnopqrstuvwxyz")
    lhs, rhs, out = [""] * lhs_rank, [""] * rhs_rank, ""
    for i, j in zip(lhs_batch, rhs_batch, strict=True):
        lhs[i] = rhs[j] = next(names)
        out += lhs[i]
    for i, j in zip(lhs_contract, rhs_contract, strict=True):
        lhs[i] = rhs[j] = next(names)
    for own in (lhs, rhs):
        for d, name in enumerate(own):
            if not name:
                own[d] = next(names)
                out += own[d]
    return f"{''.join(lhs)},{''.join(rhs)}->{out}"


def _letters(formula: str) -> tuple[str, str, str]:
    found = re.fullmatch(r"([a-z]+),([a-z]+)->([a-z]*)", formula.replace(" ", ""))
    if found is None:
        raise InputError(
            f"formula {formula!r}: needs two operands and a result in lower-case letters, such as "
            f"'bmk,kn->bmn'"
        )
    letters = (found[1], found[2], found[3])
    for own in letters:
        if len(set(own)) != len(own):
            raise InputError(f"formula {formula!r}: {own!r} has a letter twice")
    for letter in dict.fromkeys("".join(letters)):
        if sum(letter in own for own in letters) < 2:
            raise InputError(
                f"formula {formula!r}: letter {letter} is in one array only; sum it, or leave it "
                f"out, before the product"
            )
    return letters


def _sizes(
    letters: tuple[str, str, str], shapes: tuple[Sequence[int], Sequence[int]]
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, own, shape in zip(PLACES, letters, shapes, strict=False):
        if len(own) != len(shape):
            raise InputError(f"{name}: letters {own!r} need {len(own)} extents, found {shape}")
        for letter, size in zip(own, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise InputError(
                    f"{name}: letter {letter} has extent {size}, but {sizes[letter]} in lhs"
                )
    return sizes


def _mesh(mesh: Any, specs: Sequence[Any]) -> dict[str, int]:
    given = [spec.mesh for spec in specs if isinstance(spec, jax.sharding.NamedSharding)]
    given += [] if mesh is None else [mesh]
    found = [dict(m if isinstance(m, Mapping) else m.shape) for m in given]
    if not found:
        raise InputError("mesh: needs the extent of each mesh axis, or a NamedSharding that has it")
    if any(other != found[0] for other in found):
        raise InputError(f"mesh: the shardings are over different meshes: {found}")
    return found[0]


def _sharding(
    name: str, spec: Any, letters: str, sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """The axes of each letter, without those of a single rank."""
    spec = spec.spec if isinstance(spec, jax.sharding.NamedSharding) else spec
    if len(spec) > len(letters):
        raise InputError(
            f"{name}: {spec} shards {len(spec)} dimensions, letters {letters!r} have {len(letters)}"
        )
    found: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for letter, entry in itertools.zip_longest(letters, spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise InputError(f"{name}: {spec} leaves letter {letter} open; say how it is sharded")
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in names:
            if axis not in mesh:
                known = ", ".join(mesh)
                raise InputError(f"{name}: {spec} has no mesh axis {axis!r}; known: {known}")
            if axis in seen:
                raise InputError(f"{name}: {spec} has mesh axis {axis!r} twice")
            seen.add(axis)
        ranks = math.prod(mesh[axis] for axis in names)
        if sizes[letter] % ranks:
            raise InputError(
                f"{name}: letter {letter} has extent {sizes[letter]}, which the {ranks} ranks of "
                f"{', '.join(names)} do not divide"
            )
        found[letter] = tuple(axis for axis in names if mesh[axis] > 1)
    return found


def _decided(
    letters: tuple[str, str, str],
    cut: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
) -> dict[str, tuple[str, ...]]:
    """``cut`` without axes of a single rank, once it is seen to fit."""
    used = [axis for names in cut.values() for axis in names]
    for letter, names in cut.items():
        if letter not in sizes:
            raise InputError(f"cut: no letter {letter!r} in {letters}")
        if unknown := [axis for axis in names if axis not in mesh or used.count(axis) > 1]:
            raise InputError(f"cut: mesh axis {unknown[0]!r} is unknown, or cuts two letters")
        ranks = math.prod(mesh[axis] for axis in names)
        if sizes[letter] % ranks:
            raise InputError(
                f"cut: letter {letter} has extent {sizes[letter]}, which the {ranks} ranks of "
                f"{', '.join(names)} do not divide"
            )
    kept = {x: tuple(axis for axis in names if mesh[axis] > 1) for x, names in cut.items()}
    return {x: names for x, names in kept.items() if names}


def _cuts(
    letters: tuple[str, str, str],
    held: Sequence[Sharding],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
) -> Iterator[dict[str, tuple[str, ...]]]:
    """Every way to cut the product: the axes of each letter."""
    every = "".join(dict.fromkeys("".join(letters)))
    choices: list[tuple[str, ...]] = []
    axes = [axis for axis, size in mesh.items() if size > 1]
    for axis in axes:
        found = [{x for x, names in own.items() if axis in names} for own in held]
        if found[0] or found[1]:
            choices.append(tuple(every))
        else:
            choices.append(tuple(found[2]) or ("",))
    allowed = [*_divided(axes, choices, sizes, mesh)]
    if not allowed:
        allowed = [*_divided(axes, [(*own, "") for own in choices], sizes, mesh)]
    for cut in allowed:
        orders = [itertools.permutations(names) for names in cut.values()]
        for order in itertools.product(*orders):
            yield dict(zip(cut, order, strict=True))


def _divided(
    axes: Sequence[str],
    choices: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
) -> Iterator[dict[str, tuple[str, ...]]]:
    """The choices of a letter for each axis whose letters are divided by their axes."""
    for chosen in itertools.product(*choices):
        cut: dict[str, tuple[str, ...]] = {}
        for axis, letter in zip(axes, chosen, strict=True):
            if letter:
                cut[letter] = (*cut.get(letter, ()), axis)
        if all(sizes[x] % math.prod(mesh[axis] for axis in names) == 0 for x, names in cut.items()):
            yield cut


def _moves(
    letters: tuple[str, str, str],
    held: Sequence[Sharding],
    cut: dict[str, tuple[str, ...]],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
) -> Derived:
    before: list[tuple[Move, ...]] = []
    for place, own, sharding in zip(PLACES[:2], letters[:2], held[:2], strict=True):
        moves = reshard(place, own, sharding, cut)
        before.append(with_shapes(moves, own, _local(own, sharding, sizes, mesh), mesh)[0])
    made = {x: cut.get(x, ()) for x in letters[2]}
    partial = [axis for x, names in cut.items() if x not in letters[2] for axis in names]
    moves = reshard("out", letters[2], made, held[2], partial)
    after = with_shapes(moves, letters[2], _local(letters[2], made, sizes, mesh), mesh)[0]
    near = [own[-1] for own in before if own and own[-1].kind in FUSED_BEFORE]
    near += [move for move in after[:1] if move.kind in FUSED_AFTER]
    fused = max(near, key=lambda move: elements_sent(move, mesh), default=None)
    return Derived(
        *letters,
        mesh=tuple(mesh.items()),
        before=tuple(sorted((*before[0], *before[1]), key=lambda move: move is fused)),
        after=after,
        fused=fused,
        computed=tuple((axis, x) for x, names in cut.items() for axis in names),
    )


def _local(
    letters: str, sharding: Sharding, sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> tuple[int, ...]:
    return tuple(sizes[x] // math.prod(mesh[axis] for axis in sharding[x]) for x in letters)
