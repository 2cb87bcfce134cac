"""The NumPy oracle for schedules: runs the tiles and transfers of all ranks on real arrays.

Everything that a fused kernel may do at its own pace is an activity here: each worker, each port,
each transfer once issued, each raise once made. A seed draws a pace for every one of them, some a
thousand times slower than others, so that what is not ordered by a wait happens in any order. What
has not been written is NaN, so data that is used too early shows in the result.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.report import Report
from syncopate_jax.check.schedule_tables import Slots, check_tables, tile_name
from syncopate_jax.errors import DeadlockError, InputError, PlanError, UnsupportedError
from syncopate_jax.ir import comm
from syncopate_jax.ir.schedule import Schedule
from syncopate_jax.kernel.access import AnyAccess
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.frame import Frame, frames
from syncopate_jax.kernel.tiles import TileSpace

Array = np.ndarray
TileFn = Callable[[int, int, int, dict[str, Array]], dict[str, Array]]
PACES = (1.0, 1.0, 30.0, 1000.0)
"""Mean time of one step of an activity, drawn once for each."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What an activity yields to go on only once ``slot`` of all slots has reached ``count``."""

    slot: int
    count: int
    who: str


Activity = Iterator[Wait | None]


def execute_schedule(
    schedule: Schedule,
    space: TileSpace,
    accesses: Mapping[str, AnyAccess],
    axis_map: AxisMap,
    tile_fn: TileFn,
    inputs: Mapping[tuple[int, str], Array],
    seed: int = 0,
    *,
    accumulate: type[np.floating] = np.float64,
) -> dict[tuple[int, str], Array]:
    """Every rank's buffers once all tiles and transfers of ``schedule`` are done.

    Args:
      tile_fn: ``tile_fn(rank, tile, step, blocks)`` gives what linear tile ``tile`` adds at linear
        step ``step`` to each result: ``{operand: array}``, from ``blocks``, the parts of the bound
        operands it reads then. Blocks are cut at the edge of what the rank has, and so must be
        what it gives.
      inputs: for each (rank, tensor) with initial data that no tile produces, an array of the
        tensor's whole shape, of which only that data is used.
      seed: of the random interleaving.
      accumulate: type of all arithmetic and of the results.

    Returns:
      ``{(rank, tensor): array}`` for every rank and tensor, and ``{(rank, operand): array}`` for
      results that the axis map does not bind; NaN where nothing was written.

    Raises:
      PlanError: the schedule's tables do not fit the tile space.
      InputError: an input is missing or of another shape, or the axis map does not fit.
      UnsupportedError: the plan has collectives.
      DeadlockError: tiles and operations wait for each other; the message says who for what.
    """
    if schedule.plan.has_collectives():
        raise UnsupportedError(
            f"schedule of {schedule.plan.name}: its plan has collectives; "
            f"a schedule takes transfers only"
        )
    report = Report(schedule.plan)
    check_tables(schedule, space, report)
    if report.findings:
        raise PlanError(f"schedule of {schedule.plan.name}", report.findings)
    found = frames(schedule.plan, axis_map, accesses)
    memory = _Memory(schedule, space, found, accumulate)
    bound = {frame.access.operand for frame in found}
    memory.add_results([a for a in accesses.values() if a.write and a.operand not in bound], space)
    memory.fill(inputs)
    _Machine(schedule, memory, tile_fn, seed).run()
    return memory.buffers


