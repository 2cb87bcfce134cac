"""Whether a body gives the same in other orders of its reduction, tried on random blocks.

A tile is walked in the grid's order and in each order of the plan, in float64: sums, maxima and an
online softmax then agree to far below the difference that any other rule makes. Draws of several
kinds are tried: one sees what the next cannot, such as which of equal maxima is kept. Of a long
reduction some steps stand for all: the first and last of each order, a pair that changes places,
and others spread between.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.kernel.blocks import block_indices
from syncopate_jax.kernel.body_values import Held, Machine, UntoldError, scratch, widened
from syncopate_jax.kernel.local import PallasKernel

DRAWS = ("normal", "few values", "equal blocks", "blocks of one sign", "positive")
WORK = 2e9  # in the unit of Machine, a few seconds
ORDERS = 3  # that are tried: of the first ranks that have different ones
STEPS, MOST_STEPS = 8, 64  # of a long reduction along one axis; of one along several
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


class _Trial:
    def __init__(self, kernel: PallasKernel, body: Body, orders: Sequence[Sequence[int]]):
        self.kernel, self.body = kernel, body
        self.axes = kernel.reduction_axes
        self.counts = [kernel.grid[axis] for axis in self.axes]
        self.natural = list(range(len(orders[0])))
        distinct = [order for order in dict.fromkeys(map(tuple, orders))]
        self.orders = [o for o in distinct if list(o) != self.natural][:ORDERS]
        specs = dict(zip(kernel.operands, kernel.in_specs, strict=True))
        self.index = {
            name: block_indices(spec, kernel.grid, f"{kernel.name}: {name}", 1)
            for name, spec in specs.items()
        }

    def fault(self) -> str | None:
        """What differs, in words."""
        left, told = WORK, False
        steps = self._steps(len(self.natural))
        for draw in range(len(DRAWS)):
            machine = Machine(left)
            wanted = self._walk(machine, draw, [s for s in self.natural if s in steps])
            if draw == 0:
                each = (left - machine.left) / len(steps)
                most = int(left / (each * len(DRAWS) * (1 + len(self.orders))))
                if most < len(steps):
                    steps = self._steps(most)
                    wanted = self._walk(machine, draw, sorted(steps))
            if not all(np.isfinite(x).all() for x in wanted.values()):
                left = machine.left
                continue
            told = True
            for order in self.orders:
                found = self._walk(machine, draw, [s for s in order if s in steps])
                if different := _different(wanted, found):
                    return (
                        f"on random blocks ({DRAWS[draw]}) {different} where {len(steps)} steps "
                        f"are walked in the grid's order and where they are in the plan's, so what "
                        f"the body keeps from step to step depends on their order"
                    )
            left = machine.left
        if not told:
            raise UntoldError("it gives no finite numbers on random blocks")
        return None

    def _steps(self, most: int) -> set[int]:
        """The steps that are walked; all that there are, or some that show each order."""
        total = len(self.natural)
        several = sum(count > 1 for count in self.counts) > 1
        if total <= min(most, MOST_STEPS if several else STEPS):
            return set(self.natural)
        chosen = {0, total - 1}
        for order in self.orders:
            turn = next(i for i in range(total - 1) if order[i] > order[i + 1])
            chosen |= {order[0], order[-1], order[turn], order[turn + 1]}
        if several or len(chosen) > most:
            raise UntoldError("it takes too much to compute on blocks of these sizes")
        spread = np.linspace(0, total - 1, min(most, STEPS)).astype(int).tolist()
        return chosen | set(spread[: max(min(most, STEPS) - len(chosen), 0)])

    def _walk(self, machine: Machine, draw: int, steps: Sequence[int]) -> Mapping[str, np.ndarray]:
        """The results of one tile: another one for another draw."""
        kernel, body = self.kernel, self.body
        part = (2, 0, 1, 2, 1)[draw]
        tile = [(n - 1) * part // 2 for n in kernel.grid]
        held: dict[Any, Any] = {}
        inputs = []
        for number, (v, given, role) in enumerate(
            zip(body.program.constvars, body.constants, body.roles, strict=True)
        ):
            if role is None:
                held[v] = _constant(given)
            else:
                held[v] = scratch(v.aval, np.random.default_rng((draw, number)))
            if role in self.index:
                inputs.append((role, v))
        for at, step in enumerate(steps):
            visit = len(self.natural) - 1 if at == len(steps) - 1 else at
            index, visits = self._point(tile, step), self._point(tile, visit)
            for role, v in inputs:
                block = tuple(map(int, self.index[role][tuple(index)]))
                held[v] = Held(_drawn(draw, role, block, v.aval))
            numbers = [np.int32(i) for i in (*index, *visits)]
            machine.run(body.program, [held[v] for v in body.program.constvars], numbers)
        named = zip(body.program.constvars, body.roles, strict=True)
        return {role: held[v].array for v, role in named if role in kernel.results}

    def _point(self, tile: Sequence[int], step: int) -> list[int]:
        """The grid point of a step, or of a visit, of the tile."""
        point = list(tile)
        for axis, i in zip(self.axes, np.unravel_index(step, self.counts), strict=True):
            point[axis] = int(i)
        return point


def _constant(given: Any) -> Any:
    if isinstance(given, jax.core.Tracer) or not isinstance(given, jax.Array | np.ndarray):
        raise UntoldError("it uses a value from around it that is not known yet")
    return np.asarray(given).astype(widened(given.dtype))


def _drawn(draw: int, name: str, block: tuple[int, ...], aval: Any) -> np.ndarray:
    """The block of an operand, the same whenever it is asked for."""
    kind, dtype, shape = DRAWS[draw], widened(aval.dtype), aval.shape
    seed = (draw, zlib.crc32(name.encode()), *(() if kind == "equal blocks" else block))
    rng = np.random.default_rng(seed)
    if dtype.kind not in "fc":
        return rng.integers(0, 2 if dtype.kind == "b" else 3, shape).astype(dtype)
    if kind == "few values":
        return rng.integers(0, 2, shape).astype(dtype)
    if kind == "positive":
        return rng.uniform(0.5, 1.5, shape).astype(dtype)
    if kind == "blocks of one sign":
        return (rng.choice([-1, 1]) * rng.uniform(0.5, 1.5, shape)).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def _different(wanted: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> str | None:
    """The first result that is another, with where, in words."""
    for name, a in wanted.items():
        b = found[name]
        apart = a != b
        if a.dtype.kind in "fc" and a.size:
            apart = ~(np.abs(a - b) <= TOLERANCE * (np.abs(a).max() + 1e-3))
        if apart.any():
            at = tuple(map(int, np.argwhere(apart)[0]))
            return f"{name}{list(at)} is {a[at]:.6g} and {b[at]:.6g}"
    return None
