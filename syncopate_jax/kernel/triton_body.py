"""What a local kernel of target ``triton`` is made of: an annotated kernel and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from syncopate_jax.kernel.annotated import Annotated
from syncopate_jax.kernel.directives import Access


@dataclass(frozen=True, slots=True, eq=False)
class TritonBody:
    """The text of a Triton kernel, and what launching it takes.

    Attributes:
      function: as decorated by ``triton.jit``.
      source: its annotated source.
      arguments: value of every parameter that is no pointer.
      shapes: extents of every operand and result.
      num_warps, num_stages: as for Triton.
    """

    function: Any
    source: Annotated
    arguments: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    num_warps: int
    num_stages: int

    @property
    def has_addend(self) -> bool:
        """Whether partial results can be added to a tile."""
        return bool(self.source.accumulator)

    @property
    def pointers(self) -> dict[str, str]:
        """Parameter of each operand and result."""
        return {access.operand: access.pointer for access in self.source.accesses}

    @property
    def accesses(self) -> dict[str, Access]:
        """By operand."""
        return {access.operand: access for access in self.source.accesses}
