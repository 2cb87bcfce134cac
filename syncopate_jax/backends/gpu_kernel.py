"""The fused kernel of target ``mosaic_gpu``: one launch whose CTAs compute, communicate or both.

The compiled schedule and the loop kernel meet here: the loop is handed the schedule's order and
hooks that wait and signal, and is told where blocks of its operands are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.backends import gpu_greeting, gpu_peers, gpu_signals
from syncopate_jax.backends.gpu_buffers import INPUT, Key, Placed, cut_dimensions
from syncopate_jax.backends.gpu_copy import Copier, Mover
from syncopate_jax.backends.gpu_greeting import Greeting
from syncopate_jax.backends.gpu_layout import Layout
from syncopate_jax.backends.gpu_peers import Peers
from syncopate_jax.backends.gpu_places import LOCAL, Known, Places, Row, TableOrder
from syncopate_jax.backends.gpu_signals import Signals, Watch
from syncopate_jax.backends.gpu_watchdog import raise_given_up
from syncopate_jax.backends.interface import Emitted, Work, wrong_platform
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.options import Launch
from syncopate_jax.pallas_kernels.tile_loop_mosaic_gpu import Tile, TileLoop

CTA_AXIS = "cta"


@dataclass(frozen=True, slots=True, eq=False)
class FusedKernel:
    """The kernel of one operator.

    Attributes:
      mover: how the communicating CTAs copy; None if there are none.
      communicating: CTAs of a rank that only communicate.
      direct: the computing CTAs store results by themselves, without the copy unit.
    """

    work: Work
    layout: Layout
    launch: Launch
    mover: Mover | None
    communicating: int
    direct: bool = False

    @property
    def ranks(self) -> int:
        return self.work.schedule.plan.num_ranks

    @property
    def ctas(self) -> int:
        """CTAs of a rank."""
        return self.work.schedule.workers + self.communicating + self.greeters

    @property
    def greets(self) -> bool:
        """Whether ranks greet each other inside the kernel; else XLA has a barrier before it.

        That takes a CTA which has nothing else to do before peers are there: one that communicates,
        or one more than there are to compute. Its waits have no limit of time, so not under the
        watchdog; and where tiles are stored from registers there are none left for it.
        """
        launch = self.launch
        barrier = launch.device_barrier or launch.folded or launch.watchdog_us > 0 or self.direct
        if barrier or not 1 < self.ranks <= gpu_greeting.MOST_RANKS:
            return False
        return self.communicating > 0 or self.work.schedule.workers < launch.ctas(self.ranks)

    @property
    def greeters(self) -> int:
        """CTAs of a rank that greet and do nothing else."""
        return int(self.greets and not self.communicating)

    @property
    def steps(self) -> int:
        """K steps of a tile."""
        kernel = self.work.kernel
        return math.prod(kernel.grid[axis] for axis in kernel.reduction_axes)

    @property
    def placed(self) -> dict[Key, Placed]:
        """Every buffer, those of operands and results that the plan does not move too."""
        kernel, bound = self.work.kernel, {b.operand for b in self.work.axis_map.bindings}
        found = dict(self.layout.by_key)
        specs = dict(zip(kernel.results, kernel.out_specs, strict=True))
        outs = {
            name: out
            for name, out in zip(kernel.results, kernel.out_shape, strict=True)
            if name not in bound
        }
        for name, out in outs.items():
            found[name, LOCAL] = Placed((name, LOCAL), out.shape, cut_of(specs[name]), out.dtype)
        return found

    def call(
        self, operands: Sequence[jax.Array], shared: Sequence[bool], interpret: Any = None
    ) -> list[jax.Array]:
        """The results of one rank, or of all with a leading rank axis if they are folded.

        ``shared`` says which operands folded ranks share; those have no rank axis.
        """
        kernel, folded = self.work.kernel, self.launch.folded
        placed = self.placed
        keys, arrays = [], []
        for name, x, spec, one in zip(
            kernel.operands, operands, kernel.in_specs, shared, strict=True
        ):
            key = self._operand_key(name)
            if key not in placed:
                shape = x.shape[1:] if folded and not one else x.shape
                placed[key] = Placed(key, shape, cut_of(spec), x.dtype)
            keys.append(key)
            arrays.append(x.reshape(self._held(placed[key], one)))
        out_keys = [key for key in placed if key not in keys]
        outs = [jax.ShapeDtypeStruct(self._held(placed[k]), placed[k].dtype) for k in out_keys]
        watched = self.launch.watchdog_us > 0
        records = (self.ranks if folded else 1, len(gpu_signals.RECORD))
        outs += [jax.ShapeDtypeStruct(records, jnp.int32)] if watched else []
        outs += [gpu_greeting.DOOR] if self.greets else []
        table = jnp.asarray(self.layout.table)
        is_shared = frozenset(k for k, one in zip(keys, shared, strict=True) if one)

        def body(table_ref: Any, *refs: Any) -> None:
            named = dict(zip([*keys, *out_keys], refs, strict=False))
            record = refs[-1] if watched else None
            door = refs[-1] if self.greets else None
            self._body(table_ref, named, placed, is_shared, record, door)

        body.__name__ = f"fused_{kernel.name}"
        made = plgpu.kernel(
            body,
            out_type=outs,
            grid=(self.ctas * (self.ranks if folded else 1),),
            grid_names=(CTA_AXIS,),
            compiler_params=plgpu.CompilerParams(
                unsafe_no_auto_barriers=True, skip_device_barrier=self.greets
            ),
            interpret=interpret,
            **kernel.loop_body.launch(),
        )(table, *arrays)
        if watched:
            raise_given_up(made[-1], self.work.schedule.plan.name, self.work.schedule.order)
        by_key = dict(zip(out_keys, made, strict=False))
        return [self._result(name, placed, by_key) for name in kernel.results]

    def _operand_key(self, name: str) -> Key:
        tensors = {b.operand: b.tensor for b in self.work.axis_map.bindings}
        return (tensors[name], INPUT) if name in tensors else (name, LOCAL)

    def _held(self, buffer: Placed, shared: bool = False) -> tuple[int, ...]:
        """Shape of a buffer as the kernel gets it."""
        lead, *rest = buffer.matrices
        return (lead * self.ranks if self.launch.folded and not shared else lead, *rest)

    def _result(
        self, name: str, placed: Mapping[Key, Placed], made: Mapping[Key, jax.Array]
    ) -> jax.Array:
        key = self.layout.results.get(name, (name, LOCAL))
        lead = (self.ranks,) if self.launch.folded else ()
        return made[key].reshape(*lead, *placed[key].shape)

    # --- inside the kernel ---------------------------------------------------------------------

    def _body(
        self,
        table: Any,
        refs: Mapping[Key, Any],
        placed: Mapping[Key, Placed],
        shared: frozenset[Key],
        record: Any,
        door: Any,
    ) -> None:
        launch, layout = self.launch, self.layout
        rank, cta = gpu_peers.split_cta(lax.axis_index(CTA_AXIS), self.ctas, launch.folded)
        names = () if launch.folded else self.work.axis_names
        rank_id = rank if launch.folded or self.ranks == 1 else lax.axis_index(names)
        peers = Peers(refs, placed, shared, rank, self.ranks, names)
        slots = layout.num_slots
        total = slots * (self.ranks if launch.folded else 1)
        total += gpu_greeting.SLOTS if door is not None else 0
        watch = None
        if record is not None:
            row = rank if launch.folded else 0
            watch = Watch(record, row, rank_id, launch.watchdog_us)
        signals = Signals(
            pl.get_global(plgpu.SemaphoreType.REGULAR((total,))),
            slots,
            rank,
            launch.folded,
            peers.peer_id if self.ranks > 1 else None,
            watch,
        )
        wg = lax.axis_index(self.work.kernel.loop_body.launch()["thread_name"])
        greeting = None
        if door is not None:
            greeting = Greeting(rank_id, door, signals, peers, slots)
        run = _Cta(self, Row(table, rank_id), peers, signals, greeting, cta, wg)
        if watch is not None:
            pl.when((cta == 0) & (wg == 0))(lambda: gpu_signals.clear_record(watch))
        if launch.late_us:
            gpu_signals.be_late(launch.late_us, rank_id)
            gpu_signals.be_late(launch.late_us // 4 + 1, self.ranks + cta)
        if self.communicating:
            pl.when(cta < self.communicating)(run.communicate)
            pl.when(cta >= self.communicating)(lambda: run.compute(cta - self.communicating))
        elif self.greeters:
            workers = self.work.schedule.workers
            pl.when(cta < workers)(lambda: run.compute(cta))
            pl.when(cta == workers)(run.greet)
        else:
            run.compute(cta)
        run.leave()


@dataclass(frozen=True, slots=True)
class _Cta:
    """What one CTA does."""

    kernel: FusedKernel
    table: Row
    peers: Peers
    signals: Signals
    greeting: Greeting | None
    cta: Any
    wg: Any

    def compute(self, worker: Any) -> None:
        """The tiles of one worker, each behind its waits, and their signals."""
        layout, table, signals = self.kernel.layout, self.table, self.signals
        steps = self.kernel.steps

        def before_tile(tile: Tile) -> None:
            if layout.reads_peers:
                self._meet(tile.step == 0)
            signals.wait_all(table, layout.waits, tile.chunk, tile.chunk)

        def before_k_step(tile: Tile, step: Any) -> None:
            # Those who multiply wait for what is loaded last, and touch peers after a product.
            self._meet((tile.step == 0) & (step == steps - 1))
            if not layout.k_waits.empty:
                signals.wait_step(table, layout.k_waits, tile.chunk, step, tile.chunk)

        def after_tile(tile: Tile) -> None:
            known = tile.known and tile.known.signals
            signals.signal_all(table, layout.signals, tile.chunk, known)

        def before_addend(tile: Tile) -> None:
            known = tile.known and tile.known.waits
            signals.wait_all(table, layout.e_waits, tile.chunk, tile.chunk, known)

        def look_up(stored: Tile, tile: Tile) -> tuple[Tile, Tile]:
            done = Known(stores=layout.stores.ahead(table, stored.chunk))
            begun = Known(addends=layout.addends.ahead(table, tile.chunk))
            return dataclasses.replace(stored, known=done), dataclasses.replace(tile, known=begun)

        def look_up_signals(stored: Tile, tile: Tile) -> tuple[Tile, Tile]:
            done = Known(signals=layout.signals.ahead(table, stored.chunk))
            begun = Known(waits=layout.e_waits.ahead(table, tile.chunk))
            return dataclasses.replace(stored, known=done), dataclasses.replace(tile, known=begun)

        loop = TileLoop(
            TableOrder(layout, table, self.kernel.work.schedule.num_tiles),
            worker,
            self.kernel.work.schedule.workers,
            before_tile=before_tile if self.greeting or not layout.waits.empty else None,
            before_k_step=before_k_step if self.greeting or not layout.k_waits.empty else None,
            after_tile=None if layout.signals.empty else after_tile,
            before_addend=None if layout.e_waits.empty else before_addend,
            look_up=look_up,
            look_up_signals=look_up_signals,
            sends=not self.kernel.communicating and not layout.signals.empty,
            in_turn=layout.in_turn,
        )
        local = self.kernel.work.kernel
        places = Places(
            self.kernel.work,
            layout,
            table,
            self.peers,
            direct=self.kernel.direct,
            own_only=self.kernel.communicating > 0,
        )
        local.loop_body.emit(local, places, loop)
        if not layout.exit_signals.empty:
            # The first warpgroup has used all that this CTA has read.
            @pl.when(self.wg == 0)
            def _() -> None:
                self._meet()
                signals.signal_all(table, layout.exit_signals, 0)

    def _meet(self, condition: Any = True) -> None:
        """Waits until peers may be touched; every warpgroup that will does so first."""
        if self.greeting is not None:
            pl.when(condition)(self.greeting.meet)

    def greet(self, shut: bool = True) -> None:
        """Peers are let in and awaited, and the door is shut behind them if ``shut``."""
        greeting = self.greeting
        if greeting is not None:
            self._by_greeter(greeting.open, greeting.greet, *[greeting.shut] * shut)

    def _by_greeter(self, *steps: Callable[[], None]) -> None:
        """Steps of the greeting: by the last warpgroup of a CTA that does not compute."""
        last = self.kernel.work.kernel.loop_body.warpgroups - 1
        cta = 0 if self.kernel.communicating else self.kernel.work.schedule.workers

        @pl.when((self.cta == cta) & (self.wg == last))
        def _() -> None:
            for step in steps:
                step()

    def communicate(self) -> None:
        """This CTA's part of the rank's operations."""
        mover, loop = self.kernel.mover, self.kernel.work.kernel.loop_body
        if mover is None:
            return
        copier = functools.partial(
            Copier,
            layout=self.kernel.layout,
            table=self.table,
            peers=self.peers,
            signals=self.signals,
            mover=mover,
            warpgroup=self.wg,
            number=self.cta * loop.warpgroups + self.wg,
            copiers=self.kernel.communicating * loop.warpgroups,
        )
        # Where copies wait for tiles there is time for all of the greeting before them.
        at_once = not self.kernel.layout.op_waits.empty
        self.greet(shut=at_once)
        self._meet()
        scratch = mover.scratch(self.kernel.layout, loop.warpgroups)
        pl.run_scoped(
            lambda **refs: copier(scratch=refs).run(),
            collective_axes=loop.launch()["thread_name"],
            **scratch,
        )
        if self.greeting is not None and not at_once:
            self._by_greeter(self.greeting.shut)

    def leave(self) -> None:
        """Nothing of this rank is written or read by a peer any more when it leaves."""
        waits = self.kernel.layout.exit_waits
        if not waits.empty:
            pl.when((self.cta == 0) & (self.wg == 0))(
                lambda: self.signals.wait_all(self.table, waits, 0)
            )
        if self.greeting is not None:
            self._by_greeter(self.greeting.leave)


def cut_of(spec: pl.BlockSpec) -> tuple[int, int]:
    """The two dimensions that blocks cut."""
    rows, columns = cut_dimensions(spec)
    return rows, columns


def emitted(name: str, kernel: FusedKernel) -> Emitted:
    """The kernel as a backend hands it over; ``name`` is the backend's.

    What is handed over raises UnsupportedError for a platform that is neither CUDA nor simulated.
    """

    def emit(
        *operands: jax.Array,
        platform: str,
        interpret: Any,
        shared: Sequence[bool] | None = None,
    ) -> Sequence[jax.Array]:
        simulated = platform == "cpu" and isinstance(interpret, plgpu.InterpretGPUParams)
        if platform != "cuda" and not simulated:
            raise UnsupportedError(wrong_platform(name, platform))
        alone = [False] * len(operands) if shared is None else shared
        return kernel.call(operands, alone, interpret if simulated else None)

    return emit
