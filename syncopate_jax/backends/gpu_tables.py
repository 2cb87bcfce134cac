"""What a fused GPU kernel reads from its rank's vector: tiles, waits, places and signals.

The compiled schedule's tables become lists by tile position. Waits count arrivals of warpgroups: a
slot that an operation raises is raised by each warpgroup that copies a part of it, one that tiles
raise once by each tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from syncopate_jax.backends import gpu_buffers
from syncopate_jax.backends.behind_tiles import behind_tiles
from syncopate_jax.backends.buffers import Buffers, result_tensor
from syncopate_jax.backends.gpu_buffers import GATHERED, INPUT, LANDING, RESULT, SEND, Key, Placed
from syncopate_jax.backends.gpu_layout import Layout, Move, Read
from syncopate_jax.backends.interface import Work, once_a_work
from syncopate_jax.backends.rank_table import Lists, Section, TableMaker
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir.schedule import Rows
from syncopate_jax.ir.text import row_text

Array = np.ndarray
Points = list[list[list[list[int]]]]


class LayoutMaker:
    """Makes the layout of a kernel whose tiles only compute; see ``gpu_colocated`` for others.

    ``copiers`` is the number of warpgroups of a rank that copy.
    """

    kinds: tuple[str, ...] = (INPUT, GATHERED, SEND, RESULT, LANDING)

    def __init__(self, work: Work, copiers: int):
        self.work, self.plan, self.schedule = work, work.schedule.plan, work.schedule
        self.kernel, self.space = work.kernel, work.space
        self.ranks, self.tiles = self.plan.num_ranks, work.schedule.num_tiles
        self.steps = work.schedule.num_steps
        self.c = self.plan.columns
        self.copiers = copiers
        self.bound = {b.operand: b.tensor for b in work.axis_map.bindings}
        self.places: Buffers = gpu_buffers.placed_buffers(work)
        self.maker = TableMaker(self.ranks)
        self.next_slot = [int(n) for n in self.schedule.num_slots]
        self.scale: dict[tuple[int, int], int] = {}
        self.exits: Points = [[[]] for _ in range(self.ranks)]

    def make(self) -> Layout:
        """The layout; raises UnsupportedError where a GPU kernel cannot do the work."""
        self._check()
        kept = [b for b in gpu_buffers.place(self.work, self.places, self.kinds) if self._kept(b)]
        self.by_key = {b.key: b for b in kept}
        self._scale_slots()
        results = {
            b.operand: (result_tensor(self.plan, b), RESULT)
            for b in self.work.axis_map.bindings
            if b.operand in self.kernel.results
        }
        reads = {
            operand: self._read(operand, tensor)
            for operand, tensor in self.bound.items()
            if operand in self.kernel.operands
        }
        stores, store_keys = self._stores()
        signals = self._signals()
        addends, addend_key = self._addends()
        op_parts = self._operations()
        exit_signals = self._exit_signals()
        e_waits = self._waits(self.schedule.e_waits, 0, epilogue=True)
        short = self.maker.shortened
        return Layout(
            buffers=kept,
            results=results,
            reads=reads,
            order=self._order(),
            steps=self._steps(),
            waits=self._waits(self.schedule.waits, 0),
            k_waits=self._waits(self.schedule.k_waits, 1),
            e_waits=short(e_waits),
            addends=short(addends),
            addend_key=addend_key,
            stores=short(stores),
            store_keys=store_keys,
            signals=short(signals),
            **op_parts,
            exit_signals=exit_signals,
            exit_waits=self.maker.lists(self.exits, 2),
            num_slots=max(*self.next_slot, 1),
            in_turn=self._in_turn(),
            table=self.maker.table,
        )

    # --- what the kernel cannot do -------------------------------------------------------------

    def _check(self) -> None:
        name = self.plan.name
        reason = self.kernel_reason()
        if reason is not None:
            raise UnsupportedError(reason)
        if self.tiles == 0:
            raise UnsupportedError("there is nothing to compute; use backend 'xla'")
        if np.any(self.c.reduce > 1):
            raise UnsupportedError(
                f"plan {name} reduces by other than sum, the epilogue can only add; use backend "
                f"'xla'"
            )
        unplaced = np.flatnonzero((self.c.reduce > 0) & (self.schedule.landing < 0))
        if len(unplaced):
            raise UnsupportedError(
                f"plan {name} reduces into data that no tile writes: "
                f"{row_text(self.plan, int(unplaced[0]))}; use backend 'xla'"
            )

    def kernel_reason(self) -> str | None:
        """Why the kernel's text cannot be used; None when it can."""
        body = self.kernel.loop_body
        if len(self.schedule.addends.values) and not self.kernel.has_addend:
            return (
                f"plan {self.plan.name} adds partial results in the epilogue, but kernel "
                f"{self.kernel.name} takes no addend; give it has_addend=True"
            )
        return body.unsupported_reason(self.kernel)

    def _kept(self, buffer: Placed) -> bool:
        """Whether anything is ever in the buffer: nothing is gathered where nothing arrives."""
        tensor, kind = buffer.key
        if kind != GATHERED:
            return True
        return bool(np.any(self.c.dst_tensor == self.plan.tensor_index(tensor)))

    # --- slots ---------------------------------------------------------------------------------

    def copiers_of(self, row: int) -> int:
        """Warpgroups that copy a part of the operation in ``row``, each of which raises."""
        channels = self._channels()
        position = channels.index(int(self.c.channel[row]))
        return len(range(position, self.copiers, len(channels)))

    def _channels(self) -> list[int]:
        return sorted(set(self.c.channel.tolist())) or [0]

    def _raise_scale(self, rank: int, slot: int, scale: int) -> None:
        if self.scale.setdefault((rank, slot), scale) != scale:
            raise UnsupportedError(
                f"plan {self.plan.name}: slot {slot} of rank {rank} is raised by tiles and by "
                f"operations; a GPU kernel counts one or the other"
            )

    def _scale_slots(self) -> None:
        rows = self.schedule.op_signals
        for row, (rank, slot) in zip(rows.owner.tolist(), rows.values.tolist(), strict=True):
            self._raise_scale(rank, slot, self.copiers_of(row))
        for rank, slot in self.schedule.signals.values.tolist():
            self._raise_scale(rank, slot, 1)

    def new_slot(self, rank: int) -> int:
        """A slot of its own for a wait at the end of a rank's launch."""
        self.next_slot[rank] += 1
        return self.next_slot[rank] - 1

    def _waits(self, rows: Rows, at: int, epilogue: bool = False) -> Lists:
        """Rows (.., slot, count) by tile position, counts in warpgroups."""
        return self.maker.lists(self._wait_points(rows, at, epilogue), rows.values.shape[1])

    def _wait_points(self, rows: Rows, at: int, epilogue: bool = False) -> Points:
        """As ``_waits``, by rank and position."""
        points: Points = []
        for rank in range(self.ranks):
            found = []
            for position in range(self.tiles):
                found.append(
                    [
                        [*row[:at], row[at], row[at + 1] * self.scale[rank, row[at]]]
                        for row in rows.row(self.schedule.at(rank, position))
                        if self.waited(rank, row[at], epilogue)
                    ]
                )
            points.append(found)
        return points

    def waited(self, rank: int, slot: int, epilogue: bool) -> bool:
        """Whether a wait of the schedule is one here."""
        return True

    def _in_turn(self) -> bool:
        """Whether what a tile waits for before or in its product depends on tiles, of any rank.

        An executor that stores and signals a tile beside its next one could then wait for itself.
        """
        schedule = self.schedule
        waited = {
            (at // self.tiles, slot)
            for rows in (schedule.waits, schedule.k_waits)
            for at, (*_, slot, _) in zip(rows.owner.tolist(), rows.values.tolist(), strict=True)
            if self.waited(at // self.tiles, slot, False)
        }
        return not waited.isdisjoint(behind_tiles(schedule))

    # --- order ---------------------------------------------------------------------------------

    def _order(self) -> Section:
        """The loop's ``m`` and ``n`` by tile position."""
        names = [axis.name for axis in self.space.axes]
        index = self.space.grid_indices()
        columns = []
        for axes in self.kernel.loop_body.tile_axes:
            linear = np.zeros(self.tiles, np.int64)
            for axis in axes:
                linear = linear * self.space.axes[axis].count + index[names[axis]][:, 0]
            columns.append(linear[self.schedule.order])
        return self.maker.section(np.stack(columns, axis=-1))

    def _steps(self) -> Section | None:
        """Index along each reduction axis by step position, unless that is row-major."""
        if np.all(self.schedule.k_order == np.arange(self.steps)):
            return None
        index = self.space.grid_indices()
        found = [index[axis.name][0][self.schedule.k_order] for axis in self.space.reduction]
        return self.maker.section(np.stack(found, axis=-1))

    # --- reading -------------------------------------------------------------------------------

    def boxes(self, operand: str) -> tuple[Array, Array]:
        """Boxes in the tensor's coordinates, [ranks, tiles, steps, dims] in visiting order."""
        lo, hi = self.work.accesses[operand].boxes(self.space)
        origin = self.origin(operand)
        picks = (self.schedule.order[:, :, None], self.schedule.k_order[:, None, :])
        return lo[picks] + origin[:, None, None], hi[picks] + origin[:, None, None]

    def origin(self, operand: str) -> Array:
        """[ranks, dims] where the operand's coordinates start in the tensor's."""
        tensor = self.bound[operand]
        if operand in self.kernel.results:
            return self.places.items[tensor, SEND].lo
        return self.places.origins[tensor]

    def _read(self, operand: str, tensor: str) -> Read:
        own = self.places.items[tensor, INPUT]
        origin = self.origin(operand)
        lo, hi = self.boxes(operand)
        meets = np.all((lo < own.hi[:, None, None]) & (hi > own.lo[:, None, None]), axis=-1)
        inside = np.all((lo >= own.lo[:, None, None]) & (hi <= own.hi[:, None, None]), axis=-1)
        self._refuse_straddling(operand, np.any(meets & ~inside, axis=-1))
        part = (own.lo[:, None, None] > lo) | (own.hi[:, None, None] < hi)
        dims = tuple(d for d in range(lo.shape[-1]) if part[..., d].any())
        other, shift, peer = self._elsewhere(operand, tensor, meets)
        rows = [own.lo - origin, own.hi - origin, origin - own.lo, shift]
        region = self.maker.section(np.stack(rows, axis=1))
        return Read((tensor, INPUT), other, dims, region, **peer)

    def _elsewhere(
        self, operand: str, tensor: str, meets: Array
    ) -> tuple[Key, Array, dict[str, Any]]:
        """Where the rank reads what it did not have, and how coordinates shift there."""
        held = self.places.items[tensor, GATHERED]
        return (tensor, GATHERED), self.origin(operand) - held.lo, {}

    def _refuse_straddling(self, operand: str, bad: Array) -> None:
        if bad.any():
            rank, position = (int(i) for i in np.argwhere(bad)[0])
            raise UnsupportedError(
                f"rank {rank}: tile {self.schedule.order[rank, position]} of {operand} straddles "
                f"the edge of a chunk; choose tiles that end where chunks end"
            )

    # --- writing -------------------------------------------------------------------------------

    def written(self) -> tuple[str, str] | None:
        """The result that the plan moves and its tensor."""
        found = [(o, t) for o, t in self.bound.items() if o in self.kernel.results]
        return found[0] if found else None

    def tile_boxes(self, operand: str) -> tuple[Array, Array]:
        """[ranks, tiles, dims] boxes that tiles write, in the tensor's coordinates."""
        lo, hi = self.boxes(operand)
        return lo[:, :, 0], hi[:, :, 0]

    def _stores(self) -> tuple[Lists, list[Key]]:
        """Where each tile goes: (which of the keys, rank, starts ..)."""
        found = self.written()
        keys: list[Key] = []
        points: Points = [[[] for _ in range(self.tiles)] for _ in range(self.ranks)]
        ndim = 1
        if found is not None:
            operand, tensor = found
            lo, hi = self.tile_boxes(operand)
            ndim = lo.shape[-1] + 1
            for rank in range(self.ranks):
                for position in range(self.tiles):
                    for key, target, starts in self.targets(
                        operand, tensor, rank, position, lo[rank, position], hi[rank, position]
                    ):
                        if key not in keys:
                            keys.append(key)
                        starts = [*starts, *[0] * (ndim - len(starts))]
                        points[rank][position].append([keys.index(key), target, *starts])
        return self.maker.lists(points, 2 + ndim), keys

    def targets(
        self, operand: str, tensor: str, rank: int, position: int, lo: Array, hi: Array
    ) -> list[tuple[Key, int, list[int]]]:
        """Buffer, rank and starts of every place a tile goes."""
        return [self.home(operand, tensor, rank, position, lo, hi)]

    def home(
        self, operand: str, tensor: str, rank: int, position: int, lo: Array, hi: Array
    ) -> tuple[Key, int, list[int]]:
        """The tile's place on its own rank: the result where it is the rank's own, else to send."""
        own = self.places.items.get((tensor, RESULT))
        if own is not None and own.holds(rank, lo, hi):
            return own_key(own), rank, (lo - own.lo[rank]).tolist()
        if own is not None and np.all((lo < own.hi[rank]) & (hi > own.lo[rank])):
            bad = np.zeros((self.ranks, self.tiles), bool)
            bad[rank, position] = True
            self._refuse_straddling(operand, bad)
        send = self.places.items[tensor, SEND]
        return own_key(send), rank, (lo - send.lo[rank]).tolist()

    def _signals(self) -> Lists:
        """(rank, slot) that each tile raises once it is stored."""
        points: Points = [
            [
                [list(row) for row in self.schedule.signals.row(self.schedule.at(rank, position))]
                for position in range(self.tiles)
            ]
            for rank in range(self.ranks)
        ]
        return self.maker.lists(points, 2)

    def _addends(self) -> tuple[Lists, Key | None]:
        """Per tile: landing and where in it the tile starts."""
        found = self.written()
        schedule = self.schedule
        points: Points = [[[] for _ in range(self.tiles)] for _ in range(self.ranks)]
        if found is None or not len(schedule.addends.values):
            return self.maker.lists(points, 1), None
        operand, tensor = found
        lo, hi = self.tile_boxes(operand)
        row_of = {
            (int(self.c.dst_rank[row]), int(n)): row
            for row, n in enumerate(schedule.landing)
            if n >= 0
        }
        bad = np.zeros((self.ranks, self.tiles), bool)
        entries = zip(schedule.addends.owner, schedule.addends.values.tolist(), strict=True)
        for at, (number,) in entries:
            rank, position = divmod(int(at), self.tiles)
            row = row_of[rank, number]
            start = self.c.dst_lo[row, : lo.shape[-1]]
            stop = self.c.dst_hi[row, : lo.shape[-1]]
            a, b = lo[rank, position], hi[rank, position]
            bad[rank, position] = not (np.all(a >= start) and np.all(b <= stop))
            points[rank][position].append([number, *(a - start).tolist()])
        self._refuse_straddling(operand, bad)
        return self.maker.lists(points, 1 + lo.shape[-1]), (tensor, LANDING)

    # --- operations ----------------------------------------------------------------------------

    def _operations(self) -> dict[str, Any]:
        """The copying warpgroups' programs: operations by channel, their waits and signals."""
        channels = self._channels()
        lo = np.searchsorted(self.c.rank, np.arange(self.ranks + 1))
        moves: list[Move] = []
        ops: list[list[list[int]]] = []
        waits: Points = []
        signals: Points = []
        bounds = []
        width = 2 + 2 * (self.c.ndim + 1)
        extra = self._arrivals()
        for rank in range(self.ranks):
            listed = range(lo[rank], lo[rank + 1])
            rows = sorted(listed, key=lambda row: (channels.index(int(self.c.channel[row])), row))
            counts = [sum(int(self.c.channel[row]) == ch for row in rows) for ch in channels]
            bounds.append(np.cumsum([0, *counts]))
            ops.append([self._encode(row, moves) for row in rows])
            waits.append(
                [
                    [[s, n * self.scale[rank, s]] for s, n in self.schedule.op_waits.row(row)]
                    for row in rows
                ]
            )
            signals.append(
                [[*map(list, self.schedule.op_signals.row(row)), *extra[row]] for row in rows]
            )
        longest = max(map(len, ops))
        for rank in range(self.ranks):
            ops[rank] += [[0] * width] * (max(longest, 1) - len(ops[rank]))
            waits[rank] += [[]] * (max(longest, 1) - len(waits[rank]))
            signals[rank] += [[]] * (max(longest, 1) - len(signals[rank]))
        return {
            "moves": moves,
            "ops": self.maker.section(np.array(ops)),
            "op_waits": self.maker.lists(waits, 2),
            "op_signals": self.maker.lists(signals, 2),
            "programs": self.maker.section(np.array(bounds)[..., None]),
            "channels": len(channels),
        }

    def _arrivals(self) -> dict[int, list[list[int]]]:
        """Signals for those ends of an operation that nobody there waits for, and those waits.

        A rank leaves once nothing is written into it or read from it any more.
        """
        extra: dict[int, list[list[int]]] = {}
        for row in range(self.c.n):
            signalled = {rank for rank, _ in self.schedule.op_signals.row(row)}
            lister, src, dst = (
                int(x[row]) for x in (self.c.rank, self.c.src_rank, self.c.dst_rank)
            )
            ends = {dst, src} - {lister} if lister != src else {dst}
            extra[row] = []
            for end in sorted(ends - signalled):
                slot = self.new_slot(end)
                extra[row].append([end, slot])
                self.exits[end][0].append([slot, self.copiers_of(row)])
        return extra

    def _encode(self, row: int, moves: list[Move]) -> list[int]:
        """(move, far rank, starts in the source .., starts in the destination ..)."""
        c = self.c
        src_rank, dst_rank = int(c.src_rank[row]), int(c.dst_rank[row])
        source = self.places.source(row)
        src_ndim = source.lo.shape[1]
        dst_tensor = self.plan.tensors[c.dst_tensor[row]].name
        dst_ndim = len(self.plan.tensor(dst_tensor).shape)
        src = (c.src_lo[row, :src_ndim] - source.lo[src_rank]).tolist()
        key, dst = self.arrival(row)
        extent = c.dst_hi[row, :dst_ndim] - c.dst_lo[row, :dst_ndim]
        pull = int(c.rank[row]) != src_rank
        move = Move(own_key(source), key, tuple(extent.tolist()), pull)
        if move not in moves:
            moves.append(move)
        pad = self.c.ndim + 1
        return [
            moves.index(move),
            src_rank if pull else dst_rank,
            *src,
            *[0] * (pad - len(src)),
            *dst,
            *[0] * (pad - len(dst)),
        ]

    def arrival(self, row: int) -> tuple[Key, list[int]]:
        """Buffer and starts on the destination rank of the operation in ``row``."""
        c = self.c
        tensor = self.plan.tensors[c.dst_tensor[row]].name
        ndim = len(self.plan.tensor(tensor).shape)
        if c.reduce[row]:
            return (tensor, LANDING), [int(self.schedule.landing[row]), *[0] * ndim]
        target = self.places.destination(row)
        starts = c.dst_lo[row, :ndim] - target.lo[int(c.dst_rank[row])]
        return own_key(target), starts.tolist()

    def _exit_signals(self) -> Lists:
        """(rank, slot) that each computing CTA raises once it has read all it needs from peers."""
        points: Points = [[[]] for _ in range(self.ranks)]
        return self.maker.lists(points, 2)


def own_key(buffer: Any) -> Key:
    """Tensor and kind of a buffer."""
    return buffer.tensor, buffer.kind


@once_a_work
def lay_out(work: Work, copiers: int) -> Layout:
    """The layout of a kernel in which ``copiers`` warpgroups of a rank only copy."""
    return LayoutMaker(work, copiers).make()
