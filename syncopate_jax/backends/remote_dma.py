"""Backend ``remote_dma``: a TPU core starts remote copies between the tiles it computes.

The fused kernel is one ``pallas_call`` over (tile position, reduction step). Operands the plan does
not touch stay in Pallas's own pipeline, their index maps composed with the schedule's order.
Communicated ones are copied by hand, block by block, once their chunk has arrived. All tables of a
rank are one int32 vector, prefetched to scalar memory, so that one program serves every rank.

All ranks meet before the first tile, at a barrier that kernels over the same mesh axes share. It
counts right if no rank enters the next kernel before all have entered this one. A rank that has
heard from all others when it ends knows that; where a plan leaves one that has not (the root of a
broadcast), all ranks also meet after the last tile, at a barrier that is the kernel's own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.backends import dma_tables
from syncopate_jax.backends.dma_layout import LANDING, BlockTable, Branch, Layout, Program
from syncopate_jax.backends.in_order import SENT, START, WAIT
from syncopate_jax.backends.interface import Emitted, Work, too_wide, wrong_target
from syncopate_jax.backends.peers import barrier_id, peer_id
from syncopate_jax.errors import SyncopateError, UnsupportedError
from syncopate_jax.kernel.blocks import LANES, SUBLANES, kept_sizes
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.traced_body import check_body, trace_body
from syncopate_jax.kernel.tried_orders import AddendError
from syncopate_jax.options import Launch
from syncopate_jax.registry import backends


class RemoteDma:
    """Remote copies and DMA semaphores of a TPU, in the order of one core (see ``in_order.py``)."""

    name = "remote_dma"
    targets = ("tpu",)
    folds = False
    keeps_gathered = True

    def workers(self, launch: Launch, ranks: int) -> int:
        """One executor, which takes all tiles in order."""
        return 1

    def unsupported_reason(self, work: Work, target: str) -> str | None:
        """Why the work cannot be done here; None when it can.

        Raises AddendError where the body misuses its addend, which no other backend would mend.
        """
        if target not in self.targets:
            return wrong_target(self.name, self.targets, target)
        if fault := work.kernel.body_fault():
            return f"{self.name} runs an ordinary Pallas body: {fault}"
        if reason := too_wide(work):
            return f"{self.name}: {reason}"
        try:
            return _body_reason(work, dma_tables.lay_out(work))
        except AddendError:
            raise
        except SyncopateError as error:
            return str(error)

    def emit(self, work: Work, target: str) -> Emitted:
        """The fused kernel of one rank, over ``work.axis_names``."""
        layout = dma_tables.lay_out(work)
        barrier = barrier_id(work.axis_names) if work.schedule.plan.num_ranks > 1 else None

        def emitted(*operands: jax.Array, platform: str, interpret: Any) -> Sequence[jax.Array]:
            if platform == "cpu":
                _require_one_process()
                return _Kernel(work, layout, barrier).call(operands, _interpretation(interpret))
            _require_blocks_of_a_tpu(work.kernel, [x.shape for x in operands])
            return _Kernel(work, layout, barrier).call(operands, False)

        return emitted


class _BodyError(UnsupportedError):
    """The body itself raises something on its blocks."""


def _body_reason(work: Work, layout: Layout) -> str | None:
    """Why the body cannot be run in the schedule's order, as far as it is known before a call.

    Of operands that no plan moves the dtype is supposed: where the body takes none of those that
    are likely, the call tells.
    """
    kernel, plan = work.kernel, work.schedule.plan
    known = {b.operand: plan.tensor(b.tensor).dtype for b in work.axis_map.bindings}
    outs = [str(out.dtype) for out in kernel.out_shape]
    guarded = dataclasses.replace(kernel, body=_saying_what_raises(kernel))
    for supposed in dict.fromkeys([*known.values(), *outs, "float32", "int32"]):
        dtypes = {name: known.get(name, supposed) for name in kernel.operands}
        try:
            _check_body(dataclasses.replace(work, kernel=guarded), layout, {}, dtypes)
        except _BodyError as error:
            if known.keys() >= set(kernel.operands):
                return f"remote_dma: {error}"
        except UnsupportedError as error:
            return f"remote_dma: {error}"
        else:
            return None
    return None


def _saying_what_raises(kernel: PallasKernel) -> Callable[..., None]:
    """The body, whose errors are told from all others."""
    local = kernel.grid_body

    def body(*refs: jax.Ref, **given: Callable[[], jax.Array]) -> None:
        try:
            local(*refs, **given)
        except Exception as error:  # it is the user's function
            raise _BodyError(
                f"the body of kernel {kernel.name} raises {type(error).__name__} on blocks "
                f"{', '.join(str(jax.typeof(ref)) for ref in refs)}: {error}"
            ) from error

    return body


def _check_body(
    work: Work, layout: Layout, given: Mapping[str, jax.Array], dtypes: Mapping[str, Any]
) -> None:
    """Raises what ``check_body`` raises; ``given``: the operands, as far as they are there."""
    known = {name: access.shape for name, access in work.accesses.items()}
    for name, spec in zip(work.kernel.operands, work.kernel.in_specs, strict=True):
        if name in given and name not in known and spec.block_shape is None:
            known[name] = given[name].shape
    key = (tuple(known.items()), tuple((name, str(dtype)) for name, dtype in dtypes.items()))
    if key not in layout.checked:
        addend = next((b.block for b in layout.blocks if b.name == LANDING), None)
        check_body(work.kernel, known, dtypes, layout.orders, addend)
        layout.checked.add(key)


def _require_one_process() -> None:
    """Raises UnsupportedError where the interpreter would wait for ranks of other processes."""
    if (processes := jax.process_count()) > 1:
        raise UnsupportedError(
            f"remote_dma on CPUs is interpreted, and the interpreter has the ranks of one process; "
            f"this program has {processes} processes: use backend 'xla'"
        )


def _require_blocks_of_a_tpu(kernel: PallasKernel, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raises UnsupportedError for blocks that no TPU's registers hold; ``shapes`` of operands."""
    arrays = [
        *zip(kernel.operands, kernel.in_specs, shapes, strict=True),
        *zip(kernel.results, kernel.out_specs, (x.shape for x in kernel.out_shape), strict=True),
    ]
    for name, spec, shape in arrays:
        sizes = [size or 1 for size in kept_sizes(spec, shape)]
        for unit, size, extent in zip((LANES, SUBLANES), sizes[::-1], shape[::-1], strict=False):
            if len(shape) > 1 and size % unit and size != extent:
                raise UnsupportedError(
                    f"remote_dma: kernel {kernel.name} has blocks {tuple(sizes)} of {name} "
                    f"{list(shape)}, and on a TPU the last two extents of a block are multiples of "
                    f"{SUBLANES} and {LANES}, or all of the dimension: pad it so that the part of "
                    f"each rank is such a multiple, choose other tiles, or use backend 'xla'"
                )


