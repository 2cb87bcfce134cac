"""From a schedule to a Triton kernel's scheme and table: places become shifts in elements.

A kernel computes addresses from a pointer and an operand's coordinates. Where its data lies in
another buffer, or the buffer starts elsewhere, the pointer is shifted; that is right for a whole
tile wherever the two have the same strides in the dimensions along which a tile has extent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from syncopate_jax.backends.buffers import result_tensor
from syncopate_jax.backends.gpu_buffers import GATHERED, INPUT, LANDING, RESULT, Key, Placed
from syncopate_jax.backends.gpu_tables import Points
from syncopate_jax.backends.triton_transfers import TransferMaker, as_lists, strides, wait_lists
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.kernel.triton_kernel import walked_axes
from syncopate_jax.triton_source import scheme as parts
from syncopate_jax.triton_source.scheme import Columns, Read, Scheme, Spot

Array = np.ndarray
MOST = 2**31  # elements that 32-bit offsets reach
COUNTERS = "counters_ptr"
UNCUT = (0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """A scheme, its table, and the buffers behind its parameters.

    Attributes:
      table: int32 [ranks, entries].
      buffers: the plan's buffers by parameter.
      results: parameter of every bound result.
      far: parameters that peers touch, in the order of their numbers; counters first.
    """

    scheme: Scheme
    table: Array
    buffers: dict[str, Placed]
    results: dict[str, str]
    far: tuple[str, ...]


def check_reach(kernel: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises UnsupportedError for an array that a kernel's offsets cannot reach all of."""
    for name, shape in shapes.items():
        if math.prod(shape) >= MOST:
            raise UnsupportedError(
                f"kernel {kernel}: {name} has {math.prod(shape)} elements {tuple(shape)}; a Triton "
                f"kernel's offsets reach {MOST}: use another target, or smaller shards"
            )


