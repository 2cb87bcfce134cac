"""Backend ``copy_engine``: the device's copy engines move chunks beside the kernel (paper 5.2).

A handler of the same program starts one copy a chunk on streams of its own and has a flag written
behind each; the kernel, on all multiprocessors, waits for the flags of its tiles. Every rank copies
from its peers, whoever lists the operation. What a rank has from the start is read in place.

It moves what tiles read, in one hop, between devices of one process. Chunks that tiles produce, and
those that are passed on, would need a copy started from inside the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.backends import (
    gpu_buffers,
    gpu_kernel,
    gpu_signals,
    triton_backends,
)
from syncopate_jax.backends.buffers import Buffers
from syncopate_jax.backends.by_target import ByTarget
from syncopate_jax.backends.gpu_buffers import GATHERED, INPUT, Key
from syncopate_jax.backends.gpu_kernel import CTA_AXIS, FusedKernel
from syncopate_jax.backends.gpu_layout import Layout
from syncopate_jax.backends.gpu_peers import Peers
from syncopate_jax.backends.gpu_places import LOCAL, Row
from syncopate_jax.backends.gpu_signals import Signals
from syncopate_jax.backends.gpu_tables import LayoutMaker
from syncopate_jax.backends.interface import Emitted, Work, wrong_platform
from syncopate_jax.backends.triton_kernel import FusedTriton
from syncopate_jax.backends.triton_layout import FlaggedTritonMaker
from syncopate_jax.errors import SyncopateError, UnsupportedError
from syncopate_jax.ir.text import row_text
from syncopate_jax.native import build, copies
from syncopate_jax.options import Launch
from syncopate_jax.registry import backends


class CopyEngine:
    """See the module."""

    name = "copy_engine"
    targets = ("mosaic_gpu",)
    folds = False

    def workers(self, launch: Launch, ranks: int) -> int:
        """CTAs of a rank that compute: all of them."""
        return launch.ctas(ranks)

    def unsupported_reason(self, work: Work, target: str) -> str | None:
        """Why the work cannot be done here; None when it can."""
        if work.launch.folded:
            return (
                f"{self.name} copies between devices; folded ranks share one: use 'tma_dedicated'"
            )
        if jax.process_count() > 1:
            return (
                f"{self.name} copies between the devices of one process, this program has "
                f"{jax.process_count()}; use 'tma_dedicated' or 'xla'"
            )
        for name in ("watchdog_us", "late_us"):
            if getattr(work.launch, name):
                return f"{self.name} has no {name} in the kernel; use launch.{name}=0"
        try:
            self.check(work)
            _call(work, gpu_buffers.placed_buffers(work))
        except SyncopateError as error:
            return str(error)
        return build.missing()

    def emit(self, work: Work, target: str) -> Emitted:
        """The handlers and the kernel between them."""

        def emitted(
            *operands: jax.Array, platform: str, interpret: Any, **_: Any
        ) -> Sequence[jax.Array]:
            return _Run(work, platform, interpret, self).run(operands)

        return emitted

    def check(self, work: Work) -> None:
        """Raises UnsupportedError where the kernel cannot wait for copies."""
        _layout(work)

    def gathered(self, work: Work) -> dict[Key, jax.ShapeDtypeStruct]:
        """The buffers that copies fill, as the kernel takes them."""
        placed = _layout(work).by_key
        keys = [(tensor, GATHERED) for tensor in read_tensors(work)]
        held = [placed[k] for k in keys if k in placed]
        return {b.key: jax.ShapeDtypeStruct(b.matrices, b.dtype) for b in held}

    def behind(
        self,
        work: Work,
        operands: Sequence[jax.Array],
        arrived: Mapping[Key, jax.Array],
        flags: jax.Array,
    ) -> list[jax.Array]:
        """The kernel's results; it reads ``arrived`` behind a wait for ``flags``."""
        kernel = FlaggedKernel(work, _layout(work), work.launch, None, 0)
        return kernel.call_behind(operands, arrived, flags)


