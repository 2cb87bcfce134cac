"""Bodies that are seen to give the same in any order: they keep sums and maxima, used at the end.

Of each reference that lasts from step to step: it is started whole at the first step, with what no
block decides; then one operation, a sum or a maximum or a minimum, adds something to it that comes
of the step's blocks alone; at the last step results are made of it, and of no block. What is not
seen to be so may be right all the same, and is tried (``tried_orders.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax._src.state.types import ReadEffect  # read at 0.11.2 and 0.12.0.1
from jax.extend import core

from syncopate_jax.kernel.carried_state import computed, is_number
from syncopate_jax.kernel.step_numbers import CALLS

MOST_POINTS = 256
"""Kinds of steps that are read, each once."""
ADDS = {"add": "add", "add_any": "add", "sub": "add", "max": "max", "min": "min"}


class _UnseenError(Exception):
    """It is not seen that the order is of no matter."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A value that is no known number.

    Attributes:
      block: whether something of the step's blocks is in it.
      state: what is in it of references that last, each as (reference, its version).
      sum_of: the (reference, version, place) of which it is the contents, with something added.
      by: the operation that added it; None where nothing was.
    """

    block: bool = False
    state: frozenset[tuple[Any, int]] = frozenset()
    sum_of: tuple[Any, int, Any] | None = None
    by: str | None = None


def accumulates(
    jaxpr: Any,
    grid: Sequence[int],
    reduction: Sequence[int],
    reordered: Sequence[int],
    *,
    blocks: Sequence[bool],
    state: Sequence[bool],
) -> bool:
    """Whether the program is seen to give the same in any order of the axes ``reordered``.

    Its inputs are indices, then visits; ``blocks`` and ``state`` say of each constant whether it is
    a reference to blocks of the step, and to what steps leave behind.
    """
    numbers = [  # of visits in another order, all between the first and the last are alike
        sorted({0, 1, grid[a] - 1}) if a in reordered else range(grid[a]) for a in reduction
    ]
    if math.prod(map(len, numbers)) > MOST_POINTS:
        return False
    half = len(grid)
    last = tuple(grid[a] - 1 for a in reduction)
    indices = {v: _Made(block=a in reordered) for a, v in enumerate(jaxpr.invars[:half])}
    reader = _Reader(jaxpr, blocks, state)
    try:
        for point in itertools.product(*numbers):
            known: dict[Any, Any] = dict(indices)
            for a, number in zip(reduction, point, strict=True):
                known[jaxpr.invars[half + a]] = np.int32(number)
                if a not in reordered:
                    known[jaxpr.invars[a]] = np.int32(number)
            reader.step(known, first=not any(point), last=point == last)
    except _UnseenError:
        return False
    return True


class _Reader:
    def __init__(self, jaxpr: Any, blocks: Sequence[bool], state: Sequence[bool]):
        self.jaxpr = jaxpr
        self.blocks = {v for v, of_block in zip(jaxpr.constvars, blocks, strict=True) if of_block}
        self.state = {v for v, kept in zip(jaxpr.constvars, state, strict=True) if kept}
        self.by: dict[Any, str] = {}
        self.started: set[Any] = set()

    def step(self, known: Mapping[Any, Any], *, first: bool, last: bool) -> None:
        """Reads one step; raises _UnseenError."""
        self.first, self.last = first, last
        self.version = dict.fromkeys(self.state, 0)
        self.finished: set[Any] = set()
        self.chosen = 0
        self.run(self.jaxpr, dict(known), {}, sure=True)

    def run(
        self, jaxpr: Any, known: dict[Any, Any], outer: Mapping[Any, Any], *, sure: bool
    ) -> list[Any]:
        """``outer`` names references as the outermost program does; ``sure``: it runs always."""

        def value(v: Any) -> Any:
            if isinstance(v, core.Literal):
                found = np.asarray(v.val)
                return found[()] if found.ndim == 0 else _Made()
            return known.get(v, _Made())

        for eqn in jaxpr.eqns:
            ins = [value(v) for v in eqn.invars]
            there = [None if isinstance(v, core.Literal) else outer.get(v, v) for v in eqn.invars]
            known.update(zip(eqn.outvars, self._equation(eqn, ins, there, sure), strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Any], there: list[Any], sure: bool) -> list[Any]:
        name = eqn.primitive.name
        if name in ("get", "swap", "addupdate") and there[0] in self.state:
            return self._access(eqn, ins, there[0], sure)
        if name == "cond":
            return self._cond(eqn, ins, there, sure)
        if name in CALLS:
            return self._inside(eqn.params["jaxpr"], ins, there, sure)
        reads = all(isinstance(effect, ReadEffect) for effect in eqn.effects)
        if not reads or any(ref in self.state for ref in there):
            raise _UnseenError
        number = computed(eqn, ins)
        if number is not None:
            return [number]
        made = _joined(ins, block=any(ref in self.blocks for ref in there))
        if name in ADDS:
            made = replace(made, **_sum(name, ins))
        elif name == "convert_element_type" and jax.numpy.issubdtype(
            eqn.params["new_dtype"], jax.numpy.floating
        ):
            made = ins[0]
        return [made] * len(eqn.outvars)

    def _inside(self, closed: Any, ins: list[Any], there: list[Any], sure: bool) -> list[Any]:
        inner = closed.jaxpr
        known = dict(zip(inner.invars, ins, strict=True))
        return self.run(inner, known, dict(zip(inner.invars, there, strict=True)), sure=sure)

    def _cond(self, eqn: Any, ins: list[Any], there: list[Any], sure: bool) -> list[Any]:
        branches = eqn.params["branches"]
        if is_number(ins[0]):
            chosen = branches[min(max(int(ins[0]), 0), len(branches) - 1)]
            self.chosen += 1
            outs = self._inside(chosen, ins[1:], there[1:], sure)
            self.chosen -= 1
            return outs
        if ins[0].state:
            raise _UnseenError
        found = [self._inside(branch, ins[1:], there[1:], False) for branch in branches]
        return [_joined([ins[0], *each], block=False) for each in zip(*found, strict=True)]

    def _access(self, eqn: Any, ins: list[Any], ref: Any, sure: bool) -> list[Any]:
        """A read or a store of a reference that lasts."""
        name = eqn.primitive.name
        at = eqn.invars[1 if name == "get" else 2 :]
        place = (eqn.params["tree"], *(v.val if isinstance(v, core.Literal) else v for v in at))
        here = (ref, self.version[ref])
        if name == "get":
            if any(isinstance(v, _Made) and v.state for v in ins[1:]):
                raise _UnseenError
            block = any(isinstance(v, _Made) and v.block for v in ins[1:])
            return [_Made(block=block, state=frozenset([here]), sum_of=(*here, place))]
        stored = ins[1] if isinstance(ins[1], _Made) else _Made()
        if any(isinstance(v, _Made) and v.state for v in ins[2:]) or ref in self.finished:
            raise _UnseenError
        if self.chosen and stored.block:  # at some steps only, so which block they have matters
            raise _UnseenError
        if name == "addupdate" and not stored.state:
            self._adds(ref, "add")
        elif name == "swap" and stored.sum_of == (*here, place):
            if stored.by is not None:
                self._adds(ref, stored.by)
        elif name == "swap" and sure and not stored.block and _whole(eqn):
            self._sets(ref, stored)
        else:
            raise _UnseenError
        self.version[ref] += 1
        return [_Made(block=True, state=frozenset([here]))] * len(eqn.outvars)

    def _adds(self, ref: Any, by: str) -> None:
        if ref not in self.started or self.by.setdefault(ref, by) != by:
            raise _UnseenError

    def _sets(self, ref: Any, stored: _Made) -> None:
        """A start, or what a result is in the end, from what all steps have added."""
        if not stored.state and self.first and ref not in self.started:
            self.started.add(ref)
            return
        current = all(self.version[kept] == version for kept, version in stored.state)
        if not (self.last and current and all(kept in self.started for kept, _ in stored.state)):
            raise _UnseenError
        self.finished |= {ref, *(kept for kept, _ in stored.state)}


def _whole(eqn: Any) -> bool:
    return bool(eqn.outvars[0].aval.shape == eqn.invars[0].aval.shape)


def _joined(values: Sequence[Any], *, block: bool) -> _Made:
    made = [v for v in values if isinstance(v, _Made)]
    return _Made(block or any(v.block for v in made), frozenset().union(*(v.state for v in made)))


def _sum(name: str, ins: list[Any]) -> dict[str, Any]:
    """What the operation adds to, where it is a reference's contents and something else."""
    for at, other in ((0, 1), (1, 0)):
        old, added = ins[at], ins[other]
        if not isinstance(old, _Made) or old.sum_of is None or (name == "sub" and at == 1):
            continue
        alone = not (isinstance(added, _Made) and added.state)
        if alone and old.by in (None, ADDS[name]):
            return {"sum_of": old.sum_of, "by": ADDS[name]}
    return {}
