"""Which factor of which dimension a collective moves, followed through reshapes and transposes.

A dimension is a product of factors, first one slowest. A collective marks one or two factors. On
the dot's side of it (inside) and on the other side (outside) arrays differ only in the extent of
the marked factors, so an operation that keeps every factor whole can happen on either side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Factor:
    """One factor of a dimension.

    Attributes:
      inside: its extent on the dot's side of the collective.
      outside: its extent on the other side: as inside, or more or less by the number of ranks.
      role: ``gather`` or ``scatter`` if the collective moves it, or empty.
    """

    inside: int
    outside: int
    role: str = ""


Dims = list[list[Factor]]


class Layout:
    """The dimensions of one array by their factors."""

    def __init__(self, dims: Dims):
        self.dims = dims

    @staticmethod
    def of(inside: Sequence[int], moved: dict[int, tuple[int, str]]) -> Layout:
        """One factor a dimension; ``moved`` gives extent outside and role of the marked ones."""
        return Layout(
            [
                [Factor(n, *moved[d])] if d in moved else [Factor(n, n)] if n != 1 else []
                for d, n in enumerate(inside)
            ]
        )

    @property
    def inside(self) -> tuple[int, ...]:
        return tuple(math.prod(f.inside for f in dim) for dim in self.dims)

    @property
    def outside(self) -> tuple[int, ...]:
        return tuple(math.prod(f.outside for f in dim) for dim in self.dims)

    @property
    def factors(self) -> list[Factor]:
        return [factor for dim in self.dims for factor in dim]

    def moved(self) -> set[int]:
        """Dimensions that hold a marked factor."""
        return {d for d, dim in enumerate(self.dims) if any(f.role for f in dim)}

    def transpose(self, permutation: Sequence[int]) -> Layout:
        return Layout([self.dims[d] for d in permutation])

    def reshape(self, shape: Sequence[int]) -> Layout | None:
        """The same factors as dimensions of ``shape``; None if that would cut a rank's block.

        Factors are cut where they must be, in this layout too.
        """
        queue = list(self.factors)
        dims: Dims = []
        for size in shape:
            dim: list[Factor] = []
            left = size
            while left > 1:
                factor = queue[0]
                if left % factor.inside and not self._cut(queue, left):
                    return None
                left //= queue[0].inside
                dim.append(queue.pop(0))
            while queue and queue[0].inside == 1:
                dim.append(queue.pop(0))
            dims.append(dim)
        return None if queue else Layout(dims)

    def _cut(self, queue: list[Factor], major: int) -> bool:
        """Cuts the first factor into ``major`` and the rest; False if it cannot be."""
        factor = queue[0]
        minor, ragged = divmod(factor.inside, major)
        if ragged or factor.outside % minor:
            return False
        outer = Factor(major, factor.outside // minor, factor.role)
        inner = Factor(minor, minor)
        queue[:1] = [outer, inner]
        for dim in self.dims:
            if factor in dim:
                at = dim.index(factor)
                dim[at : at + 1] = [outer, inner]
        return True