class _OneRaise(LayoutMaker):
    """The layout of a kernel whose flags count copies, each once."""

    def copiers_of(self, row: int) -> int:
        return 1


def _layout(work: Work) -> Layout:
    return _OneRaise(work, 1).make()


def read_tensors(work: Work) -> list[str]:
    """Plan tensors that the kernel reads, in the order of the handler's operands and results."""
    return [b.tensor for b in work.axis_map.bindings if b.operand in work.kernel.operands]


def _call(work: Work, places: Buffers) -> copies.Call:
    """The copies of every rank; raises UnsupportedError where the copy engine cannot do them."""
    plan, c = work.schedule.plan, work.schedule.plan.columns
    tensors = read_tensors(work)
    if c.n == 0:
        raise UnsupportedError(f"plan {plan.name} moves nothing; use backend 'xla'")
    place_in_list = np.arange(c.n) - np.searchsorted(c.rank, c.rank)
    distance = (c.src_rank - c.dst_rank) % plan.num_ranks
    raised: dict[tuple[int, int], int] = {}
    found: list[copies.Copy] = []
    for row in np.lexsort((distance, place_in_list, c.dst_rank)).tolist():
        found += _copies(work, places, tensors, row, raised)
    return copies.Call(plan.name, plan.num_ranks, tuple(found), int(work.schedule.num_slots.max()))


def _copies(
    work: Work,
    places: Buffers,
    tensors: Sequence[str],
    row: int,
    raised: dict[tuple[int, int], int],
) -> list[copies.Copy]:
    """One operation as copies of rows, the last of which raises its flag."""
    plan, c = work.schedule.plan, work.schedule.plan.columns
    src_rank, dst_rank = int(c.src_rank[row]), int(c.dst_rank[row])
    source = places.source(row)
    if source.kind != INPUT or source.tensor not in tensors or c.reduce[row]:
        raise UnsupportedError(
            f"plan {plan.name}: {row_text(plan, row)} moves what a tile made or what arrived "
            f"before, and a copy is started ahead of the kernel; use a plan of one hop of what "
            f"tiles read, or 'tma_dedicated'"
        )
    target = places.destination(row)
    signals = work.schedule.op_signals.row(row)
    if any(rank != dst_rank for rank, _ in signals) or len(signals) > 1:
        raise UnsupportedError(
            f"plan {plan.name}: {row_text(plan, row)} raises signals {signals}, and a copy raises "
            f"one slot where it lands; use 'tma_dedicated'"
        )
    ndim = source.lo.shape[1]
    box = (c.dst_hi[row, :ndim] - c.dst_lo[row, :ndim]).tolist()
    rows = copies.box_rows(
        jnp.dtype(plan.tensor(target.tensor).dtype).itemsize,
        (source.shape, (c.src_lo[row, :ndim] - source.lo[src_rank]).tolist()),
        (target.shape, (c.dst_lo[row, :ndim] - target.lo[dst_rank]).tolist()),
        box,
    )
    found = []
    for number, (src, src_pitch, dst, dst_pitch, width, count) in enumerate(rows):
        slot, value = -1, 0
        if signals and number + 1 == len(rows):
            slot = signals[0][1]
            value = raised[dst_rank, slot] = raised.get((dst_rank, slot), 0) + 1
        lane = 0 if src_rank == dst_rank else 1
        source_at = (tensors.index(source.tensor), src, src_pitch)
        target_at = (tensors.index(target.tensor), dst, dst_pitch)
        found.append(
            copies.Copy(dst_rank, src_rank, *source_at, *target_at, width, count, slot, value, lane)
        )
    return found


