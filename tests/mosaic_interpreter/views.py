"""What each warpgroup knows to have happened, and the accesses that this does not order.

An actor performs accesses in one order: a warpgroup by its own loads and stores (the generic
proxy), or an asynchronous unit that it or a barrier keeps in order. A view says, per actor, how
many of its accesses happened before. An access races with an earlier one of the same place if at
least one writes and the later one's view does not have the earlier one.

A warpgroup has three views, because hardware orders three ways of access apart: its own loads and
stores; those of shared memory by the copy unit and the tensor cores on its behalf; and those of
GMEM by the copy unit. What is in the first comes into the second by ``commit_smem``, and into the
third by a proxy fence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Actor = tuple[str, str]
View = dict[Actor, int]
Box = tuple[tuple[int, int], ...]


def learn(view: View, other: View) -> None:
    """Joins ``other`` into ``view``."""
    for actor, count in other.items():
        if view.get(actor, 0) < count:
            view[actor] = count


@dataclass(slots=True)
class Knowledge:
    """The three views of a warpgroup, or of who arrived at a barrier."""

    generic: View = field(default_factory=dict)
    smem: View = field(default_factory=dict)
    gmem: View = field(default_factory=dict)

    def copy(self) -> Knowledge:
        return Knowledge(dict(self.generic), dict(self.smem), dict(self.gmem))

    def learn(self, other: Knowledge) -> None:
        learn(self.generic, other.generic)
        learn(self.smem, other.smem)
        learn(self.gmem, other.gmem)

    def complete(self, actor: Actor, count: int) -> None:
        """Accesses of an asynchronous unit are known to be complete, to all ways of access."""
        for view in (self.generic, self.smem, self.gmem):
            learn(view, {actor: count})


@dataclass(frozen=True, slots=True)
class Access:
    """One access: the ``count``-th of its actor, of a box of a buffer, in words."""

    actor: Actor
    count: int
    writes: bool
    box: Box
    words: str


@dataclass(slots=True)
class History:
    """The accesses of one buffer, the latest of every actor to every box.

    The latest is enough: who knows of it knows of those before.
    """

    reads: dict[tuple[Actor, Box], Access] = field(default_factory=dict)
    writes: dict[tuple[Actor, Box], Access] = field(default_factory=dict)

    def add(self, access: Access, view: View) -> list[Access]:
        """Records an access; returns those that it races with."""
        against = [*self.writes.values()]
        if access.writes:
            against += self.reads.values()
        found = [
            other
            for other in against
            if view.get(other.actor, 0) < other.count and _meet(access.box, other.box)
        ]
        kind = self.writes if access.writes else self.reads
        kind[access.actor, access.box] = access
        return found


def _meet(a: Box, b: Box) -> bool:
    return all(x[0] < y[1] and y[0] < x[1] for x, y in zip(a, b, strict=True))
