"""Whether a body gives the same in other orders of its reduction, tried on random blocks.

A tile is walked in the grid's order and in each order of the plan, in float64: sums, maxima and an
online softmax then agree to far below the difference that any other rule makes. Draws of several
kinds are tried, each of another tile: one sees what the next cannot, such as which of equal maxima
is kept. Of a long reduction some steps stand for all: the first and last of each order, a pair that
changes places, those of which the program has the number, and others spread between.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.kernel.blocks import block_indices
from syncopate_jax.kernel.body_values import Held, Machine, UntoldError, scratch, widened
from syncopate_jax.kernel.carried_state import (
    FIRST_TILES,
    are_interleaved,
    left_in_scratch,
    tiles_of_all_kinds,
)
from syncopate_jax.kernel.local import PallasKernel

EQUAL = "equal blocks"
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
DRAWS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "0 or 1": lambda rng, shape: rng.integers(0, 2, shape),
    EQUAL: lambda rng, shape: rng.standard_normal(shape),
    "of one sign": lambda rng, shape: rng.choice([-1, 1]) * rng.uniform(0.5, 1.5, shape),
    "positive": lambda rng, shape: rng.uniform(0.5, 1.5, shape),
    "negative": lambda rng, shape: -rng.uniform(0.5, 1.5, shape),
    "small": lambda rng, shape: 0.05 * rng.standard_normal(shape),
    "large": lambda rng, shape: 20 * rng.standard_normal(shape),
}
"""Fractions in a block; all blocks of an operand are alike where they are equal."""
MOST_NAMED = 16  # numbers in the program that steps and tiles are taken for
FEW_DRAWS = 4  # the first ones, where more would take long; large blocks have many values in each
MOST_AROUND = 3  # numbers in the program around which values are drawn too
REACHED = 0.02, 60.0  # sizes that the draws above have anyway
SIZES = 1e-8, 1e5  # those of bounds; beyond are guards, and what stands for infinity
ORDERS = 3  # that are tried: of the first ranks that have different ones
STEPS, MOST_STEPS = 8, 64  # of a long reduction along one axis; of one along several
EASY, MOST_WORK = 2e9, 1e10  # a second and some, in the unit of ``Machine.left``
DRAWN = 10  # what a drawn element costs, in that unit
TOLERANCE = 1e-9  # of the largest element; float64 rounds by 1e-16 of it


@dataclass(frozen=True, slots=True)
class Body:
    """A body as ``traced_body`` has it.

    Attributes:
      program: the jaxpr, whose inputs are indices, then visits.
      constants: what it uses from around it.
      roles: of each constant the operand or result that it is, "" for scratch, or None.
      doubt: why it looks as if it depended on the order, in words; None where nothing does.
    """

    program: Any
    constants: Sequence[Any]
    roles: Sequence[str | None]
    doubt: str | None


def check_orders(kernel: PallasKernel, body: Body, orders: Sequence[Sequence[int]]) -> None:
    """Raises UnsupportedError unless ``body`` gives the same in ``orders``, as far as is seen.

    Each of them is a permutation of the numbers of a tile's steps. A body that cannot be tried,
    because of what it uses or what it costs, is refused too.
    """
    try:
        fault = _Trial(kernel, body, orders).fault()
    except UntoldError as error:
        fault = (
            f"whether its body gives the same in another order of the reduction cannot be told, "
            f"as {error}: keep sums or maxima alone from step to step, and use them at the last"
        )
    if fault:
        raise UnsupportedError(
            body.doubt
            or f"kernel {kernel.name}: {fault}; this plan walks that reduction in the order of "
            f"arrival: use backend 'xla', or a plan whose chunks are walked in the grid's order"
        )


def check_scratch(kernel: PallasKernel, body: Body) -> None:
    """Raises UnsupportedError where a tile's result follows from what was in scratch before it.

    Tiles of all kinds are computed over two contents each, as many as that takes little time for.
    What cannot be tried is not refused: ``carried_state`` has read it.
    """
    leak = _seen(kernel, body, _Trial.leak)
    if leak:
        between = are_interleaved(kernel.grid, kernel.reduction_axes)
        raise left_in_scratch(kernel.name, f"a tile ({leak})", between)


class AddendError(InputError):
    """A body makes something else of its addend than a sum: on no backend is that what is meant."""


def check_addend(kernel: PallasKernel, body: Body) -> None:
    """Raises AddendError where a result does not grow by what is given for the addend.

    What cannot be tried is not refused.
    """
    fault = _seen(kernel, body, _Trial.misadded)
    if fault:
        raise AddendError(
            f"kernel {kernel.name}: {fault}; a plan that reduces adds the partial results of peers "
            f"there: add addend() to the tile, once, store the sum, and put what is made of the "
            f"whole result behind the operator"
        )


def _seen(kernel: PallasKernel, body: Body, look: Callable[[_Trial], str | None]) -> str | None:
    """What ``look`` finds in tiles walked in the grid's order; None too where it cannot be told."""
    steps = math.prod(kernel.grid[axis] for axis in kernel.reduction_axes)
    try:
        return look(_Trial(kernel, body, [range(steps)]))
    except UntoldError:
        return None


