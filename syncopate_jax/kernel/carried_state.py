"""Whether a body makes a tile of what another left in scratch, and asks once for its addend.

Tiles are computed in the order in which chunks arrive, which differs from rank to rank, so each
must stand alone. The body is followed through all steps of some tiles, with the tile's indices
known: a result stored from scratch that this tile has not written is another tile's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.kernel.step_numbers import CALLS, COMPARISONS

MOST_STEPS = 512
"""Steps of a tile that are followed: the first ones, and the last."""
FIRST_TILES, FEW_STEPS = 3, 16
"""Tiles of which so many are followed, and how many of the others."""
ALL_TILES = 16
"""Tiles of a grid all of which are followed."""

KNOWN: dict[str, Callable[..., Any]] = {
    **COMPARISONS,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "rem": np.fmod,
}
"""What is computed of known numbers; booleans are NumPy's."""
ADDEND = "syncopate_addend"
"""Name of the jitted function that stands for ``addend`` in a body that is followed."""
STALE = object()
"""A value, or the contents of a reference, in which another tile's scratch may be."""


def check_state(
    name: str,
    jaxpr: Any,
    grid: Sequence[int],
    reduction: Sequence[int],
    *,
    scratch: Sequence[bool],
    results: Sequence[bool],
    addend: bool,
) -> None:
    """Raises UnsupportedError where a tile surely stores what another left in scratch.

    ``jaxpr`` has the grid's indices as its first inputs; ``scratch`` and ``results`` say of each
    constant whether it is such a reference. What cannot be told, such as a store under a condition
    on data, counts as right here; ``tried_orders`` tries it.

    Also where there is an ``addend``, called by the name ADDEND, and a tile does not surely ask for
    it once: the peers' partial results would be lost; a second time it would wait for ever, since
    they come once.
    """
    if not (any(scratch) or addend) or 0 in grid:
        return
    held = [var for var, is_scratch in zip(jaxpr.constvars, scratch, strict=True) if is_scratch]
    stored = [var for var, is_result in zip(jaxpr.constvars, results, strict=True) if is_result]
    steps = [range(n) if a in reduction else range(1) for a, n in enumerate(grid)]
    points = list(itertools.islice(itertools.product(*steps), MOST_STEPS))
    end = tuple(numbers[-1] for numbers in steps)
    points += [end] if points[-1] != end else []
    between = are_interleaved(grid, reduction)
    for number, tile in enumerate(tiles_of_all_kinds(grid, reduction)):
        if number == FIRST_TILES and len(points) > FEW_STEPS:
            points = [*points[: FEW_STEPS - 1], end]
        walk = _Walk(name, stored, addend)
        refs: dict[Any, Any] = dict.fromkeys(held, STALE)
        asked = []
        for point in points:
            here = [np.int32(t + s) for t, s in zip(tile, point, strict=True)]
            before = walk.asked
            refs = dict.fromkeys(held, STALE) if between else refs
            walk.run(jaxpr, dict(zip(jaxpr.invars, here, strict=False)), refs)
            asked.append(walk.asked - before)
            if walk.found:
                where = tuple(int(i) for i in here)
                raise left_in_scratch(name, f"the tile at grid point {where}", between)
        if addend and sum(asked) != 1:
            found = f"{sum(asked)} times in"
            if len(points) > 1 and set(asked) == {1}:
                found = f"at each of {math.prod(map(len, steps))} steps of"
            raise _not_once(name, f"{found} the tile at grid point {tuple(tile)}")


