"""The event loop behind ``simulate``: queues issue operations, workers run tiles, slots are raised.

At each instant events happen in phases (flows end, data lands, tiles stop, signals arrive, flows
start), and only then are ports shared anew, so that what ends and what starts together never
overlap. An entity is an operation, or ``ops + row`` for a tile; ``cause`` holds the entity whose
progress let another begin, which is what the critical path follows.

Operations are numbered by their place in their queue first, not by row: ranks that work alike are
then neighbours in memory at every step, which halves the time of a million operations.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from syncopate_jax.check.sharing import ENDED, Event, Flows
from syncopate_jax.errors import InputError
from syncopate_jax.ir.columns import Columns
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.schedule import Rows, Schedule
from syncopate_jax.ir.topology import Topology

LANDED, STOPPED, ARRIVED, STARTED = range(ENDED + 1, ENDED + 5)
_PROGRESS_EVERY = 1 << 15

Array = np.ndarray
Progress = Callable[[int, int], None]


class Engine:
    """State of one simulation; ``run`` advances it until nothing can happen any more."""

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        schedule: Schedule | None,
        seconds: Array,
        progress: Progress | None,
        signal_lag: float = 0.0,
    ):
        self.plan, self.topology, self.schedule = plan, topology, schedule
        self.progress = progress
        self.heap: list[Event] = []
        self.num_ops = plan.num_ops
        self.finished_ops = self.finished_tiles = 0
        self._init_queues(plan)
        self._init_transfers(plan, topology)
        self._init_dependencies(plan)
        self._init_slots(schedule)
        self._init_tiles(schedule, seconds, signal_lag)
        entities = self.num_ops + self.num_tiles
        self.begin = [-1.0] * entities
        self.finish = [-1.0] * entities
        self.cause = [-1] * entities

    def rows(self, entities: Array) -> Array:
        """``entities`` with operations by row of the plan's columns; -1 stays."""
        row = np.concatenate([self.row, np.arange(self.num_ops, self.num_ops + self.num_tiles)])
        return np.where(entities < 0, -1, np.append(row, -1)[entities])

    def by_row(self, values: Array) -> Array:
        """[entities] ``values`` with operations in row order."""
        return np.concatenate([values[: self.num_ops][self.op], values[self.num_ops :]])

    def run(self) -> None:
        """Lets time pass until no event is left."""
        for queue in range(len(self.queue_next)):
            self._issue(queue, 0.0, -1)
        for worker in range(len(self.worker_row)):
            self._advance(worker, 0.0, -1)
        heap, flows = self.heap, self.flows
        # By phase, from LANDED on; ends are told from stale ones first.
        handlers = (self._landed, self._stopped, self._arrived, self._started)
        version = flows.version
        events = 0
        while heap:
            now = heap[0][0]
            while heap and heap[0][0] == now:
                _, phase, item, extra = heappop(heap)
                if phase != ENDED:
                    handlers[phase - LANDED](item, extra, now)
                elif version[item] == extra:
                    self._ended(item, now)
                events += 1
            flows.share(now)
            if self.progress and events >= _PROGRESS_EVERY:
                events = 0
                done = self.finished_ops + self.finished_tiles
                self.progress(done, self.num_ops + self.num_tiles)

    # Transfers.

    def _init_transfers(self, plan: Plan, topology: Topology) -> None:
        c = plan.columns
        n = plan.num_ops
        link, latency = np.zeros(n), np.zeros(n)
        src, dst = np.full(n, -1), np.full(n, -1)
        self.overhead: list[float] = []
        capacity: list[float] = []
        for index, name in enumerate(plan.channels):
            rows = np.flatnonzero(c.channel == index)
            if not len(rows):
                self.overhead.append(0.0)
                continue
            channel = topology.channel(name)
            self.overhead.append(channel.overhead)
            s, d = c.src_rank[rows], c.dst_rank[rows]
            link[rows], latency[rows] = channel.bandwidth[s, d], channel.latency[s, d]
            ported = (s != d) | channel.local_ports
            ports = len(channel.egress)
            src[rows] = np.where(ported, len(capacity) + channel.port[s], -1)
            dst[rows] = np.where(ported, len(capacity) + ports + channel.port[d], -1)
            capacity += [*channel.egress.tolist(), *channel.ingress.tolist()]
        self._check_links(plan, topology, link)
        size = transfer_bytes(plan).astype(np.float64)
        self.latency = latency[self.row].tolist()
        self.flows = Flows(
            src[self.row].tolist(),
            dst[self.row].tolist(),
            link[self.row].tolist(),
            size[self.row].tolist(),
            capacity,
            self.heap,
        )

    @staticmethod
    def _check_links(plan: Plan, topology: Topology, link: Array) -> None:
        missing = np.flatnonzero(link == 0)
        if not len(missing):
            return
        c = plan.columns
        row = int(missing[0])
        rank, s, d = int(c.rank[row]), int(c.src_rank[row]), int(c.dst_rank[row])
        index = row - int(np.searchsorted(c.rank, rank))
        joined = topology.joining(s, d)
        how = (
            f"use {' or '.join(joined)}: templates have channel= for all that they send, and the "
            f"hierarchical ones outer_channel= for what goes between the nodes= that they are given"
            if joined
            else "nothing joins them: relay the data"
        )
        raise InputError(
            f"simulate {plan.name}: rank {rank} op {index} travels r{s} to r{d} on channel "
            f"{plan.channels[c.channel[row]]}, where topology {topology.name} has no link "
            f"({len(missing)} such operations); {how}"
        )

    # Queues: one for each rank and channel, in list order, one transfer at a time.

    def _init_queues(self, plan: Plan) -> None:
        c = plan.columns
        channels = len(plan.channels)
        queue = c.rank.astype(np.int64) * channels + c.channel
        order = np.argsort(queue, kind="stable")
        start = np.searchsorted(queue[order], np.arange(plan.num_ranks * channels + 1))
        place = np.empty(plan.num_ops, np.int64)
        place[order] = np.arange(plan.num_ops) - start[queue[order]]
        # Both ways between an operation's number and its row: row[op], op[row].
        self.row = np.argsort(place, kind="stable")
        self.op = np.argsort(self.row)
        self.num_channels = channels
        self.queue_of = queue[self.row].tolist()
        self.queue_ops = self.op[order].tolist()
        self.queue_next = start[:-1].tolist()
        self.queue_end = start[1:].tolist()
        self.queue_busy = [False] * (plan.num_ranks * channels)

    def _issue(self, queue: int, now: float, cause: int) -> None:
        """Issues the head of ``queue`` if the queue is idle and the head waits for nothing."""
        position = self.queue_next[queue]
        if self.queue_busy[queue] or position == self.queue_end[queue]:
            return
        op = self.queue_ops[position]
        if self.unmet[op]:
            return
        self.queue_busy[queue] = True
        self.queue_next[queue] = position + 1
        self.begin[op] = now
        self.cause[op] = cause
        overhead = self.overhead[queue % self.num_channels]
        heappush(self.heap, (now + overhead, STARTED, op, 0))

    def _started(self, op: int, _: int, now: float) -> None:
        self.flows.start(op)

    def _ended(self, op: int, now: float) -> None:
        self.flows.end(op)
        landing = now + self.latency[op]
        self.finish[op] = landing
        self.finished_ops += 1
        if self.notifies[op]:
            heappush(self.heap, (landing, LANDED, op, 0))
        queue = self.queue_of[op]
        self.queue_busy[queue] = False
        self._issue(queue, now, op)

    def _landed(self, op: int, _: int, now: float) -> None:
        start = self.dependent_start
        for i in range(start[op], start[op + 1]):
            self._meet(self.dependents[i], now, op)
        if self.schedule is not None:
            start = self.op_signal_start
            for i in range(start[op], start[op + 1]):
                self._raise(self.op_signals[i], now, op)

    def _meet(self, op: int, now: float, cause: int) -> None:
        """One of the things ``op`` waits for has come about."""
        self.unmet[op] -= 1
        if not self.unmet[op]:
            queue = self.queue_of[op]
            position = self.queue_next[queue]
            if position < self.queue_end[queue] and self.queue_ops[position] == op:
                self._issue(queue, now, cause)

    def _init_dependencies(self, plan: Plan) -> None:
        c = plan.columns
        target = c.dep_row(plan.num_ranks)
        owner = c.dep_owner()
        _check_dependencies(plan, c, target, owner)
        target, owner = self.op[target], self.op[owner]
        order = np.argsort(target, kind="stable")
        start = np.searchsorted(target[order], np.arange(plan.num_ops + 1))
        self.dependent_start = start.tolist()
        self.dependents = owner[order].tolist()
        self.unmet = np.diff(c.dep_start)[self.row].tolist()
        self.notifies = (np.diff(start) > 0).tolist()

    # Slots.

    def _init_slots(self, schedule: Schedule | None) -> None:
        self.slot_value: list[int] = []
        self.slot_raisers: list[list[int]] = []
        self.slot_waiters: list[list[tuple[int, int, int]]] = []
        self.slot_base = [0]
        if schedule is None:
            return
        plan = schedule.plan
        base = np.concatenate([[0], np.cumsum(schedule.num_slots, dtype=np.int64)])
        self.slot_base = base.tolist()
        slots = self.slot_base[-1]
        self.slot_value = [0] * slots
        self.slot_raisers = [[] for _ in range(slots)]
        self.slot_waiters = [[] for _ in range(slots)]
        raised = _target_slots(schedule, base, schedule.op_signals, "op_signals")
        signals = Rows.grouped(self.op[schedule.op_signals.owner], raised, self.num_ops)
        self.op_signal_start = signals.start.tolist()
        self.op_signals = signals.values.tolist()
        for op in np.flatnonzero(np.diff(signals.start)).tolist():
            self.notifies[op] = True
        waits = schedule.op_waits
        rank = plan.columns.rank[waits.owner]
        slot = _own_slots(schedule, base, rank, waits.values[:, 0], "op_waits").tolist()
        counts = waits.values[:, 1].tolist()
        for op, s, count in zip(self.op[waits.owner].tolist(), slot, counts, strict=True):
            if count > 0:
                self.unmet[op] += 1
                self.slot_waiters[s].append((count, op, 0))

    def _raise(self, slot: int, now: float, cause: int) -> None:
        self.slot_value[slot] += 1
        self.slot_raisers[slot].append(cause)
        waiters = self.slot_waiters[slot]
        if not waiters:
            return
        value = self.slot_value[slot]
        ready = [waiter for waiter in waiters if waiter[0] <= value]
        if not ready:
            return
        self.slot_waiters[slot] = [waiter for waiter in waiters if waiter[0] > value]
        for _, target, is_worker in ready:
            if is_worker:
                self._advance(target, now, cause)
            else:
                self._meet(target, now, cause)

    def _arrived(self, slot: int, cause: int, now: float) -> None:
        self._raise(slot, now, cause)

    # Workers: each runs its tiles in order and stops at the waits inside them.

    def _init_tiles(self, schedule: Schedule | None, seconds: Array, signal_lag: float) -> None:
        self.num_tiles = 0
        self.worker_row: list[int] = []
        self.worker_end: list[int] = []
        self.tile_op: list[int] = []
        self.tile_waits: list[tuple[int, int]] = []
        if schedule is None:
            return
        ranks, tiles, workers = self.plan.num_ranks, schedule.num_tiles, schedule.workers
        self.num_tiles = ranks * tiles
        self.steps = max(schedule.num_steps, 1)
        self.tile_seconds = seconds.reshape(-1).tolist()
        self.tile_op = [-1] * self.num_tiles
        used = min(workers, tiles)
        self.workers, self.used_workers = workers, used
        self.worker_row = [r * tiles + w for r in range(ranks) for w in range(used)]
        self.worker_end = [(r + 1) * tiles for r in range(ranks) for _ in range(used)]
        self.worker_stop = [0] * (ranks * used)
        self.worker_step = [0] * (ranks * used)
        self.worker_op = [-1] * (ranks * used)
        # The step of a tile at which the one before it on the worker, held until then, is told of.
        self.lag = signal_lag * self.steps
        self.held = [-1] * (ranks * used)
        self.stops = self._stops(schedule)
        base = np.array(self.slot_base)
        signals = schedule.signals
        self.tile_signal_start = signals.start.tolist()
        self.tile_signals = _target_slots(schedule, base, signals, "signals").tolist()
        self.tile_signal_remote = (signals.values[:, 0] != signals.owner // max(tiles, 1)).tolist()

    def _stops(self, schedule: Schedule) -> dict[int, list[tuple[int, int, int]]]:
        """By row of a tile: (step before which it stops, slot, count), in the order met."""
        base = np.array(self.slot_base)
        found: dict[int, list[tuple[int, int, int]]] = {}
        for name, at in (("waits", 0), ("k_waits", None), ("e_waits", self.steps)):
            rows: Rows = getattr(schedule, name)
            owner = rows.owner
            rank = owner // max(schedule.num_tiles, 1)
            slot = _own_slots(schedule, base, rank, rows.values[:, -2], name).tolist()
            step = rows.values[:, 0].tolist() if at is None else [at] * len(slot)
            counts = rows.values[:, -1].tolist()
            for row, k, s, count in zip(owner.tolist(), step, slot, counts, strict=True):
                found.setdefault(row, []).append((k, s, count))
        for stops in found.values():
            stops.sort(key=lambda stop: stop[0])
        return found

    def _advance(self, worker: int, now: float, cause: int) -> None:
        """Runs ``worker`` on from where it is until it must wait or compute."""
        while (row := self.worker_row[worker]) < self.worker_end[worker]:
            stops = self.stops.get(row, ())
            at = self.worker_stop[worker]
            while at < len(stops) and self.slot_value[stops[at][1]] >= stops[at][2]:
                self._note_wait(worker, row, stops[at])
                at += 1
            self.worker_stop[worker] = at
            goal = stops[at][0] if at < len(stops) else self.steps
            if self.begin[row + self.num_ops] < 0 and goal > 0:
                self.begin[row + self.num_ops] = now
            if cause >= 0:
                self.cause[row + self.num_ops] = cause
            steps = goal - self.worker_step[worker]
            if steps > 0:
                step = self.tile_seconds[row] / self.steps
                if (held := self.held[worker]) >= 0 and goal >= self.lag:
                    self.held[worker] = -1
                    self._signal(held, now + (self.lag - self.worker_step[worker]) * step)
                self.worker_step[worker] = goal
                duration = steps * step
                heappush(self.heap, (now + duration, STOPPED, worker, 0))
                return
            if at < len(stops):
                _, slot, count = stops[at]
                self.slot_waiters[slot].append((count, worker, 1))
                return
            cause = self._complete(worker, row, now)

    def _stopped(self, worker: int, _: int, now: float) -> None:
        self._advance(worker, now, -1)

    def _note_wait(self, worker: int, row: int, stop: tuple[int, int, int]) -> None:
        """Remembers which operation's landing satisfied a wait of the tile in ``row``."""
        _, slot, count = stop
        raiser = self.slot_raisers[slot][count - 1] if count > 0 else -1
        if 0 <= raiser < self.num_ops:
            self.worker_op[worker] = raiser
            self.tile_waits.append((row, raiser))

    def _complete(self, worker: int, row: int, now: float) -> int:
        """Ends the tile in ``row``, tells of it or holds that, moves on; returns its entity."""
        entity = row + self.num_ops
        self.finish[entity] = now
        self.finished_tiles += 1
        self.tile_op[row] = self.worker_op[worker]
        self.worker_row[worker] = row + self.workers
        self.worker_stop[worker] = self.worker_step[worker] = 0
        if self.lag and self.worker_row[worker] < self.worker_end[worker]:
            self.held[worker] = row
        else:
            self._signal(row, now)
        return entity

    def _signal(self, row: int, at: float) -> None:
        """Raises the signals of the tile in ``row`` at a time."""
        entity = row + self.num_ops
        for i in range(self.tile_signal_start[row], self.tile_signal_start[row + 1]):
            delay = self.topology.signal_latency if self.tile_signal_remote[i] else 0.0
            heappush(self.heap, (at + delay, ARRIVED, self.tile_signals[i], entity))


def transfer_bytes(plan: Plan) -> Array:
    """[ops] bytes that each operation moves."""
    itemsize = np.array([tensor.itemsize for tensor in plan.tensors] or [0], np.int64)
    return plan.columns.src_size() * itemsize[plan.columns.src_tensor]


def _check_dependencies(plan: Plan, c: Columns, target: Array, owner: Array) -> None:
    lost = np.flatnonzero(target < 0)
    if not len(lost):
        return
    dep, row = int(lost[0]), int(owner[lost[0]])
    rank = int(c.rank[row])
    raise InputError(
        f"simulate {plan.name}: rank {rank} op {row - int(np.searchsorted(c.rank, rank))} waits "
        f"for r{c.dep_rank[dep]}.{c.dep_index[dep]}, which does not exist; verify the plan"
    )


def _own_slots(schedule: Schedule, base: Array, rank: Array, slot: Array, name: str) -> Array:
    """Numbers of slots over all ranks from those on ``rank``."""
    bad = np.flatnonzero((slot < 0) | (slot >= schedule.num_slots[rank]))
    if len(bad):
        r, s = int(rank[bad[0]]), int(slot[bad[0]])
        raise InputError(
            f"simulate {schedule.plan.name}: {name} names slot {s} of rank {r}, which has "
            f"{schedule.num_slots[r]}; verify the schedule"
        )
    return base[rank] + slot


def _target_slots(schedule: Schedule, base: Array, rows: Rows, name: str) -> Array:
    rank, slot = rows.values[:, 0], rows.values[:, 1]
    bad = np.flatnonzero((rank < 0) | (rank >= schedule.plan.num_ranks))
    if len(bad):
        raise InputError(
            f"simulate {schedule.plan.name}: {name} names rank {rank[bad[0]]} of "
            f"{schedule.plan.num_ranks}; verify the schedule"
        )
    return _own_slots(schedule, base, rank, slot, name)