def _interpretation(settings: Any) -> Any:
    """Settings for Pallas's TPU interpreter; its others cannot raise a peer's semaphore."""
    return pltpu.InterpretParams() if settings is True else settings


class _Kernel:
    """Builds the ``pallas_call``; the phases of its body are methods."""

    def __init__(self, work: Work, layout: Layout, barrier: int | None):
        self.work, self.layout, self.kernel = work, layout, work.kernel
        self.barrier = barrier
        self.steps = work.schedule.num_steps
        self.tiles = work.schedule.num_tiles

    def call(self, operands: Sequence[jax.Array], interpret: Any) -> Sequence[jax.Array]:
        layout, kernel = self.layout, self.kernel
        given = dict(zip(kernel.operands, operands, strict=True))
        _check_body(self.work, layout, given, {name: x.dtype for name, x in given.items()})
        rank = lax.axis_index(self.work.axis_names)
        table = jnp.asarray(layout.table)[rank]
        arrays = [
            x.reshape(layout.buffers[layout.inputs[name]].shape) if name in layout.inputs else x
            for name, x in zip(kernel.operands, operands, strict=True)
        ]
        hbm = pl.BlockSpec(memory_space=pl.ANY)
        in_specs = [
            hbm if name in layout.inputs else self._pipelined(spec)
            for name, spec in zip(kernel.operands, kernel.in_specs, strict=True)
        ]
        free = [name for name in kernel.results if name not in layout.bound]
        specs = dict(zip(kernel.results, kernel.out_specs, strict=True))
        shapes = dict(zip(kernel.results, kernel.out_shape, strict=True))
        outputs = [b for b in layout.buffers if b.kind != "input"]
        outs = pl.pallas_call(
            self._body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(self.tiles, self.steps),
                in_specs=in_specs,
                out_specs=[self._pipelined(specs[name]) for name in free] + [hbm] * len(outputs),
                scratch_shapes=self._scratch(),
            ),
            out_shape=[shapes[name] for name in free]
            + [jax.ShapeDtypeStruct(b.padded, b.dtype) for b in outputs],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary", "arbitrary"),
                collective_id=self.barrier,
                has_side_effects=True,
            ),
            interpret=interpret,
            name=f"fused_{kernel.name}",
        )(table, *arrays)
        found = dict(zip(free, outs, strict=False))
        made = dict(zip([b.key for b in outputs], outs[len(free) :], strict=True))
        kept = [b.tensor for b in self.work.axis_map.bindings if b.operand in kernel.operands]
        return [
            *(
                found[n] if n in found else self._trim(layout.results[n], made)
                for n in kernel.results
            ),
            *(self._trim((tensor, "gathered"), made) for tensor in kept if self.work.keep),
        ]

    @property
    def _ranks(self) -> int:
        return self.work.schedule.plan.num_ranks

    def _trim(self, key: tuple[str, str], made: dict[tuple[str, str], jax.Array]) -> jax.Array:
        """A result without the padding that whole blocks needed."""
        shape = self.layout.by_key[key].shape
        return made[key][tuple(slice(0, n) for n in shape)]

    def _pipelined(self, spec: pl.BlockSpec) -> pl.BlockSpec:
        """``spec`` following the schedule's order instead of the grid's."""

        local: Any = spec.index_map
        if local is None:  # all of the array, whatever the grid
            return spec

        def index_map(tile: jax.Array, step: jax.Array, table: jax.Ref) -> Any:
            return local(*self._grid_indices(table, tile, step))

        return pl.BlockSpec(spec.block_shape, index_map, memory_space=spec.memory_space)

    def _grid_indices(self, table: jax.Ref, tile: jax.Array, step: jax.Array) -> list[jax.Array]:
        """Index along each of the local kernel's grid axes."""
        layout = self.layout
        parallel = iter(range(layout.tile.width))
        reduction = iter(range(layout.step.width))
        return [
            layout.step.get(table, step, next(reduction))
            if axis in layout.reduction_axes
            else layout.tile.get(table, tile, next(parallel))
            for axis in range(len(self.kernel.grid))
        ]

    def _scratch(self) -> list[Any]:
        layout = self.layout
        blocks = [pltpu.VMEM(b.block, b.dtype) for b in layout.blocks]
        semaphores = [
            pltpu.SemaphoreType.DMA((layout.num_arrivals,)),
            pltpu.SemaphoreType.DMA((layout.num_sends,)),
            pltpu.SemaphoreType.DMA,
        ]
        if layout.leave_together:
            semaphores.append(pltpu.SemaphoreType.REGULAR)
        return [*self.kernel.scratch_shapes, *blocks, *semaphores]

    def _body(self, table: jax.Ref, *refs: jax.Ref) -> None:
        state = _Refs(self, table, refs)
        tile, step = pl.program_id(0), pl.program_id(1)
        at = tile * self.steps + step
        if self.barrier is not None:

            @pl.when((tile == 0) & (step == 0))
            def _() -> None:
                self._meet(pltpu.get_barrier_semaphore())

        state.run(self.layout.before, at)
        for name in self.layout.loads:
            state.load(name, at)
        body = trace_body(self.kernel, state.body_refs(), self.layout.reordered, state.addend(tile))
        body(*self._local_grid(table, tile, step))

        @pl.when(step == self.steps - 1)
        def _() -> None:
            for name in self.layout.stores:
                state.store(name, tile)
            state.run(self.layout.after, tile)

        @pl.when((step == self.steps - 1) & (tile == self.tiles - 1))
        def _() -> None:
            state.run(self.layout.end, jnp.int32(0))
            if state.left is not None:
                self._meet(state.left)

    def _meet(self, barrier: jax.Ref) -> None:
        """Waits until every rank has come here."""
        for rank in range(self._ranks):
            pl.semaphore_signal(
                barrier,
                1,
                device_id=peer_id(self.work.axis_names, rank),
            )
        pl.semaphore_wait(barrier, self._ranks)

    def _local_grid(
        self, table: jax.Ref, tile: jax.Array, step: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The local kernel's grid indices, and the same with visits along reduction axes."""
        indices = self._grid_indices(table, tile, step)
        visits = dict(zip(self.layout.reduction_axes, self.layout.visits(step), strict=True))
        return indices, [visits.get(axis, index) for axis, index in enumerate(indices)]


class _Refs:
    """The references of one invocation, by role, and what is done with them."""

    def __init__(self, kernel: _Kernel, table: jax.Ref, refs: Sequence[jax.Ref]):
        self.kernel, self.layout, self.table = kernel, kernel.layout, table
        layout, local = kernel.layout, kernel.kernel
        left = iter(refs)
        self.inputs = {name: next(left) for name in local.operands}
        self.outputs = {name: next(left) for name in local.results if name not in layout.bound}
        self.buffers = {
            b.key: self.inputs[b.operand] if b.kind == "input" else next(left)
            for b in layout.buffers
        }
        self.user = [next(left) for _ in local.scratch_shapes]
        self.blocks = {b.name: next(left) for b in layout.blocks}
        self.arrived, self.sent, self.local, *exit_barrier = left
        self.left = exit_barrier[0] if exit_barrier else None

    def body_refs(self) -> list[jax.Ref]:
        """What the local kernel's body gets."""
        local, bound = self.kernel.kernel, self.layout.bound
        operands = [self.blocks[n] if n in bound else self.inputs[n] for n in local.operands]
        results = [self.blocks[n] if n in bound else self.outputs[n] for n in local.results]
        return [*operands, *results, *self.user]

    def run(self, section: Program, at: jax.Array) -> None:
        """Runs the instructions of point ``at``."""
        if section.empty:
            return

        def one(i: jax.Array, _: None) -> None:
            kind = self.layout.code.get(self.table, i, 0)
            for number, branch in enumerate(self.layout.branches):
                pl.when(kind == number)(functools.partial(self._instruction, branch, i))

        lo, hi = section.bounds(self.table, at)
        lax.fori_loop(lo, hi, one, None)

    def _instruction(self, branch: Branch, i: jax.Array) -> None:
        code, table = self.layout.code, self.table
        arrival, send, peer = (code.get(table, i, field) for field in (1, 2, 3))
        src, dst = (
            self._slice(key, branch.shape, [code.get(table, i, at + d) for d in range(n)])
            for key, at, n in branch.sides(self.layout)
        )
        if branch.remote:
            copy = pltpu.make_async_remote_copy(
                src,
                dst,
                self.sent.at[send],
                self.arrived.at[arrival],
                device_id=peer_id(self.kernel.work.axis_names, peer),
            )
            {START: copy.start, WAIT: copy.wait_recv, SENT: copy.wait_send}[branch.code]()
        else:
            copy = pltpu.make_async_copy(src, dst, self.arrived.at[arrival])
            {START: copy.start, WAIT: copy.wait}[branch.code]()

    def _slice(
        self, key: tuple[str, str], shape: tuple[int, ...], offsets: Sequence[Any]
    ) -> jax.Ref:
        """A box of a buffer; a landing's first offset is its number."""
        extra = len(offsets) - len(shape)
        where = [*offsets[:extra], *map(pl.ds, offsets[extra:], shape)]
        return self.buffers[key].at[tuple(where)]

    def load(self, name: str, at: jax.Array) -> None:
        """Copies the operand's block of this step from HBM, unless the last step had the same."""
        entry = self.layout.loads[name]

        @pl.when(entry.table.get(self.table, at, 0) == 1)
        def _() -> None:
            self._copy(self._block(entry, at, entry.key), self.blocks[name])

    def store(self, name: str, tile: jax.Array) -> None:
        """Copies the tile to HBM: into the result where it is the rank's own, else to be sent."""
        entry = self.layout.stores[name]
        for number, key in enumerate(entry.keys):

            @pl.when(entry.table.get(self.table, tile, 0) == number)
            def _(key: tuple[str, str] = key) -> None:
                self._copy(self.blocks[name], self._block(entry, tile, key))

    def addend(self, tile: jax.Array) -> dict[str, Callable[[], jax.Array]]:
        """The epilogue's addend: the sum of the tile's landings in float32."""
        layout, work = self.layout, self.kernel.work
        if not layout.landings:
            return {}
        entry = layout.landings
        block = self.blocks[entry.name]

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            self._copy(self._block(entry, i, entry.key), block)
            return total + block[...].astype(jnp.float32)

        def total() -> jax.Array:
            self.run(layout.epilogue, tile)
            lo, hi = layout.addends.bounds(self.table, tile)
            return lax.fori_loop(lo, hi, add, jnp.zeros(block.shape, jnp.float32))

        return {"addend": total} if work.kernel.has_addend else {}

    def _block(self, entry: BlockTable, at: jax.Array, key: tuple[str, str]) -> jax.Ref:
        """A whole block of a buffer; squeezed dimensions are indexed away."""
        where = []
        for d, size in enumerate(entry.sizes):
            offset = entry.table.get(self.table, at, 1 + d)
            where.append(offset if size is None else pl.ds(offset, size))
        return self.buffers[key].at[tuple(where)]

    def _copy(self, src: jax.Ref, dst: jax.Ref) -> None:
        copy = pltpu.make_async_copy(src, dst, self.local)
        copy.start()
        copy.wait()


backends.register("remote_dma")(RemoteDma())
