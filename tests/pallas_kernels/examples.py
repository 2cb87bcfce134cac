"""A small instance of a local kernel, as the conformance suite wants it.

The test module of each file in ``pallas_kernels`` that makes local kernels has a tuple ``EXAMPLES``
of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from syncopate_jax.kernel.local import PallasKernel


@dataclass(frozen=True)
class Example:
    """A kernel and its operands.

    Attributes:
      maker: the function of ``pallas_kernels`` that makes it.
      shapes: of the operands, by name, in order.
      tolerance: of its result beside the reference's, relative and absolute.
    """

    name: str
    maker: Callable[..., PallasKernel]
    make: Callable[[], PallasKernel]
    shapes: dict[str, tuple[int, ...]]
    dtype: str = "float32"
    tolerance: float = 1e-5
