"""Loop kernels: local kernels of target ``mosaic_gpu``, which are handed their loop over tiles.

A loop kernel says which block of an operand it wants, by where the block starts in the operand;
``Places`` knows in which buffer that is. So the kernel's text is the same whether its operand is
the caller's array, one that is being gathered, or a peer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Use = Callable[[Any, Any, Any], None]
"""``use(matrix, row, column)``: a GMEM ref of two dimensions and where a block starts in it."""


class Places(Protocol):
    """Where blocks of a kernel's operands and results are."""

    def read(self, operand: str, starts: Sequence[Any], tile: Any, step: Any, use: Use) -> None:
        """Calls ``use`` with the block of ``operand`` at ``starts``, one start a dimension.

        ``tile`` is the loop's tile and ``step`` the position of the reduction step in its order.
        """
        ...

    def write(self, result: str, starts: Sequence[Any], tile: Any, use: Use) -> None:
        """Calls ``use`` with every place where the tile's block of ``result`` goes."""
        ...

    def addends(self, tile: Any) -> tuple[Any, Callable[[Any, Use], None]]:
        """How many tiles the epilogue adds, and where each of them is."""
        ...

    def step(self, position: Any) -> Sequence[Any]:
        """Index along each reduction axis at a position of the rank's step order."""
        ...

    def shape(self, operand: str) -> tuple[int, ...]:
        """Extents of an operand or result as the kernel sees it."""
        ...

    def dtype(self, operand: str) -> Any:
        """Its dtype; of a result, that of what the epilogue adds."""
        ...

    @property
    def has_addends(self) -> bool:
        """Whether any tile has addends."""
        ...

    @property
    def single_addends(self) -> bool:
        """Whether no tile has more than one addend."""
        ...

    @property
    def direct(self) -> bool:
        """Whether results are stored from registers, not by the copy unit."""
        ...


class LoopBody(Protocol):
    """The text of a loop kernel, and what launching it takes."""

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a CTA; they all call ``emit``."""
        ...

    @property
    def tile_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Parallel axes that the loop's ``m`` and ``n`` number, row-major."""
        ...

    def launch(self) -> Mapping[str, Any]:
        """Arguments of ``plgpu.kernel``: warpgroups and clusters, and their names."""
        ...

    def emit(self, kernel: Any, places: Places, loop: Any) -> None:
        """The tiles of ``loop``; called by all warpgroups of a computing CTA."""
        ...

    def unsupported_reason(self, kernel: Any) -> str | None:
        """Why the kernel cannot be computed so; None when it can."""
        ...