def own_copies(work: Work, places: Buffers) -> list[copies.Copy]:
    """What each rank has from the start, into its gathered buffers: for a kernel that is handed
    those alone."""
    plan, found = work.schedule.plan, []
    for number, tensor in enumerate(read_tensors(work)):
        held, seen = places.items[tensor, INPUT], places.items[tensor, GATHERED]
        itemsize = jnp.dtype(plan.tensor(tensor).dtype).itemsize
        for rank in range(plan.num_ranks):
            lo = np.maximum(held.lo[rank], seen.lo[rank])
            box = np.maximum(np.minimum(held.hi[rank], seen.hi[rank]) - lo, 0)
            ends = [
                (side.shape, (lo - side.lo[rank]).tolist() if box.all() else [0] * len(box))
                for side in (held, seen)
            ]
            for src, src_pitch, dst, dst_pitch, width, count in copies.box_rows(
                itemsize, ends[0], ends[1], box.tolist()
            ):
                place = (number, src, src_pitch, number, dst, dst_pitch, width, count)
                found.append(copies.Copy(rank, rank, *place, -1, 0, 0))
    return found


class _Run:
    """The operator on one platform."""

    def __init__(self, work: Work, platform: str, interpret: Any, engine: CopyEngine):
        self.work, self.platform, self.engine = work, platform, engine
        self.interpret = interpret
        self.plan = work.schedule.plan
        self.places = gpu_buffers.placed_buffers(work)
        self.tensors = read_tensors(work)
        self.call = _call(work, self.places)

    def run(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        named = dict(zip(self.work.kernel.operands, operands, strict=True))
        bound = {b.tensor: b.operand for b in self.work.axis_map.bindings}
        sources = [named[bound[tensor]] for tensor in self.tensors]
        if self.platform == "cpu":
            outs, flags, buffers = self._in_memory(named, sources)
        elif self.platform == "cuda":
            outs, flags, buffers = self._on_device(operands, sources)
        else:
            raise UnsupportedError(wrong_platform(self.engine.name, self.platform))
        return copies.join(outs, flags, [*sources, *buffers])

    def _on_device(
        self, operands: Sequence[jax.Array], sources: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
        gathered = self.engine.gathered(self.work)
        buffers, flags = copies.start(
            self.call, copies.place(self.work.axis_names), sources, list(gathered.values())
        )
        arrived = dict(zip(gathered, buffers, strict=True))
        return self.engine.behind(self.work, operands, arrived, flags), flags, buffers

    def _in_memory(
        self, named: Mapping[str, jax.Array], sources: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
        """On the CPU: the same copies, all of them awaited, then the kernel unfused."""
        work, kernel, rank = self.work, self.work.kernel, lax.axis_index(self.work.axis_names)
        call = replace(self.call, copies=(*own_copies(work, self.places), *self.call.copies))
        seen = [self.places.items[tensor, GATHERED] for tensor in self.tensors]
        types = [
            jax.ShapeDtypeStruct(b.shape, jnp.dtype(self.plan.tensor(b.tensor).dtype)) for b in seen
        ]
        buffers, flags = copies.start(call, copies.place(work.axis_names), sources, types)
        buffers = copies.wait(call, flags, jnp.asarray(call.wanted())[rank], buffers)
        full = dict(named)
        bound = {b.tensor: b.operand for b in work.axis_map.bindings}
        for buffer, held in zip(buffers, seen, strict=True):
            at = jnp.asarray(self.places.origins[held.tensor] - held.lo, jnp.int32)[rank]
            operand = bound[held.tensor]
            full[operand] = lax.dynamic_slice(buffer, at, work.accesses[operand].shape)
        outs = kernel.unfused(
            *(full[name] for name in kernel.operands),
            runner=f"on the CPU {self.engine.name}",
            interpret=self.interpret,
        )
        return outs, flags, buffers


@dataclass(frozen=True, slots=True, eq=False)
class FlaggedKernel(FusedKernel):
    """The kernel whose gathered buffers are filled, and flags raised, from outside it."""

    @property
    def greets(self) -> bool:
        """It touches no peer, so there is nobody to greet and no CTA for that."""
        return False

    def call_behind(
        self, operands: Sequence[jax.Array], arrived: Mapping[Key, jax.Array], flags: jax.Array
    ) -> list[jax.Array]:
        """The results of one rank; blocks of ``arrived`` are read behind a wait for ``flags``."""
        kernel = self.work.kernel
        loop: Any = kernel.loop
        placed = self.placed
        arrays: dict[Key, jax.Array] = {}
        for name, x, spec in zip(kernel.operands, operands, kernel.in_specs, strict=True):
            key = self._operand_key(name)
            if key not in placed:
                placed[key] = gpu_buffers.Placed(key, x.shape, gpu_kernel.cut_of(spec), x.dtype)
            arrays[key] = x.reshape(placed[key].matrices)
        arrays |= arrived
        outs = {
            key: jax.ShapeDtypeStruct(b.matrices, b.dtype)
            for key, b in placed.items()
            if key not in arrays and key[1] in (LOCAL, gpu_buffers.RESULT)
        }

        def body(table_ref: Any, flags_ref: Any, *refs: Any) -> None:
            named = dict(zip([*arrays, *outs], refs, strict=True))
            # A kernel whose peers' memory it does not touch cannot ask which rank it is.
            rank, zero = flags_ref[flags.shape[0] - 1], jnp.int32(0)
            peers = Peers(named, placed, frozenset(), rank, self.ranks, self.work.axis_names)
            waits = _Flags(flags_ref, self.layout.num_slots, zero, False, None)
            cta = lax.axis_index(CTA_AXIS)
            warpgroup = lax.axis_index(loop.launch()["thread_name"])
            row = Row(table_ref, rank)
            gpu_kernel._Cta(self, row, peers, waits, None, cta, warpgroup).compute(cta)

        body.__name__ = f"fused_{kernel.name}"
        made = plgpu.kernel(
            body,
            out_type=list(outs.values()),
            grid=(self.ctas,),
            grid_names=(CTA_AXIS,),
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
            **loop.launch(),
        )(jnp.asarray(self.layout.table), flags, *arrays.values())
        by_key = dict(zip(outs, made, strict=True))
        return [self._result(name, placed, by_key) for name in kernel.results]


@dataclass(frozen=True, slots=True)
class _Flags(Signals):
    """Flags that the copy engine writes, in the place of the launch's own counters."""

    def wait(self, slot: Any, count: Any, position: Any = -1, step: Any = -1) -> None:
        """Waits, with the whole warpgroup, until flag ``slot`` has reached ``count``."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
        def wait(ctx: Any, flag: Any, least: Any) -> None:
            del ctx
            counter = mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(flag))
            counter.wait(least.registers.item(), decrement=False)

        wait(self.counters.at[pl.ds(slot, 1)], jnp.asarray(count, jnp.int32))
        gpu_signals.fence()


class TritonCopyEngine(CopyEngine):
    """As above, with a rewritten Triton kernel that waits for the flags."""

    targets = ("triton",)

    def check(self, work: Work) -> None:
        """Raises UnsupportedError where the kernel's text does not show what is needed."""
        self._kernel(work)

    def _kernel(self, work: Work) -> FusedTriton:
        return FusedTriton(self.name, work, triton_backends.lay_out(work, FlaggedTritonMaker, 0))

    def gathered(self, work: Work) -> dict[Key, jax.ShapeDtypeStruct]:
        """The buffers that copies fill."""
        placed = {b.key: b for b in self._kernel(work).between.values()}
        keys = [(tensor, GATHERED) for tensor in read_tensors(work)]
        return {
            k: jax.ShapeDtypeStruct(placed[k].shape, placed[k].dtype) for k in keys if k in placed
        }

    def behind(
        self,
        work: Work,
        operands: Sequence[jax.Array],
        arrived: Mapping[Key, jax.Array],
        flags: jax.Array,
    ) -> list[jax.Array]:
        """The kernel's results; it reads ``arrived`` behind a wait for ``flags``."""
        kernel = self._kernel(work)
        names = {b.key: name for name, b in kernel.between.items()}
        return kernel.behind(operands, {names[key]: x for key, x in arrived.items()}, flags)


backends.register("copy_engine")(
    ByTarget("copy_engine", {"mosaic_gpu": CopyEngine(), "triton": TritonCopyEngine()})
)
