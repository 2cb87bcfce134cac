"""Choices that were measured: the backend and its knobs for an operator on a kind of device.

``measured.json`` holds, per kind of device, the fastest realisation of each problem that was timed
against XLA (``experiments/two_gpus``), also where that is XLA's own. A problem that is not in it
takes the choice of the nearest that is, if there is one whose sizes are like its own.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from syncopate_jax.options import Launch

FILE = "measured.json"
LIKE = 0.5  # how far, in powers of two, a size may be from a measured one
WHOLE = {"m": 128, "n": 256, "k": 64}  # tiles; what they cut is like nothing that was measured


@dataclass(frozen=True, slots=True)
class Problem:
    """An operator's exchange and the product of one rank.

    Attributes:
      operands: letters of the operands, such as ``"bmk,kn"``.
      kind, place, gather, scatter: as in ``ops.spec.Contraction``.
      m, k, n: extents of one rank's product, ``b`` a part of ``m``.
    """

    operands: str
    kind: str
    place: str
    gather: str
    scatter: str
    ranks: int
    m: int
    k: int
    n: int

    @property
    def form(self) -> tuple[Any, ...]:
        """All but the extents."""
        return (self.operands, self.kind, self.place, self.gather, self.scatter, self.ranks)

    @property
    def extents(self) -> tuple[int, int, int]:
        """Rows, depth and columns, in elements."""
        return self.m, self.k, self.n

    def distance(self, other: Problem) -> float:
        """By how much the most different extent differs, in powers of two."""
        pairs = zip(self.extents, other.extents, strict=True)
        return max(abs(math.log2(a / b)) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Choice:
    """How to realise a problem; ``communicating`` as in ``options.Launch``."""

    backend: str
    split: int | None = None
    communicating: int | None = None

    @property
    def launch(self) -> Launch:
        """What the kernel may use of the device."""
        return Launch(communicating=self.communicating)


XLA = Choice("xla")


def choose(problem: Problem, device_kind: str) -> Choice:
    """What was fastest for the problem or one like it, else XLA's collective beside a product."""
    sizes = ((getattr(problem, letter), size) for letter, size in WHOLE.items())
    whole = all(extent > 0 and extent % size == 0 for extent, size in sizes)
    like = [entry for entry in _entries(device_kind) if entry[0].form == problem.form]
    near = [
        entry
        for entry in like
        if entry[0].extents == problem.extents or (whole and entry[0].distance(problem) <= LIKE)
    ]
    return min(near, key=lambda entry: entry[0].distance(problem), default=(problem, XLA))[1]


@functools.cache
def _entries(device_kind: str) -> tuple[tuple[Problem, Choice], ...]:
    text = resources.files("syncopate_jax.tune").joinpath(FILE).read_text()
    found: Mapping[str, Any] = json.loads(text)
    entries = found.get(device_kind, [])
    return tuple((Problem(**e["problem"]), Choice(**e["choice"])) for e in entries)
