"""From one sharding of an array to another: the moves, in the order in which they run.

A sharding gives each letter (dimension) the mesh axes that cut it, the slowest first. Only the last
axes of a letter can be taken off or put on without a rank's block losing its order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from syncopate_jax.registry import USUAL_TEMPLATES

Sharding = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Move:
    """One step that changes how an array is sharded.

    Attributes:
      place: ``lhs``, ``rhs`` or ``out``: the array.
      kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, or ``slice``, which
        needs no communication.
      axis_names: the mesh axes it runs over, as one axis, the first slowest.
      gather, scatter: the letter that loses these axes and the letter that gets them, or empty.
      shape: extents of a rank's array before it.
    """

    place: str
    kind: str
    axis_names: tuple[str, ...]
    gather: str = ""
    scatter: str = ""
    shape: tuple[int, ...] = ()

    @property
    def template(self) -> str:
        """Name of the plan template that does it; empty for a slice, which takes a part."""
        return USUAL_TEMPLATES.get(self.kind, "")

    def __str__(self) -> str:
        axes = ",".join(self.axis_names)
        along = " to ".join(x for x in (self.gather, self.scatter) if x)
        return f"{self.kind} {self.place} {along}".strip() + f" over {axes}"


def reshard(
    place: str,
    letters: str,
    held: Sharding,
    wanted: Sharding,
    partial: Sequence[str] = (),
) -> tuple[Move, ...]:
    """The moves from ``held`` to ``wanted`` of an array; ``partial`` axes hold terms of a sum."""
    state = {x: held.get(x, ()) for x in letters}
    target = {x: wanted.get(x, ()) for x in letters}
    left = list(partial)
    moves: list[Move] = []
    while (move := _next(place, state, target, left)) is not None:
        names = move.axis_names
        if move.gather:
            state[move.gather] = state[move.gather][: -len(names)]
        if move.scatter:
            state[move.scatter] = (*state[move.scatter], *names)
        left = [a for a in left if a not in names]
        joined = _join(moves[-1], move) if moves else None
        moves[-1:] = [joined] if joined else [*moves[-1:], move]
    return tuple(moves)


def _next(
    place: str,
    state: Mapping[str, tuple[str, ...]],
    target: Mapping[str, tuple[str, ...]],
    partial: Sequence[str],
) -> Move | None:
    """The next move: what makes the array smaller first, a gather last."""
    for letter in state:
        names = _prefix(_needed(state, target, letter), partial)
        if names:
            return Move(place, "reduce_scatter", names, scatter=letter)
    used = {name for names in state.values() for name in names} | set(partial)
    for letter in state:
        needed = _needed(state, target, letter)
        if needed and needed[0] not in used:
            return Move(place, "slice", needed[:1], scatter=letter)
    final = {name for names in target.values() for name in names}
    if rest := tuple(name for name in partial if name not in final):
        return Move(place, "all_reduce", rest)
    for letter, names in _excess(state, target):
        for count in range(len(names), 0, -1):
            for other in state:
                if other != letter and _needed(state, target, other)[:count] == names[-count:]:
                    return Move(place, "all_to_all", names[-count:], letter, other)
    for letter, names in _excess(state, target):
        return Move(place, "all_gather", names[-1:], gather=letter)
    return None


def _excess(
    state: Mapping[str, tuple[str, ...]], target: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Letters with the axes at their end that they must lose."""
    for letter, names in state.items():
        kept = len(_common(names, target[letter]))
        if names[kept:]:
            yield letter, names[kept:]


def _needed(
    state: Mapping[str, tuple[str, ...]], target: Mapping[str, tuple[str, ...]], letter: str
) -> tuple[str, ...]:
    """The axes that a letter must still get; none while it has some to lose."""
    held, wanted = state[letter], target[letter]
    return wanted[len(held) :] if wanted[: len(held)] == held else ()


def _common(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return a[: min(len(a), len(b)) if count is None else count]


def _prefix(names: tuple[str, ...], among: Sequence[str]) -> tuple[str, ...]:
    count = next((i for i, name in enumerate(names) if name not in among), len(names))
    return names[:count]


def _join(first: Move, second: Move) -> Move | None:
    """Two moves as one over more axes; None if they are not of one kind and letter."""
    same = (first.kind, first.gather, first.scatter) == (second.kind, second.gather, second.scatter)
    if not same or first.kind == "all_to_all":
        return None
    if first.kind == "all_gather":  # the last axis went first
        return replace(first, axis_names=(*second.axis_names, *first.axis_names))
    return replace(first, axis_names=(*first.axis_names, *second.axis_names))


def with_shapes(
    moves: Sequence[Move], letters: str, shape: tuple[int, ...], mesh: Mapping[str, int]
) -> tuple[tuple[Move, ...], tuple[int, ...]]:
    """The moves with the extents that each meets, and the extents after the last."""
    found = []
    for move in moves:
        found.append(replace(move, shape=shape))
        ranks = ranks_of(move, mesh)
        extents = dict(zip(letters, shape, strict=True))
        if move.gather:
            extents[move.gather] *= ranks
        if move.scatter:
            extents[move.scatter] //= ranks
        shape = tuple(extents.values())
    return tuple(found), shape


def ranks_of(move: Move, mesh: Mapping[str, int]) -> int:
    """Number of ranks that a move runs over."""
    return math.prod(mesh[name] for name in move.axis_names)


def elements_sent(move: Move, mesh: Mapping[str, int]) -> int:
    """Elements that one rank sends, by an algorithm that sends no more than it must."""
    ranks, size = ranks_of(move, mesh), math.prod(move.shape)
    if move.kind == "slice":
        return 0
    if move.kind == "all_gather":
        return size * (ranks - 1)
    return size * (ranks - 1) * (2 if move.kind == "all_reduce" else 1) // ranks
