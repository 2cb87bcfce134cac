"""The natural order of a Triton product's tiles."""

import triton
import triton.language as tl


@triton.jit
def grouped_tile(tile, TILES_M: tl.constexpr, TILES_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile, down ``GROUP`` rows before the next column: both stay in L2."""
    group = tile // (GROUP * TILES_N)
    first = group * GROUP
    rows = tl.minimum(TILES_M - first, GROUP)
    inside = tile - group * (GROUP * TILES_N)
    return first + inside % rows, inside // rows