class _Memory:
    """Buffers and landings of every rank, and the tiles' view of them."""

    def __init__(
        self,
        schedule: Schedule,
        space: TileSpace,
        found: tuple[Frame, ...],
        dtype: type[np.floating],
    ):
        self.schedule, self.plan, self.frames, self.dtype = schedule, schedule.plan, found, dtype
        self.private: list[tuple[str, tuple[Array, Array]]] = []
        self.boxes = [frame.access.boxes(space) for frame in found]
        ranks = range(self.plan.num_ranks)
        self.buffers = {(r, t.name): self._empty(t.shape) for r in ranks for t in self.plan.tensors}
        c = self.plan.columns
        self.landed: dict[tuple[int, int], list[int]] = {}
        for op in np.flatnonzero(schedule.landing >= 0).tolist():
            key = int(c.dst_rank[op]), int(schedule.landing[op])
            self.landed.setdefault(key, []).append(op)
        self.landings = {
            key: self._empty(self.plan.tensors[c.dst_tensor[ops[0]]].shape)
            for key, ops in self.landed.items()
        }

    def _empty(self, shape: tuple[int, ...]) -> Array:
        return np.full(shape, np.nan, self.dtype)

    def add_results(self, accesses: list[AnyAccess], space: TileSpace) -> None:
        """Adds buffers for results that the plan does not move, which tiles write all the same."""
        self.private = [(access.operand, access.boxes(space)) for access in accesses]
        for rank in range(self.plan.num_ranks):
            for access in accesses:
                if (rank, access.operand) in self.buffers:
                    raise InputError(
                        f"execute {self.plan.name}: result {access.operand} is bound to no tensor, "
                        f"but the plan has a tensor of that name; give it another name"
                    )
            self.buffers |= {(rank, a.operand): self._empty(a.shape) for a in accesses}

    def fill(self, inputs: Mapping[tuple[int, str], Array]) -> None:
        """Copies the initial data that no tile produces."""
        for region in self.plan.initial:
            if region.produced or not region.box.size:
                continue
            given = inputs.get((region.rank, region.tensor))
            shape = self.plan.tensor(region.tensor).shape
            if given is None or given.shape != shape:
                raise InputError(
                    f"execute {self.plan.name}: inputs[{region.rank}, {region.tensor!r}] must be "
                    f"an array of shape {shape}, found {None if given is None else given.shape}"
                )
            at = region.box.slices
            self.buffers[region.rank, region.tensor][at] = given[at]

    def read(self, op: int) -> Array:
        """What an operation reads."""
        c = self.plan.columns
        name = self.plan.tensors[c.src_tensor[op]].name
        return self.buffers[int(c.src_rank[op]), name][self._slices(op, "src")].copy()

    def write(self, op: int, data: Array) -> None:
        """Writes what an operation brings, beside its destination if it has a landing."""
        c = self.plan.columns
        rank, landing = int(c.dst_rank[op]), int(self.schedule.landing[op])
        at = self._slices(op, "dst")
        data = data.reshape([s.stop - s.start for s in at])
        if landing >= 0:
            self.landings[rank, landing][at] = data
            return
        target = self.buffers[rank, self.plan.tensors[c.dst_tensor[op]].name]
        target[at] = _combined(target[at], data, int(c.reduce[op]))

    def _slices(self, op: int, side: str) -> tuple[slice, ...]:
        c = self.plan.columns
        d = len(self.plan.tensors[getattr(c, f"{side}_tensor")[op]].shape)
        lo, hi = (getattr(c, f"{side}_{end}")[op, :d].tolist() for end in ("lo", "hi"))
        return tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))

    def blocks(self, rank: int, tile: int, step: int) -> dict[str, Array]:
        """The parts of the operands that a tile reads at a step, in operand order."""
        out = {}
        for i, frame in enumerate(self.frames):
            if not frame.write:
                lo, hi = self._place(i, rank, tile, step)
                buffer = self.buffers[rank, self.plan.tensors[frame.tensor].name]
                at = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
                out[frame.access.operand] = buffer[at].transpose(frame.order).copy()
        return out

    def store(self, rank: int, tile: int, results: dict[str, Array], addends: list[int]) -> None:
        """Adds landings to a tile's results and writes them."""
        for i, frame in enumerate(self.frames):
            if frame.write:
                lo, hi = self._place(i, rank, tile, 0)
                inverse = np.argsort(frame.order)
                data = results[frame.access.operand].transpose(inverse).astype(self.dtype)
                for number in addends:
                    self._add(frame.tensor, (rank, number), lo, hi, data)
                buffer = self.buffers[rank, self.plan.tensors[frame.tensor].name]
                buffer[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))] = data

        for operand, (low, high) in self.private:
            at = (slice(*pair) for pair in zip(low[tile, 0], high[tile, 0], strict=True))
            self.buffers[rank, operand][tuple(at)] = results[operand]

    def _add(self, tensor: int, key: tuple[int, int], lo: Array, hi: Array, data: Array) -> None:
        c = self.plan.columns
        for op in self.landed.get(key, ()):
            if c.dst_tensor[op] != tensor:
                continue
            d = len(lo)
            low, high = np.maximum(lo, c.dst_lo[op, :d]), np.minimum(hi, c.dst_hi[op, :d])
            if np.all(low < high):
                there = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
                here = tuple(slice(a, b) for a, b in zip(low - lo, high - lo, strict=True))
                landed = self.landings[key][there]
                data[here] = _combined(data[here], landed, int(c.reduce[op]))

    def _place(self, i: int, rank: int, tile: int, step: int) -> tuple[Array, Array]:
        """Tensor box of operand ``i`` at a tile and step, cut to what the rank has."""
        frame = self.frames[i]
        extent = frame.extent[rank]
        low, high = (np.minimum(side[tile, step], extent) for side in self.boxes[i])
        lo, hi = frame.lo[rank].copy(), frame.lo[rank].copy()
        order = list(frame.order)
        lo[order] += low
        hi[order] += high
        return lo, hi


