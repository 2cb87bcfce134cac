"""The knobs that every operator takes, as one hashable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from syncopate_jax.errors import InputError

ORDERS = ("natural", "grouped", "snake")


@dataclass(frozen=True, slots=True)
class Options:
    """How an operator is realised; the result's value does not depend on it.

    Attributes:
      backend: how chunks are moved, or ``auto``: the fastest known for the shape.
      target: what the local kernel is written in; None: what the platform runs.
      plan: a Plan, the name of a plan template, or None for the operator's usual template.
      split: pieces each rank's chunk is cut into; None lets the operator choose. Where partial
        results are added it is lowered to the next number that gives whole tiles.
      tiles: tile sizes by letter (``{"m": 128, "n": 128, "k": 64}``), in elements, kept as sorted
        pairs; letters left out take the target's default.
      order: order of the tiles inside a chunk: ``natural``, ``grouped`` or ``snake``.
    """

    backend: str = "auto"
    target: str | None = None
    plan: Any = None
    split: int | None = None
    tiles: Mapping[str, int] | tuple[tuple[str, int], ...] | None = ()
    order: str = "natural"

    def __post_init__(self) -> None:
        for name, given in (("backend", self.backend), ("target", self.target)):
            if not isinstance(given, str) and (name, given) != ("target", None):
                raise InputError(f"{name}: needs a name, found {given!r}")
        if self.order not in ORDERS:
            raise InputError(f"order: needs one of {', '.join(ORDERS)}, found {self.order!r}")
        if self.split is not None and (not isinstance(self.split, int) or self.split < 1):
            raise InputError(f"split: needs an integer of at least 1 or None, found {self.split!r}")
        if not isinstance(self.tiles, Mapping | tuple | None):
            raise InputError(f"tiles: needs a mapping from letters to sizes, found {self.tiles!r}")
        pairs = self.tiles.items() if isinstance(self.tiles, Mapping) else self.tiles or ()
        object.__setattr__(self, "tiles", tuple(sorted(pairs)))
        for letter, size in self.tiles:
            if not isinstance(size, int) or size < 1:
                raise InputError(f"tiles: {letter} needs an integer of at least 1, found {size!r}")

    def using(self, **changes: Any) -> Options:
        """These options with some changed."""
        return replace(self, **changes)
