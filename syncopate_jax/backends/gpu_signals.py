"""Signals of a fused GPU kernel: counters of a launch in GMEM, raised by anyone, compared with >=.

A wait is an acquire, at system scope unless asked, by one thread of a warpgroup, then a fence that
makes what was acquired visible to the copy unit. A signal is such a release by one thread; who has
started copies has waited until those have landed (not only left), and if another warpgroup signals
them has said so at a barrier.

Counters are zero at the start of a rank's launch: XLA clears them ahead of it. Peers raise them
only once they know that it has begun: they have been greeted (``gpu_greeting``), or XLA had a
barrier between devices before the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from syncopate_jax.backends.rank_table import Ahead, Get, Lists

RECORD = ("found", "rank", "position", "step", "slot", "expected")
"""Fields of the watchdog's record; all 0 when no wait was given up, else ``found`` is one more."""


@dataclass(frozen=True, slots=True)
class Watch:
    """The development watchdog: waits that are given up.

    Attributes:
      record: int32 GMEM ref, a row of ``RECORD`` for every rank on this device.
      row: this rank's.
      rank: which one that is.
      microseconds: how long a wait may take.
    """

    record: Any
    row: Any
    rank: Any
    microseconds: int


@dataclass(frozen=True, slots=True)
class Signals:
    """The counters of a launch, as seen by one rank.

    Attributes:
      counters: semaphores shared by all CTAs.
      slots: counters of a rank.
      rank: of this CTA.
      folded: ranks share one device, and ``counters`` holds those of all.
      peer_id: mesh address of a rank; None where there are no peers.
      watch: bounds every wait, or None.
      scope: of releases and acquires; that of one GPU is for where no other raises a counter.
    """

    counters: Any
    slots: int
    rank: Any
    folded: bool
    peer_id: Any
    watch: Watch | None = None
    scope: Literal["sys", "gpu"] = "sys"

    def wait(self, slot: Any, count: Any, position: Any = -1, step: Any = -1) -> None:
        """Waits, with the whole warpgroup, until the rank's ``slot`` has reached ``count``."""
        at = self.rank * self.slots + slot if self.folded else slot
        if self.watch is None:
            counter = self.counters.at[at]
            plgpu.semaphore_wait(counter, count, decrement=False, memory_scope=self.scope)
        else:
            _bounded_wait(self.counters, self.watch, at, [count, position, step, slot])
        fence()

    def wait_all(
        self, table: Any, waits: Lists, point: Any, position: Any = -1, known: Ahead | None = None
    ) -> None:
        """Waits for every (slot, count) of a point, which may have been read ahead."""
        if not waits.empty:
            waits.visit(table, point, lambda get: self.wait(get(0), get(1), position), known=known)

    def wait_step(self, table: Any, waits: Lists, point: Any, step: Any, position: Any) -> None:
        """Waits for every (step, slot, count) of a point that is for this step."""

        def one(get: Get) -> None:
            pl.when(get(0) == step)(lambda: self.wait(get(1), get(2), position, step))

        waits.visit(table, point, one)

    def signal_all(
        self, table: Any, signals: Lists, point: Any, known: Ahead | None = None
    ) -> None:
        """Raises every (rank, slot) of a point, which may have been read ahead, by one."""
        if not signals.empty:
            signals.visit(table, point, lambda get: self.signal(get(0), get(1)), known=known)

    def signal(self, rank: Any, slot: Any) -> None:
        """Raises a counter of ``rank`` by one."""
        if self.folded:
            pl.semaphore_signal(self.counters.at[rank * self.slots + slot])
        elif self.peer_id is None:
            plgpu.semaphore_signal(self.counters.at[slot], memory_scope=self.scope)
        else:
            pl.semaphore_signal(self.counters.at[slot], device_id=self.peer_id(rank))


def fence() -> None:
    """Orders this thread's accesses of GMEM, and those it has acquired, with the copy unit's."""

    @plgpu.inline_mgpu()
    def emit(ctx: Any) -> None:
        del ctx
        mgpu_utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    emit()


def publish() -> None:
    """Makes what all threads of the warpgroup have stored precede a signal by one of them."""

    @plgpu.inline_mgpu()
    def emit(ctx: Any) -> None:
        del ctx
        mgpu_utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
        mgpu_utils.inline_ptx("fence.acq_rel.sys;", has_side_effects=True)
        mgpu_utils.warpgroup_barrier()

    emit()


