"""A backend that is realised differently for every target its kernels may be written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from syncopate_jax.backends.interface import Backend, Emitted, Work, wrong_target
from syncopate_jax.options import Launch


@dataclass(frozen=True, slots=True)
class ByTarget:
    """One name, one realisation a target; all agree on executors and on folding.

    Attributes:
      name: of all of them.
      realisations: by target.
    """

    name: str
    realisations: Mapping[str, Backend]

    @property
    def targets(self) -> tuple[str, ...]:
        """Kernel languages it works with."""
        return tuple(self.realisations)

    @property
    def folds(self) -> bool:
        """Whether it can run all ranks in one launch on one device."""
        return all(one.folds for one in self.realisations.values())

    def workers(self, launch: Launch, ranks: int) -> int:
        """Tile executors of a rank."""
        first, *_ = self.realisations.values()
        return first.workers(launch, ranks)

    def unsupported_reason(self, work: Work, target: str) -> str | None:
        """Why the work cannot be done; None when it can."""
        if target not in self.realisations:
            return wrong_target(self.name, self.targets, target)
        return self.realisations[target].unsupported_reason(work, target)

    def emit(self, work: Work, target: str) -> Emitted:
        """The fused kernel."""
        return self.realisations[target].emit(work, target)
