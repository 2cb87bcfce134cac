"""How wide the tiles of a fused product are: wide ones, unless they leave executors idle."""

from __future__ import annotations

import math
from collections.abc import Mapping

from syncopate_jax.pallas_kernels import matmul_tpu

WIDE, NARROW = 256, 128  # columns
NARROW_COST = 1.15
"""Time of a narrow tile over that of half a wide one, with some to spare: products alone take 1.01
to 1.1 on an H200, the more the shorter k (``experiments/results/local_gemm_h200_candidates.json``),
and a fused kernel has twice as many tiles to send and to signal."""


def columns(out: str, sizes: Mapping[str, int], rows: int, workers: int) -> int:
    """Columns of a tile: ``NARROW`` where tiles of ``WIDE`` take longer in all their turns, or one.

    Half as wide a tile takes half as long, and there are twice as many: narrow ones gain where the
    last turn of wide ones, such as the only one of a small problem, leaves most executors idle, and
    where most of the few columns of wide tiles lie past the edge. In a single turn nothing is left
    to compute while a chunk is on its way.

    Args:
      out: letters of the result; a tile has one index of each that is no matrix letter.
      sizes: extent of every letter, in elements.
      rows: of a tile.
      workers: tiles that run at a time.
    """
    row_letter, column_letter = (x for x in out if x in matmul_tpu.MATRIX_LETTERS)

    def turns(width: int) -> int:
        cut = {row_letter: rows, column_letter: width}
        letters = (x for x in out if x.isalpha())
        return -(-math.prod(-(-sizes[x] // cut.get(x, 1)) for x in letters) // workers)

    if sizes[column_letter] <= NARROW or turns(WIDE) == 1:
        return NARROW
    return NARROW if turns(NARROW) * NARROW * NARROW_COST < turns(WIDE) * WIDE else WIDE