def _combined(old: Array, new: Array, reduce: int) -> Array:
    kind = comm.REDUCTIONS[reduce]
    if kind == "none":
        return new
    return old + new if kind == "sum" else np.maximum(old, new)


class _Machine:
    """Runs activities by their time, and stops those that wait."""

    def __init__(self, schedule: Schedule, memory: _Memory, tile_fn: TileFn, seed: int):
        self.schedule, self.memory, self.tile_fn = schedule, memory, tile_fn
        self.report = Report(schedule.plan)
        self.slots = Slots(schedule)
        self.value = [0] * len(self.slots.raises)
        self.random = random.Random(seed)
        self.count = itertools.count()
        self.heap: list[tuple[float, int, float, Activity]] = []
        self.sleepers: dict[int, list[tuple[Wait, float, Activity]]] = {}
        self.now = 0.0

    def run(self) -> None:
        schedule = self.schedule
        for rank in range(schedule.plan.num_ranks):
            for worker in range(min(schedule.workers, schedule.num_tiles)):
                self._start(self._worker(rank, worker))
        c = schedule.plan.columns
        ports: dict[tuple[int, int], list[int]] = {}
        for op, port in enumerate(zip(c.rank.tolist(), c.channel.tolist(), strict=True)):
            ports.setdefault(port, []).append(op)
        for ops in ports.values():
            self._start(self._port(ops))
        while self.heap:
            self.now, _, pace, activity = heapq.heappop(self.heap)
            self._go_on(pace, activity)
        if any(self.sleepers.values()):
            self._refuse()

    def _start(self, activity: Activity) -> None:
        self._push(self.random.choice(PACES), activity)

    def _push(self, pace: float, activity: Activity) -> None:
        when = self.now + self.random.expovariate(1 / pace)
        heapq.heappush(self.heap, (when, next(self.count), pace, activity))

    def _go_on(self, pace: float, activity: Activity) -> None:
        for wait in activity:
            if wait is None:
                self._push(pace, activity)
                return
            if self.value[wait.slot] < wait.count:
                self.sleepers.setdefault(wait.slot, []).append((wait, pace, activity))
                return

    def _raise(self, slot: int) -> Activity:
        yield None
        self.value[slot] += 1
        woken = self.sleepers.pop(slot, [])
        for wait, pace, activity in woken:
            if self.value[slot] < wait.count:
                self.sleepers.setdefault(slot, []).append((wait, pace, activity))
            else:
                self._push(pace, activity)

    def _worker(self, rank: int, worker: int) -> Activity:
        s, base = self.schedule, int(self.slots.first[rank])
        for position in range(worker, s.num_tiles, s.workers):
            row, tile = s.at(rank, position), int(s.order[rank, position])
            name = tile_name(s, row)
            yield from (Wait(base + slot, n, name) for slot, n in s.waits.row(row))
            inside = s.k_waits.row(row)
            total: dict[str, Array] = {}
            for place, step in enumerate(s.k_order[rank].tolist()):
                where = f"{name}, step position {place},"
                yield from (Wait(base + slot, n, where) for at, slot, n in inside if at == place)
                yield None
                blocks = self.memory.blocks(rank, tile, step)
                for result, part in self.tile_fn(rank, tile, step, blocks).items():
                    total[result] = total[result] + part if result in total else part
            where = f"{name}, epilogue,"
            yield from (Wait(base + slot, n, where) for slot, n in s.e_waits.row(row))
            yield None
            self.memory.store(rank, tile, total, [number for (number,) in s.addends.row(row)])
            for target, slot in s.signals.row(row):
                self._start(self._raise(int(self.slots.first[target]) + slot))

    def _port(self, ops: list[int]) -> Activity:
        base = int(self.slots.first[self.schedule.plan.columns.rank[ops[0]]])
        for op in ops:
            name = self.report.name(op)
            yield from (Wait(base + slot, n, name) for slot, n in self.schedule.op_waits.row(op))
            yield None
            self._start(self._transfer(op))

    def _transfer(self, op: int) -> Activity:
        yield None
        data = self.memory.read(op)
        yield None
        self.memory.write(op, data)
        for target, slot in self.schedule.op_signals.row(op):
            self._start(self._raise(int(self.slots.first[target]) + slot))

    def _refuse(self, limit: int = 8) -> None:
        waits = sorted(
            (wait.who, wait.slot, wait.count)
            for left in self.sleepers.values()
            for wait, *_ in left
        )
        shown = "; ".join(
            f"{who} waits for slot {self.slots.name(slot)} to reach {count}, "
            f"it is {self.value[slot]}"
            for who, slot, count in waits[:limit]
        )
        more = f"; and {len(waits) - limit} more" if len(waits) > limit else ""
        raise DeadlockError(f"schedule of {self.schedule.plan.name}: deadlock: {shown}{more}")