class _Trial:
    """A body and the orders that it is tried in; they are permutations of a tile's steps."""

    def __init__(self, kernel: PallasKernel, body: Body, orders: Sequence[Sequence[int]]):
        self.kernel, self.body = kernel, body
        self.axes = kernel.reduction_axes
        self.counts = [kernel.grid[axis] for axis in self.axes]
        self.natural = list(range(len(orders[0])))
        distinct = [order for order in dict.fromkeys(map(tuple, orders))]
        self.orders = [o for o in distinct if list(o) != self.natural][:ORDERS]
        specs = dict(zip(kernel.operands, kernel.in_specs, strict=True))
        named = sorted(_whole_numbers(body.program))
        self.named = [n for n in named if 0 < n < len(self.natural) - 1][:MOST_NAMED]
        self.draws = list(DRAWS.items())
        around = [(f"around {size:g}", _normal_of(size)) for size in _bounds(body)]
        self.draws[FEW_DRAWS:FEW_DRAWS] = around
        self.few = FEW_DRAWS + len(around)
        self.tiles = [[(n - 1) * part // 2 for n in kernel.grid] for part in (2, 0, 1)]
        for number in named[:MOST_NAMED]:
            tile = [min(number, n - 1) for n in kernel.grid]
            if tile not in self.tiles:
                self.tiles.append(tile)
        self.index = {
            name: block_indices(spec, kernel.grid, f"{kernel.name}: {name}", 1)
            for name, spec in specs.items()
        }

    def fault(self) -> str | None:
        """What differs, in words."""
        draws, orders, steps = self._amount()
        machine, told = Machine(MOST_WORK), False
        for draw, (kind, _) in enumerate(self.draws):
            if draw >= draws and told:
                break
            wanted = self._walk(machine, draw, sorted(steps))
            numbers = [~np.isnan(x) for x in wanted.values()]
            told |= 2 * sum(map(np.sum, numbers)) >= sum(map(np.size, numbers))
            for order in orders:
                found = self._walk(machine, draw, [s for s in order if s in steps])
                if different := _different(wanted, found):
                    return (
                        f"on random blocks ({kind}) {different} where {len(steps)} steps are "
                        f"walked in the grid's order and where they are in the plan's, so what "
                        f"the body keeps from step to step depends on their order"
                    )
        if not told:
            raise UntoldError("it gives hardly any numbers on random blocks")
        return None

    def leak(self) -> str | None:
        """What differs over other contents of scratch, in words."""
        machine, steps = Machine(MOST_WORK), sorted(self._steps((), 2))
        tiles = tiles_of_all_kinds(self.kernel.grid, self.axes)
        tiles += [tile for tile in self.tiles if tile not in tiles]
        for number, tile in enumerate(tiles):
            if number >= FIRST_TILES and machine.left < MOST_WORK - EASY:
                break
            walks = [self._walk(machine, number % 3, steps, left, tile) for left in (0, 1)]
            if different := _different(*walks):
                return different
        return None

    def misadded(self) -> str | None:
        """How results follow from the addend otherwise than by its sum, in words."""
        for steps in ([self.natural[-1]], sorted(self._steps((), 0))):
            bare, added = (
                self._walk(Machine(MOST_WORK, given), 0, steps) for given in (np.zeros, _addend)
            )
            grown = {
                name: added[name] - bare[name] for name in bare if bare[name].dtype.kind in "fc"
            }
            changed = [name for name, by in grown.items() if np.nanmax(np.abs(by), initial=0) > 0]
            if changed:
                break
        else:
            return "none of its results changes with what it gets from addend()"
        by, wanted = (grown[changed[0]].ravel(), _addend(grown[changed[0]].shape).ravel())
        size = np.abs(bare[changed[0]]).ravel() + 1
        wrong = np.flatnonzero(np.abs(by - wanted) > TOLERANCE * size)
        if len(changed) == 1 and not len(wrong):
            return None
        if len(changed) > 1:
            return f"what it gets from addend() changes {' and '.join(changed)}"
        at = wrong[0]
        return f"{changed[0]} changes by {by[at]:.4g} where addend() grows by {wanted[at]:.4g}"

    def _amount(self) -> tuple[int, list[tuple[int, ...]], set[int]]:
        """How many draws, which orders and which steps: many, where a step takes little."""
        machine = Machine(MOST_WORK)
        self._walk(machine, 0, [0])
        each = MOST_WORK - machine.left
        for draws, orders, more, bearable in (
            (len(self.draws), self.orders, STEPS, EASY),
            (len(self.draws), self.orders[:1], 0, EASY),
            (self.few, self.orders[:1], 0, MOST_WORK),
            (FEW_DRAWS, self.orders[:1], 0, MOST_WORK),
        ):
            steps = self._steps(orders, more)
            work = each * draws * (1 + len(orders)) * len(steps)
            if work <= bearable:
                break
        if work > MOST_WORK:
            raise UntoldError("it takes too much to compute on blocks of these sizes")
        return draws, orders, steps

    def _steps(self, orders: Sequence[Sequence[int]], more: int) -> set[int]:
        """The steps that are walked: all, or those that show each order and ``more`` of others."""
        total = len(self.natural)
        if sum(count > 1 for count in self.counts) > 1:
            if total > MOST_STEPS:
                raise UntoldError(f"a tile takes {total} steps along several axes")
            return set(self.natural)
        chosen = {0, total - 1}
        for order in orders:
            turn = next(i for i in range(total - 1) if order[i] > order[i + 1])
            chosen |= {order[0], order[-1], order[turn], order[turn + 1]}
        chosen |= set(self.named) if more else set()
        spread = np.linspace(0, total - 1, min(more, total)).astype(int).tolist()
        return chosen | set(spread)

    def _walk(
        self,
        machine: Machine,
        draw: int,
        steps: Sequence[int],
        left: int | None = None,
        tile: Sequence[int] | None = None,
    ) -> Mapping[str, np.ndarray]:
        """The results of one tile: another one for another draw; ``left`` draws what is left in
        scratch, by other tiles between its steps too where the grid takes such."""
        kernel, body = self.kernel, self.body
        tile = self.tiles[draw % len(self.tiles)] if tile is None else tile
        between = left is not None and are_interleaved(kernel.grid, self.axes)
        held: dict[Any, Any] = {}
        there: dict[Any, Any] = {}
        roles = dict(zip(body.program.constvars, body.roles, strict=True))
        for number, (v, given) in enumerate(zip(roles, body.constants, strict=True)):
            if roles[v] is None:
                held[v] = _constant(given)
            elif roles[v] not in self.index:
                held[v] = scratch(v.aval, np.random.default_rng((draw, number, left or 0)))
        for at, step in enumerate(steps):
            for number, v in enumerate(roles if between and at else ()):
                if roles[v] == "":
                    held[v] = scratch(v.aval, np.random.default_rng((draw, number, left or 0, at)))
            visit = len(self.natural) - 1 if at == len(steps) - 1 else at
            index, visits = self._point(tile, step), self._point(tile, visit)
            for v, role in roles.items():
                if role in self.index:
                    block = tuple(map(int, self.index[role][tuple(index)]))
                    if there.get(v) != block:
                        machine.pay(DRAWN * math.prod(v.aval.shape))
                        held[v], there[v] = Held(self._drawn(draw, role, block, v.aval)), block
            numbers = [np.int32(i) for i in (*index, *visits)]
            machine.run(body.program, [held[v] for v in roles], numbers)
        return {role: held[v].array for v, role in roles.items() if role in kernel.results}

    def _point(self, tile: Sequence[int], step: int) -> list[int]:
        """The grid point of a step, or of a visit, of the tile."""
        point = list(tile)
        for axis, i in zip(self.axes, np.unravel_index(step, self.counts), strict=True):
            point[axis] = int(i)
        return point

    def _drawn(self, draw: int, name: str, block: tuple[int, ...], aval: Any) -> np.ndarray:
        """The block of an operand, the same whenever it is asked for."""
        (kind, values), dtype = self.draws[draw], widened(aval.dtype)
        seed = repr((kind, name, None if kind == EQUAL else block))
        rng = np.random.default_rng(zlib.crc32(seed.encode()))
        if dtype.kind in "fc":
            return values(rng, aval.shape).astype(dtype)
        if dtype.kind == "i" and (draw % 2 or kind not in DRAWS):  # else such as index something
            return np.rint(3 * values(rng, aval.shape)).astype(dtype)
        return rng.integers(0, 2 if dtype.kind == "b" else 3, aval.shape).astype(dtype)


def _normal_of(size: float) -> Draw:
    return lambda rng, shape: size * rng.standard_normal(shape)


def _bounds(body: Body) -> list[float]:
    """Sizes of numbers in the program that values may be compared with, of those not drawn anyway.

    The largest come first: sums reach them the latest.
    """
    given = [np.asarray(c) for c in body.constants if isinstance(c, jax.Array | np.ndarray)]
    single = {number for c in given if c.size == 1 for number in _number(c.reshape(()))}
    sizes = {abs(float(number)) for number in _numbers(body.program) | single}
    kept = {m for m in sizes if SIZES[0] <= m <= SIZES[1] and not REACHED[0] <= m <= REACHED[1]}
    return sorted(kept, reverse=True)[:MOST_AROUND]


def _whole_numbers(jaxpr: Any) -> set[int]:
    """Numbers from zero on that stand in the program: steps or tiles may be compared with them."""
    return {n for n in _numbers(jaxpr) if isinstance(n, int) and n >= 0}


def _numbers(jaxpr: Any) -> set[int | float]:
    """The numbers that stand in the program."""
    found: set[int | float] = set()
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            found |= _number(np.asarray(v.val)) if isinstance(v, core.Literal) else set()
        for inner in core.jaxprs_in_params(eqn.params):
            found |= _numbers(inner)
    return found


def _number(value: np.ndarray) -> set[int | float]:
    """The real number in ``value``, a set of none where it is something else."""
    if value.ndim == 0 and jax.numpy.issubdtype(value.dtype, np.integer):
        return {int(value)}
    if value.ndim == 0 and jax.numpy.issubdtype(value.dtype, np.floating):
        return {float(value)}
    return set()


def _addend(shape: tuple[int, ...]) -> np.ndarray:
    """Partial results of peers, the same whenever they are asked for."""
    return np.random.default_rng(math.prod(shape)).uniform(-3, 3, shape)


def _constant(given: Any) -> Any:
    if isinstance(given, jax.core.Tracer) or not isinstance(given, jax.Array | np.ndarray):
        raise UntoldError("it uses a value from around it that is not known yet")
    return np.asarray(given).astype(widened(given.dtype))


def _different(wanted: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> str | None:
    """The first result that is another, with where, in words; what is no number tells nothing."""
    for name, a in wanted.items():
        b = found[name]
        apart = a != b
        if a.dtype.kind in "fc":
            size = np.abs(a[np.isfinite(a)]).max(initial=1e-3)
            with np.errstate(invalid="ignore"):
                apart &= ~(np.abs(a - b) <= TOLERANCE * size) & ~np.isnan(a)
        if apart.any():
            at = tuple(map(int, np.argwhere(apart)[0]))
            return f"{name}{list(at)} is {_said(a[at])} and {_said(b[at])}"
    return None


def _said(value: Any) -> str:
    return f"{value:.6g}" if value.dtype.kind in "fc" else str(value)