def be_late(most_us: int, number: Any) -> None:
    """Holds the warpgroup for up to ``most_us`` microseconds, for development.

    How long is drawn from ``number`` and the clock, whose microseconds are left out: warpgroups
    that come together with one number mostly leave together.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def emit(ctx: Any, number: Any) -> None:
        del ctx
        _emit_delay(most_us * 1000, number.registers.item())

    emit(jnp.asarray(number, jnp.int32))


def clear_record(watch: Watch) -> None:
    """Says that no wait of a rank was given up; long before one can be."""
    for i in range(len(RECORD)):
        watch.record[watch.row, i] = jnp.int32(0)


def _bounded_wait(counters: Any, watch: Watch, at: Any, numbers: list[Any]) -> None:
    """As ``Signals.wait``, for a limited time; then writes the record and goes on.

    The first wait of a rank that is given up makes all later ones of that rank return at once, so
    that the kernel ends; its results are then wrong, and the caller raises.
    """
    scalar = plgpu.Layout.WG_SPLAT
    limit = watch.microseconds * 1000

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[scalar] * 5))
    def wait(ctx: Any, counter: Any, record: Any, *fields: Any) -> None:
        del ctx
        count, rank, position, step, slot = (field.registers.item() for field in fields)
        _emit_bounded_wait(counter, record, count, [rank, position, step, slot, count], limit)

    count, *where = numbers
    fields = [jnp.asarray(n, jnp.int32) for n in (count, watch.rank, *where)]
    record = watch.record.at[pl.ds(watch.row, 1), :]
    wait(counters.at[pl.ds(at, 1)], record, *fields)


COARSE_BITS = 16  # of nanoseconds: a clock of 65 microseconds
MIX = 0x9E3779B1  # odd, so that multiplying loses nothing; 2**32 over the golden ratio


def _emit_delay(most_ns: int, number: Any) -> None:
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    c = mgpu_utils.c
    with mgpu_utils.single_thread(scope=mgpu_utils.ThreadSubset.WARPGROUP):
        start = _clock()
        drawn = arith.trunci(i32, arith.shrui(start, c(COARSE_BITS, i64)))
        for more in (number, c(0, i32)):
            drawn = arith.muli(arith.addi(drawn, more), c(MIX - 2**32, i32))
            drawn = arith.xori(drawn, arith.shrui(drawn, c(15, i32)))
        delay = arith.extui(i64, arith.remui(drawn, c(most_ns, i32)))
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
            waited = arith.subi(_clock(), start)
            scf.condition(arith.cmpi(arith.CmpIPredicate.ult, waited, delay), [])
        with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
            scf.yield_([])
    mgpu_utils.warpgroup_barrier()


def _clock() -> Any:
    """Nanoseconds, the same on all multiprocessors of a device."""
    return mgpu_utils.inline_ptx(
        "mov.u64 $0, %globaltimer;",
        result_types=ir.IntegerType.get_signless(64),
        has_side_effects=True,
    )


def _emit_bounded_wait(
    counter: Any, record: Any, count: Any, fields: list[Any], limit: int
) -> None:
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    pointer, row = mgpu_utils.memref_ptr(counter), mgpu_utils.memref_ptr(record)
    ptx = mgpu_utils.inline_ptx

    def load(address: Any) -> Any:
        text = "ld.relaxed.sys.global.b32 $0, [$1];"
        return ptx(text, address, result_types=i32, has_side_effects=True)

    ult, ne = arith.CmpIPredicate.ult, arith.CmpIPredicate.ne
    with mgpu_utils.single_thread(scope=mgpu_utils.ThreadSubset.WARPGROUP):
        start = _clock()
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
            short = arith.cmpi(ult, load(pointer), count)
            waited = arith.subi(_clock(), start)
            in_time = arith.cmpi(ult, waited, mgpu_utils.c(limit, i64))
            given_up = arith.cmpi(ne, load(row), mgpu_utils.c(0, i32))
            going_on = arith.andi(in_time, arith.xori(given_up, mgpu_utils.c(1, given_up.type)))
            scf.condition(arith.andi(short, going_on), [])
        with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
            scf.yield_([])
        found = load(pointer)
        with mgpu_utils.when(arith.cmpi(ult, found, count)):
            more = arith.addi(found, mgpu_utils.c(1, i32))
            before = ptx(
                "atom.relaxed.sys.global.cas.b32 $0, [$1], 0, $2;",
                row,
                more,
                result_types=i32,
                has_side_effects=True,
            )
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.eq, before, mgpu_utils.c(0, i32))):
                for i, value in enumerate(fields):
                    ptx(
                        f"st.relaxed.sys.global.b32 [$0+{4 * (i + 1)}], $1;",
                        row,
                        value,
                        has_side_effects=True,
                    )
        ptx("fence.acquire.sys;", has_side_effects=True)
    mgpu_utils.warpgroup_barrier()
