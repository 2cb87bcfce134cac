"""What the dimensions of an HLO array are made of, through reshapes, transposes and bitcasts.

A dimension is a product of factors, the slowest first. A collective makes two of them of its own:
the ranks whose blocks lie one behind the other, and the blocks that go to one rank each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from syncopate_jax.importers.hlo_ops import ArrayType, HloOp

RANKS, BLOCKS = "ranks", "blocks"
Factor = tuple[str, int]  # what it is, and its extent
Dims = tuple[tuple[Factor, ...], ...]

SAME = ("copy", "convert", "optimization-barrier")
RESHAPES = ("bitcast", "reshape")


def dims_of(shape: Sequence[int], front: dict[int, Factor] | None = None) -> Dims:
    """A factor ``d0``, ``d1``, … for each dimension, and ``front`` before it.

    The extents of factors in ``front`` are taken out of ``shape``.
    """
    found = []
    for d, extent in enumerate(shape):
        own = [front[d]] if front and d in front else []
        rest = extent // own[0][1] if own else extent
        found.append((*own, *([(f"d{d}", rest)] if rest != 1 else [])))
    return tuple(found)


def through(op: HloOp, source: HloOp, dims: Dims, *, backward: bool = False) -> Dims | None:
    """The dimensions of ``op``'s result, of which ``dims`` are those of its operand ``source``.

    ``backward``: those of ``source``, of which ``dims`` are those of the result. None for an
    operation that does more than name and order elements anew, or that cuts ranks or blocks; nor
    where the text says other extents than ``dims`` have, as damaged text may.
    """
    if len(op.types) != 1 or not source.types:
        return None
    old, new = source.types[-1], op.types[0]
    known = new if backward else old
    if tuple(math.prod(n for _, n in factors) for factors in dims) != known.shape:
        return None
    if op.opcode.endswith("-done") or op.opcode in SAME:
        return dims if old.shape == new.shape else None
    if op.opcode == "transpose":
        order = list(op.ints.get("dimensions", ()))
        if sorted(order) != list(range(len(old.shape))):
            return None
        if new.shape != tuple(old.shape[i] for i in order):
            return None
        return tuple(dims[order.index(i) if backward else order[i]] for i in range(len(order)))
    if op.opcode not in RESHAPES:
        return None
    before, after = (new, old) if backward else (old, new)
    # A reshape keeps the order of elements; a bitcast that in memory.
    physical = op.opcode == "bitcast"
    factors = [factor for d in _order(before, physical) for factor in dims[d]]
    order = _order(after, physical)
    cut = _cut(factors, [after.shape[d] for d in order])
    return None if cut is None else tuple(cut[order.index(d)] for d in range(len(order)))


def _order(array: ArrayType, physical: bool) -> list[int]:
    """The dimensions of an array, the slowest first."""
    every = list(range(len(array.shape)))
    layout = list(reversed(array.layout))
    return layout if physical and sorted(layout) == every else every


def _cut(factors: list[Factor], extents: Sequence[int]) -> list[tuple[Factor, ...]] | None:
    """The factors as dimensions of these extents; None where that would cut ranks or blocks."""
    queue = list(factors)
    found = []
    for extent in extents:
        own: list[Factor] = []
        while extent > 1:
            if not queue:
                return None
            name, size = queue.pop(0)
            if size == 0:  # nothing is there to be named
                return None
            if extent % size == 0:
                own.append((name, size))
                extent //= size
            elif size % extent or name in (RANKS, BLOCKS):
                return None
            else:
                own.append((name, extent))
                queue.insert(0, (name, size // extent))
                extent = 1
        found.append(tuple(own))
    return None if queue else found