def tiles_of_all_kinds(grid: Sequence[int], reduction: Sequence[int]) -> list[list[int]]:
    """Tiles as grid points of their first steps: all of few; else some of the beginning, the
    middle, the end, and what is beside them: bodies may do this in even tiles and that in odd."""
    counts = [1 if axis in reduction else n for axis, n in enumerate(grid)]
    corners = [[(n - 1) * part // 2 for n in counts] for part in (0, 1, 2)]
    if math.prod(counts) <= ALL_TILES:
        others = [list(tile) for tile in np.ndindex(*counts)]
    else:
        aside = itertools.product(corners, range(len(counts)), (-2, -1, 1, 2))
        others = [
            [*tile[:axis], tile[axis] + by, *tile[axis + 1 :]]
            for tile, axis, by in aside
            if 0 <= tile[axis] + by < counts[axis]
        ]
    return [list(tile) for tile in dict.fromkeys(map(tuple, corners + others))]


def are_interleaved(grid: Sequence[int], reduction: Sequence[int]) -> bool:
    """Whether the grid takes steps of other tiles between those of one."""
    long = [axis for axis, n in enumerate(grid) if n > 1]
    first = next((axis for axis in long if axis in reduction), len(grid))
    return any(axis > first for axis in long if axis not in reduction)


def left_in_scratch(name: str, tile: str, between: bool) -> UnsupportedError:
    """The refusal of a tile, in words; ``between`` its steps or before them."""
    if between:
        return UnsupportedError(
            f"kernel {name}: {tile} makes its result of what is in scratch since an earlier step, "
            f"but the grid takes steps of other tiles between, which share the scratch; put the "
            f"axes that are reduced last in the grid, or use backend 'xla', which computes what "
            f"the grid says"
        )
    return UnsupportedError(
        f"kernel {name}: {tile} makes its result of what an earlier tile left in scratch, but "
        f"tiles are computed in the order in which chunks arrive; start the scratch at the first "
        f"step of every tile, or use backend 'xla'"
    )


def _not_once(name: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"kernel {name} calls addend() {found}; it needs one call a tile, as the sums of peers "
        f"come once: add its value to the tile before it is stored, at the last step of a "
        f"reduction under pl.when"
    )


class _Walk:
    """Follows one tile; references are variables of the outermost program."""

    def __init__(self, name: str, stored: Iterable[Any], addend: bool):
        self.name, self.stored, self.addend = name, set(stored), addend
        self.found, self.asked = False, 0

    def run(
        self,
        jaxpr: Any,
        known: dict[Any, Any],
        refs: dict[Any, Any],
        outer: dict[Any, Any] | None = None,
    ) -> list[Any]:
        """Runs ``jaxpr``; ``outer`` names its references as the outermost program does."""
        outer = {} if outer is None else outer

        def value(v: Any) -> Any:
            return np.asarray(v.val)[()] if isinstance(v, core.Literal) else known.get(v)

        for eqn in jaxpr.eqns:
            ins = [value(v) for v in eqn.invars]
            there = [None if isinstance(v, core.Literal) else outer.get(v, v) for v in eqn.invars]
            outs = self._equation(eqn, ins, there, refs)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _equation(
        self, eqn: Any, ins: list[Any], there: list[Any], refs: dict[Any, Any]
    ) -> list[Any]:
        name, outs = eqn.primitive.name, len(eqn.outvars)
        if name in ("get", "swap", "addupdate"):
            before = refs.get(there[0])
            if name != "get":
                self._store(there[0], ins[1], refs, adds=name == "addupdate")
            return [before] * outs
        if name == "cond" and is_number(ins[0]):
            branches = eqn.params["branches"]
            chosen = branches[min(max(int(ins[0]), 0), len(branches) - 1)].jaxpr
            return self._inside(chosen, ins[1:], there[1:], refs)
        if name in CALLS:
            self.asked += eqn.params.get("name") == ADDEND
            return self._inside(eqn.params["jaxpr"].jaxpr, ins, there, refs)
        if self.addend and any(map(_asks, core.jaxprs_in_params(eqn.params))):
            where = "under a condition on values" if name == "cond" else "in a loop"
            raise _not_once(self.name, where)
        if name == "select_n" and is_number(ins[0]):
            return [ins[1 + int(ins[0])]]
        if name == "mul" and any(is_number(v) and v == 0 for v in ins):
            return [None]
        touched = [ref for ref in there if ref in refs]
        for ref in touched:  # in a way that is not followed, so it may well be written
            refs[ref] = None
        if not touched and any(v is STALE for v in ins):
            return [STALE] * outs
        return [computed(eqn, ins)] * outs

    def _store(self, ref: Any, value: Any, refs: dict[Any, Any], *, adds: bool) -> None:
        stale = value is STALE or (adds and refs.get(ref) is STALE)
        if ref in refs:
            refs[ref] = STALE if stale else None
        self.found |= stale and ref in self.stored

    def _inside(
        self, jaxpr: Any, ins: list[Any], there: list[Any], refs: dict[Any, Any]
    ) -> list[Any]:
        outer = dict(zip(jaxpr.invars, there, strict=True))
        return self.run(jaxpr, dict(zip(jaxpr.invars, ins, strict=True)), refs, outer)


def computed(eqn: Any, ins: Sequence[Any]) -> Any:
    """The number that is computed of known ones, or None; one in all places is a number too."""
    name = eqn.primitive.name
    if not ins or not all(is_number(v) for v in ins):
        return None
    if name in KNOWN:
        with np.errstate(all="ignore"):
            return KNOWN[name](*ins)
    if name == "convert_element_type":
        return np.dtype(eqn.params["new_dtype"]).type(ins[0])
    if name in ("broadcast_in_dim", "reshape", "squeeze"):
        return ins[0]
    return None


def is_number(value: Any) -> bool:
    """Whether a value is a known number."""
    return isinstance(value, np.generic)


def _asks(jaxpr: Any) -> bool:
    """Whether the addend is asked for in ``jaxpr``."""
    return any(
        eqn.params.get("name") == ADDEND or any(map(_asks, core.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )
