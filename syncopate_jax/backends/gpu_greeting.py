"""Ranks greet each other inside the kernel, in place of a barrier between devices before it.

No rank may touch a peer's memory before the peer's launch has begun: until then it is another
program's, and the peer's counters are not cleared. XLA's barrier sees to that with a launch of its
own, in which nothing is computed. A greeting does it beside the first tiles, in a CTA that computes
none: its waits and fences would stall a product. Every rank has a word in its own memory, its door,
that peers read:

1. ``open``: the rank writes ``OPEN`` into its door; its counters are clear, its memory is its own.
2. ``greet``: it reads the doors of all peers until they are open, tells its own CTAs, who wait for
   that (``meet``) before they first touch a peer, and each peer that it has seen it.
3. ``shut``: once all peers have seen its door open it clears it, and tells them so.
4. ``leave``: it stays until all peers have shut theirs, so that no later launch, whose doors may
   lie at the same addresses, finds one open that its rank has not opened yet.

Of steps 2 to 4, nothing is written at a peer before its door has been seen open. What lies at a
door's address earlier is somebody else's data, and could only by chance be ``OPEN``, 64 bits drawn
once: a rank that has opened its door shuts it before it leaves, and nothing copies it. One
warpgroup of one CTA greets. ``tests/backends/test_gpu_greeting.py`` walks through all orders of
these steps, over several launches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from syncopate_jax.backends.gpu_peers import Peers
from syncopate_jax.backends.gpu_signals import Signals

DOOR = jax.ShapeDtypeStruct((1, 2), jnp.int32)
"""A door: one word of 64 bits."""
OPEN = 0x5EC0_9A7E_D00B_0CE4
SHUT = 0
SLOTS = 3  # counters of a greeting: ENTERED, SEEN and GONE
ENTERED, SEEN, GONE = range(SLOTS)
MOST_RANKS = 32  # whose doors one thread reads at once


@dataclass(frozen=True, slots=True)
class Greeting:
    """The greeting of one rank.

    Attributes:
      rank: this one.
      door: int32 GMEM ref of its own door; every peer has one.
      first: the first of its ``SLOTS`` counters.
    """

    rank: Any
    door: Any
    signals: Signals
    peers: Peers
    first: int

    @property
    def others(self) -> int:
        return self.peers.ranks - 1

    def open(self) -> None:
        """Lets peers in."""
        open_door(self.door)

    def greet(self) -> None:
        """Waits until every peer has opened its door, and tells this rank's CTAs, and them."""
        ranks = range(self.peers.ranks)
        await_doors([plgpu.remote_ref(self.door, self.peers.peer_id(rank)) for rank in ranks])
        pl.semaphore_signal(self.signals.counters.at[self.first + ENTERED])
        self._tell_peers(SEEN)

    def meet(self) -> None:
        """Waits, with the whole warpgroup, until the rank has greeted."""
        self.signals.wait(self.first + ENTERED, 1)

    def shut(self) -> None:
        """Closes the door behind all peers."""
        self.signals.wait(self.first + SEEN, self.others)
        shut_door(self.door)
        self._tell_peers(GONE)

    def leave(self) -> None:
        """Waits until all peers have closed their doors."""
        self.signals.wait(self.first + GONE, self.others)

    def _tell_peers(self, what: int) -> None:
        def tell(rank: int) -> None:
            self.signals.signal(jnp.int32(rank), self.first + what)

        for rank in range(self.peers.ranks):
            pl.when(self.rank != rank)(functools.partial(tell, rank))


def open_door(door: Any) -> None:
    """Lets who reads the door know all that this warpgroup did and knows."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(ctx: Any, door: Any) -> None:
        del ctx
        _emit_word(door, OPEN)

    emit(door)


def shut_door(door: Any) -> None:
    """Clears the door, before all that this warpgroup signals afterwards."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(ctx: Any, door: Any) -> None:
        del ctx
        _emit_word(door, SHUT)

    emit(door)


def await_doors(doors: list[Any]) -> None:
    """Returns once all doors are open; what their ranks did before is then known."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(doors))
    def emit(ctx: Any, *doors: Any) -> None:
        del ctx
        i1, i64 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(64)
        wanted = mgpu_utils.c(OPEN, i64)
        with mgpu_utils.single_thread(scope=mgpu_utils.ThreadSubset.WARPGROUP):
            pointers = [mgpu_utils.memref_ptr(door) for door in doors]
            loop = scf.WhileOp([], [])
            with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
                found = [_read_word(pointer) for pointer in pointers]
                closed = mgpu_utils.c(0, i1)
                for word in found:
                    differs = arith.cmpi(arith.CmpIPredicate.ne, word, wanted)
                    closed = arith.ori(closed, differs)
                scf.condition(closed, [])
            with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
                scf.yield_([])
            mgpu_utils.inline_ptx("fence.acq_rel.sys;", has_side_effects=True)
        mgpu_utils.warpgroup_barrier()

    emit(*doors)


def _emit_word(door: Any, word: int) -> None:
    value = mgpu_utils.c(word, ir.IntegerType.get_signless(64))
    mgpu_utils.warpgroup_barrier()
    with mgpu_utils.single_thread(scope=mgpu_utils.ThreadSubset.WARPGROUP):
        pointer = mgpu_utils.memref_ptr(door)
        text = "st.release.sys.global.b64 [$0], $1;"
        mgpu_utils.inline_ptx(text, pointer, value, has_side_effects=True)
        mgpu_utils.inline_ptx("fence.acq_rel.sys;", has_side_effects=True)
    mgpu_utils.warpgroup_barrier()


def _read_word(pointer: Any) -> Any:
    return mgpu_utils.inline_ptx(
        "ld.relaxed.sys.global.b64 $0, [$1];",
        pointer,
        result_types=ir.IntegerType.get_signless(64),
        has_side_effects=True,
    )