class TritonMaker(TransferMaker):
    """Makes the scheme of a kernel whose tiles only compute."""

    title = "some programs only communicate"

    def kernel_reason(self) -> str | None:
        body = self.body
        if self.written() is not None and body.source.epilogue is None:
            return (
                f"plan {self.plan.name} moves what kernel {self.kernel.name} writes, and the "
                f"kernel has no epilogue directive"
            )
        if len(self.schedule.addends.values) and not body.has_addend:
            return (
                f"plan {self.plan.name} adds partial results to tiles, and kernel "
                f"{self.kernel.name} says not to what: name it in its epilogue directive"
            )
        return None

    def lay_out(self, programs: int) -> Laid:
        """The scheme of a launch with ``programs`` communicating programs a rank.

        Raises:
          UnsupportedError: this kernel, plan or layout cannot be done so, and what can.
        """
        self._check()
        self.by_key = {b.key: b for b in (*self._placed(), *self._landings()) if self._kept(b)}
        self._check_sizes()
        self._scale_slots()
        order = self._axis_order()
        schedule = self.schedule
        waits = wait_lists(self.maker, self._wait_points(schedule.waits, 0))
        before_store = self._wait_points(schedule.e_waits, 0, epilogue=True)
        epilogue_waits = wait_lists(self.maker, before_store)
        signals = self._optional(self._signals())
        reads = self._reads()
        runs = self._runs(reads)
        write, addends = self._write(), self._added()
        transfers = self._transfers(programs) if programs and self.c.n else None
        scheme = Scheme(
            title=self.title,
            ranks=self.ranks,
            folded=self.work.launch.folded,
            tiles=self.tiles,
            workers=self.schedule.workers,
            table=0,
            slots=max(*self.next_slot, 1),
            parameters=(),
            arrays=(),
            order=order,
            waits=waits,
            epilogue_waits=epilogue_waits,
            signals=signals,
            reads=tuple(read for read in reads if read is not None),
            write=write,
            addends=addends,
            runs=runs,
            transfers=transfers,
        )
        return self._finish(scheme)

    # --- arrays --------------------------------------------------------------------------------

    def _finish(self, scheme: Scheme) -> Laid:
        """Names, sizes and numbers of arrays, once it is known which are used and from where."""
        used, far = _arrays_of(scheme)
        kernels = {access.pointer for access in self.body.source.accesses}
        named = {self.name(key): b for key, b in self.by_key.items()}
        buffers = {n: b for n, b in named.items() if n in used or n in kernels}
        sizes = {n: math.prod(b.shape) for n, b in buffers.items()}
        for operand, pointer in self.body.pointers.items():
            sizes.setdefault(pointer, math.prod(self.body.shapes[operand]))
        numbers = {name: i for i, name in enumerate((COUNTERS, *sorted(far)))}
        folded = self.work.launch.folded
        arrays = tuple(
            parts.Array(n, size if folded else 0, numbers.get(n, -1)) for n, size in sizes.items()
        )
        results = {
            b.operand: self.name((result_tensor(self.plan, b), RESULT))
            for b in self.work.axis_map.bindings
            if b.operand in self.kernel.results
        }
        table = self.maker.table
        scheme = replace(scheme, table=table.shape[1], arrays=arrays)
        return Laid(scheme, table, buffers, results, tuple(numbers))

    def _placed(self) -> Iterator[Placed]:
        """The buffers; Triton addresses any number of dimensions, so that none is cut."""
        self.work.axis_map.require_in_order()
        for (tensor, kind), buffer in self.places.items.items():
            if kind in self.kinds:
                shape = tuple(max(n, 1) for n in buffer.shape)
                dtype = jnp.dtype(self.plan.tensor(tensor).dtype)
                yield Placed((tensor, kind), shape, UNCUT, dtype)

    def _landings(self) -> Iterator[Placed]:
        """Where partial results arrive: the largest of them, as often as a rank gets one."""
        for t, tensor in enumerate(self.plan.tensors):
            rows = np.flatnonzero((self.schedule.landing >= 0) & (self.c.dst_tensor == t))
            if len(rows):
                ndim = len(tensor.shape)
                extent = (self.c.dst_hi[rows, :ndim] - self.c.dst_lo[rows, :ndim]).max(axis=0)
                count = max(int(self.schedule.num_landings.max()), 1)
                shape = (count, *(max(int(n), 1) for n in extent))
                yield Placed((tensor.name, LANDING), shape, UNCUT, jnp.dtype(tensor.dtype))

    def _check_sizes(self) -> None:
        check_reach(self.kernel.name, self.body.shapes)
        each = self.ranks if self.work.launch.folded else 1
        buffers = {self.name(key): (each, *b.shape) for key, b in self.by_key.items()}
        check_reach(self.kernel.name, buffers)

    # --- order and steps -----------------------------------------------------------------------

    @property
    def _axes(self) -> list[str]:
        return walked_axes(self.body.source)

    @functools.cached_property
    def _index(self) -> dict[str, Array]:
        """Index along each of the kernel's own axes: [tiles, steps]."""
        found = self.space.grid_indices()
        return {name: found[f"g{i}"] for i, name in enumerate(self._axes)}

    def _axis_order(self) -> Columns:
        columns = [
            self._index[axis][:, 0][self.schedule.order] for axis, _ in self.body.source.variables
        ]
        return self._columns(np.stack(columns, axis=-1))

    @functools.cached_property
    def _walked(self) -> Array:
        """[ranks, steps] the reduction loop's count at each step position."""
        linear = np.zeros(self.steps, np.int64)
        for axis in self.body.source.reduced:
            count = self.kernel.grid[self._axes.index(axis)]
            linear = linear * count + self._index[axis][0]
        return linear[self.schedule.k_order]

    def _runs(self, reads: Sequence[Read | None]) -> parts.Runs | None:
        """Runs of steps between waits, jumps and changes of place; None where all are one run."""
        entries = self.schedule.k_waits
        by_run = [r for r in reads if r is not None and r.by_run]
        if not by_run and not len(entries.values) and self._in_order:
            return None
        starts = self._run_starts
        count = max(map(len, starts))
        bounds = np.zeros((self.ranks, count, 2), np.int64)
        for rank, found in enumerate(starts):
            ends = [*found[1:], self.steps]
            for run, (lo, hi) in enumerate(zip(found, ends, strict=True)):
                first = self._walked[rank, lo]
                bounds[rank, run] = first, first + hi - lo
        points: Points = [[[] for _ in range(self.tiles * count)] for _ in range(self.ranks)]
        for rank in range(self.ranks):
            for position in range(self.tiles):
                for step, slot, n in entries.row(self.schedule.at(rank, position)):
                    if self.waited(rank, slot, False):
                        point = position * count + starts[rank].index(step)
                        points[rank][point].append([slot, n * self.scale[rank, slot]])
        waits = wait_lists(self.maker, points)
        return parts.Runs(count, self._columns(bounds), waits)

    @property
    def _in_order(self) -> bool:
        return bool(np.all(self._walked == np.arange(self.steps)))

    @functools.cached_property
    def _run_starts(self) -> list[list[int]]:
        """Step positions at which a run begins, by rank."""
        entries = self.schedule.k_waits
        found = []
        for rank in range(self.ranks):
            jumps = np.flatnonzero(np.diff(self._walked[rank]) != 1) + 1
            begins = {0, *jumps.tolist()}
            for changes in self._changes:
                begins |= set(changes[rank])
            for position in range(self.tiles):
                begins |= {row[0] for row in entries.row(self.schedule.at(rank, position))}
            found.append(sorted(begins))
        return found

    # --- reading -------------------------------------------------------------------------------

    def _reads(self) -> list[Read | None]:
        """Every operand that the plan moves; None where all of it is where the caller gave it."""
        self._changes: list[list[list[int]]] = []
        given = [(o, t) for o, t in self.bound.items() if o in self.kernel.operands]
        places = [(o, *self._where(o, t)) for o, t in given]
        found = []
        for _, _, where in places:
            changed = np.any(np.diff(where, axis=2), axis=(1, 3))
            if changed.any():
                self._changes.append([(np.flatnonzero(c) + 1).tolist() for c in changed])
            found.append(bool(changed.any()))
        return [
            self._read_of(operand, spots, where, by_run)
            for (operand, spots, where), by_run in zip(places, found, strict=True)
        ]

    def _read_of(
        self, operand: str, spots: tuple[Spot, ...], where: Array, by_run: bool
    ) -> Read | None:
        """``by_run``: places change inside a tile; ``where`` is [ranks, tiles, steps, 3]."""
        if not where.any():
            return None
        pointer = self.body.pointers[operand]
        if not by_run:
            return Read(pointer, spots, self._columns(where[:, :, 0]))
        alike = bool(np.all(where == where[:, :1]))
        tiles, count = (1 if alike else self.tiles), max(map(len, self._run_starts))
        rows = np.zeros((self.ranks, tiles, count, where.shape[-1]), np.int64)
        for rank, starts in enumerate(self._run_starts):
            rows[rank, :, : len(starts)] = where[rank, :tiles][:, starts]
        columns = self._columns(rows.reshape(self.ranks, tiles * count, -1))
        return Read(pointer, spots, columns, by_run, by_tile=not alike)

    def _where(self, operand: str, tensor: str) -> tuple[tuple[Spot, ...], Array]:
        """Spots, and (spot, rank, shift) of every box: [ranks, tiles, steps, 3]."""
        own = self.places.items[tensor, INPUT]
        lo, hi = self.boxes(operand)
        meets = np.all((lo < own.hi[:, None, None]) & (hi > own.lo[:, None, None]), axis=-1)
        inside = np.all((lo >= own.lo[:, None, None]) & (hi <= own.hi[:, None, None]), axis=-1)
        self._refuse_straddling(operand, np.any(meets & ~inside, axis=-1))
        spots = [Spot(self.name((tensor, INPUT)))]
        at_home = self._shift(operand, (tensor, INPUT), lo - own.lo[:, None, None], lo, hi, inside)
        other, rank, shift = self._other(operand, tensor, lo, hi, ~inside)
        if other is not None:
            spots.append(other)
        where = np.stack(
            [
                np.where(inside, 0, 1),
                np.where(inside, 0, rank),
                np.where(inside, at_home, shift),
            ],
            axis=-1,
        )
        return tuple(spots), where

    def _other(
        self, operand: str, tensor: str, lo: Array, hi: Array, wanted: Array
    ) -> tuple[Spot | None, Array, Array]:
        """The place of what a rank did not have: what it has gathered."""
        zero = np.zeros(wanted.shape, np.int64)
        if not wanted.any():
            return None, zero, zero
        held, key = self.places.items[tensor, GATHERED], (tensor, GATHERED)
        shift = self._shift(operand, key, lo - held.lo[:, None, None], lo, hi, wanted)
        return Spot(self.name(key)), zero, shift

    def _shift(
        self, operand: str, key: Key, starts: Array, lo: Array, hi: Array, wanted: Array
    ) -> Array:
        """By how many elements a pointer to ``key`` is shifted, for the kernel to find ``starts``.

        ``lo`` and ``hi`` are the boxes in the tensor's coordinates; only those in ``wanted`` count.
        """
        ours = strides(self.work.accesses[operand].shape)
        theirs = strides(self.by_key[key].shape)[-len(ours) :]
        long = np.any((hi - lo > 1) & wanted[..., None], axis=tuple(range(lo.ndim - 1)))
        bad = np.flatnonzero(long & (ours != theirs))
        if len(bad):
            raise UnsupportedError(
                f"plan {self.plan.name}: {operand} and {self.name(key)} have other strides along "
                f"dimension {int(bad[0])}, {ours[bad[0]]} and {theirs[bad[0]]} elements, which a "
                f"tile walks: give every rank's part a dimension of its own, or use backend 'xla'"
            )
        origin = self.origin(operand)
        origin = origin.reshape(len(origin), *[1] * (lo.ndim - 2), -1)
        found = (starts[..., -len(ours) :] * theirs).sum(-1) - ((lo - origin) * ours).sum(-1)
        return np.where(wanted, found, 0)

    # --- writing -------------------------------------------------------------------------------

    def _write(self) -> parts.Write | None:
        found = self.written()
        if found is None:
            return None
        operand, tensor = found
        lo, hi = self.tile_boxes(operand)
        spots: list[Spot] = []
        points: Points = [[[] for _ in range(self.tiles)] for _ in range(self.ranks)]
        for rank in range(self.ranks):
            for position in range(self.tiles):
                box = lo[rank, position], hi[rank, position]
                for key, target, starts in self.targets(operand, tensor, rank, position, *box):
                    spot = Spot(self.name(key), peer=target != rank)
                    if spot not in spots:
                        spots.append(spot)
                    shift = self._shift_of(operand, key, starts, rank, *box)
                    points[rank][position].append([spots.index(spot), target, shift])
        single = all(len(p) == 1 for one in points for p in one)
        shifted = any(row[2] for one in points for p in one for row in p)
        if single and not shifted and spots == [Spot(self.body.pointers[operand])]:
            return None  # every tile goes where the kernel alone would store it
        where = as_lists(self.maker.lists(points, 3))
        return parts.Write(self.body.pointers[operand], tuple(spots), where, single)

    def _shift_of(
        self, operand: str, key: Key, starts: Sequence[int], rank: int, lo: Array, hi: Array
    ) -> int:
        """As ``_shift``, of one tile; a landing's number is the first of ``starts``."""
        ours = strides(self.work.accesses[operand].shape)
        theirs = strides(self.by_key[key].shape)
        extra = len(theirs) - len(ours)
        long = (hi - lo) > 1
        bad = np.flatnonzero(long & (ours != theirs[extra:]))
        if len(bad):
            d = int(bad[0])
            raise UnsupportedError(
                f"plan {self.plan.name}: {operand} and {self.name(key)} have other strides along "
                f"dimension {d}, {ours[d]} and {theirs[extra + d]} elements, which a tile walks: "
                f"give every rank's part a dimension of its own, or use backend 'xla'"
            )
        inside = lo - self.origin(operand)[rank]
        return int((np.asarray(starts) * theirs).sum() - (inside * ours).sum())

    def _added(self) -> parts.Addends | None:
        found, schedule = self.written(), self.schedule
        if found is None or not len(schedule.addends.values):
            return None
        operand, tensor = found
        lo, hi = self.tile_boxes(operand)
        rows = np.flatnonzero(schedule.landing >= 0)
        row_of = {(int(self.c.dst_rank[r]), int(schedule.landing[r])): int(r) for r in rows}
        points: Points = [[[] for _ in range(self.tiles)] for _ in range(self.ranks)]
        bad = np.zeros((self.ranks, self.tiles), bool)
        key = (tensor, LANDING)
        entries = zip(schedule.addends.owner, schedule.addends.values.tolist(), strict=True)
        for at, (number,) in entries:
            rank, position = divmod(int(at), self.tiles)
            row, ndim = row_of[rank, number], lo.shape[-1]
            start, stop = self.c.dst_lo[row, :ndim], self.c.dst_hi[row, :ndim]
            box = lo[rank, position], hi[rank, position]
            bad[rank, position] = not (np.all(box[0] >= start) and np.all(box[1] <= stop))
            starts = [number, *(box[0] - start).tolist()]
            points[rank][position].append([self._shift_of(operand, key, starts, rank, *box)])
        self._refuse_straddling(operand, bad)
        where = as_lists(self.maker.lists(points, 1))
        return parts.Addends(self.body.pointers[operand], self.name(key), where)


class FlaggedTritonMaker(TritonMaker):
    """Of a kernel whose flags count copies of the copy engine, each once."""

    title = "copy engines bring what tiles wait for"

    def copiers_of(self, row: int) -> int:
        return 1


def _arrays_of(scheme: Scheme) -> tuple[set[str], set[str]]:
    """Parameters that a scheme uses, and those that peers touch."""
    spots = [spot for read in scheme.reads for spot in read.spots]
    spots += scheme.write.spots if scheme.write else ()
    used = {spot.array for spot in spots}
    far = {spot.array for spot in spots if spot.peer}
    for move in scheme.transfers.moves if scheme.transfers else ():
        used |= {move.src, move.dst}
        far.add(move.src if move.pull else move.dst)
    if scheme.addends:
        used.add(scheme.addends.array)
    return used, far
