"""A matrix product beside whose CTAs a few others watch its operand come in.

A copy engine that is to say how far it is writes a flag behind each chunk, and pauses microseconds
around it. Here the operand is one copy, and the CTAs that only communicate (paper section 5.2) look
for it where it comes in: the memory was filled with a mark, ``copies.MARK``, before the copy began,
and a word of 16 bytes without a mark in it has arrived. Nothing is assumed of the order in which
words do, for each is looked at. Data with the mark in it is not taken for arrived until the engine
has said, behind the last chunk, that all is there: then the product begins late, and is right.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.native import copies
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu_kernel as body
from syncopate_jax.pallas_kernels import tile_loop_mosaic_gpu as tile_loop
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import (
    CLUSTER_AXES,
    Limits,
    MatmulConfig,
)
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_operands import Operands

THREADS = 128  # of a warpgroup, each of which watches blocks of its own
LOADS = 16  # words that a thread looks at at a time: a look takes microseconds beside a product


def watch(buffer: Any, regions: Any, flags: Any, call: copies.Call, cta: Any, ctas: int) -> None:
    """Raises the flag of every region of ``buffer`` once it has arrived; in order.

    Called by every warpgroup of the watching CTAs. Returns when the engine has said that all of its
    copies have ended, so that nothing is written behind the launch.

    Args:
      buffer: what is copied into, filled with marks before.
      regions: ``call.regions``, in GMEM.
      flags: of ``copies.start``.
      call: the copies.
      cta: number of this CTA among those that watch.
      ctas: how many those are.
    """

    ref, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(ref, ref, ref, scalar))
    def emit(ctx: Any, buffer: Any, regions: Any, flags: Any, cta: Any) -> None:
        del ctx
        mgpu_utils.inline_ptx(
            _code(len(call.copies), call.slots, ctas),
            *(mgpu_utils.memref_ptr(x) for x in (buffer, regions, flags)),
            cta.registers.item(),
            has_side_effects=True,
            convergent=True,
        )

    emit(buffer, regions, flags, cta)


def _code(count: int, slots: int, ctas: int) -> str:
    """PTX of all threads of a warpgroup; operands: buffer, regions, flags, CTA.

    Warpgroup i of n takes blocks i, i + n, ... of a region, each of THREADS * LOADS words. A
    counter behind the flags says how many have seen theirs, and the last one raises the region's
    flag. An acquire of the flag comes behind the loads that saw the data: each thread's, the
    barrier of its warpgroup, and the counter by acquire and release.
    """
    block = THREADS * LOADS
    look, check = [], []
    for i in range(LOADS):
        value = f"%a{i}, %b{i}, %c{i}, %d{i}"
        look += [
            f"add.u32 %at, %word, {i * THREADS}",
            f"setp.lt.u32 %inside{i}, %at, %total",
            f"@%inside{i} ld.relaxed.sys.global.v4.u32 {{{value}}}, "
            f"[%address+{i * THREADS * copies.WORD}]",
        ]
        for part in value.split(", "):
            check += [
                f"setp.eq.and.u32 %is, {part}, {copies.MARK:#x}, %inside{i}",
                "or.pred %marked, %marked, %is",
            ]
    ended = 4 * copies.ended_slot(slots)
    lines = [
        ".reg .pred %marked, %is, %over, %leads",
        f".reg .pred %inside<{LOADS}>",
        ".reg .b32 %region, %first, %total, %slot, %at, %seen",
        ".reg .b32 %watcher, %watchers, %thread, %barrier, %base, %stride, %word",
        f".reg .b32 %a<{LOADS}>, %b<{LOADS}>, %c<{LOADS}>, %d<{LOADS}>",
        ".reg .b64 %flag, %counter, %address",
        "mov.u32 %thread, %tid.x",
        f"div.u32 %barrier, %thread, {THREADS}",
        f"rem.u32 %thread, %thread, {THREADS}",
        "setp.eq.u32 %leads, %thread, 0",
        "mov.u32 %at, %ntid.x",
        f"div.u32 %at, %at, {THREADS}",
        "mad.lo.u32 %watcher, $3, %at, %barrier",
        f"mul.lo.u32 %watchers, %at, {ctas}",
        f"mul.lo.u32 %stride, %watchers, {block}",
        "add.u32 %barrier, %barrier, 1",
        "mov.u32 %region, 0",
        "next_region:",
        f"setp.ge.u32 %over, %region, {count}",
        "@%over bra all_seen",
        f"mad.wide.u32 %address, %region, {4 * copies.REGION_FIELDS}, $1",
        "ld.global.u32 %first, [%address]",
        "ld.global.u32 %total, [%address+4]",
        "ld.global.u32 %slot, [%address+8]",
        "mad.wide.u32 %flag, %slot, 4, $2",
        f"add.u64 %counter, %flag, {4 * slots}",
        f"mul.lo.u32 %base, %watcher, {block}",
        "next_block:",
        "setp.ge.u32 %over, %base, %total",
        "@%over bra region_seen",
        "add.u32 %word, %base, %thread",
        "add.u32 %at, %first, %word",
        f"mad.wide.u32 %address, %at, {copies.WORD}, $0",
        "look:",
        *look,
        "setp.ne.u32 %marked, 0, 0",
        *check,
        "@!%marked bra block_seen",
        f"ld.relaxed.sys.global.u32 %at, [$2+{ended}]",
        "setp.ne.u32 %over, %at, 0",
        "@%over bra ended",
        "nanosleep.u32 200",
        "bra look",
        "ended:",
        "fence.acq_rel.sys",
        "block_seen:",
        "add.u32 %base, %base, %stride",
        "bra next_block",
        "region_seen:",
        f"bar.sync %barrier, {THREADS}",
        "@!%leads bra raised",
        "atom.add.acq_rel.gpu.global.u32 %seen, [%counter], 1",
        "add.u32 %seen, %seen, 1",
        "setp.ne.u32 %over, %seen, %watchers",
        "@%over bra raised",
        "st.release.gpu.global.u32 [%flag], 1",
        "raised:",
        "add.u32 %region, %region, 1",
        "bra next_region",
        "all_seen:",
        f"ld.relaxed.sys.global.u32 %at, [$2+{ended}]",
        "setp.eq.u32 %over, %at, 0",
        "@%over bra all_seen",
    ]
    text = "".join(f"  {line}{'' if line.endswith(':') else ';'}\n" for line in lines)
    return "{\n" + text + "}"


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    side: int,
    call: copies.Call,
    flags: jax.Array,
    watchers: int,
    table: np.ndarray,
    config: MatmulConfig,
    num_sms: int,
    out_dtype: Any,
    w_transposed: bool = False,
) -> jax.Array:
    """``x @ w``, of which operand ``side`` is being copied in by ``call`` while tiles are computed.

    Args:
      x, w: the operands, as of the matrix product without watchers.
      side: 0 where ``x`` is streamed, 1 for ``w``.
      call: its copies.
      flags: of their start.
      watchers: CTAs that watch.
      table: int32 [tiles, 3], the order of tiles, and of each the flag that it waits for.
      config: how the product is cut.
      num_sms: multiprocessors, those of the watchers among them.
      out_dtype: of the result.
      w_transposed: ``w`` is [N, K].

    Raises:
      UnsupportedError: the kernel cannot compute this product.
    """
    limits = Limits.of(jax.local_devices()[0], sms=num_sms - watchers)
    config = config.fit(limits.shared_memory, x.dtype, out_dtype)
    m, n = x.shape[0], w.shape[0 if w_transposed else 1]
    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    reason = matmul_mosaic_gpu.unsupported_reason(
        Operands(x, w, out, w_transposed=w_transposed), config, limits
    )
    if reason is not None:
        raise UnsupportedError(f"stream_matmul: {reason}")
    workers = config.workers(m, n, limits.sms)

    def kernel(x_ref: Any, w_ref: Any, table_ref: Any, flags_ref: Any, *refs: Any) -> None:
        regions_ref, y_ref = refs
        cta = lax.axis_index(body.CTA_AXIS)

        @pl.when(cta < watchers)
        def _watch() -> None:
            watch((x_ref, w_ref)[side], regions_ref, flags_ref, call, cta, watchers)

        @pl.when(cta >= watchers)
        def _compute() -> None:
            loop = tile_loop.TileLoop(
                tile_loop.ScheduledOrder(table_ref, len(table)),
                cta - watchers,
                workers,
                before_tile=lambda tile: tile_loop.wait_flag(flags_ref, tile.chunk),
            )
            operands = Operands(x_ref, w_ref, y_ref, w_transposed=w_transposed)
            body.compute_tiles(operands, config, loop)

    product: jax.Array = plgpu.kernel(
        kernel,
        out_type=out,
        grid=(watchers + workers,),
        grid_names=(body.CTA_AXIS,),
        cluster=(1, 1),
        cluster_names=CLUSTER_AXES,
        num_threads=config.warpgroups + 1,
        thread_name=body.WARPGROUP_AXIS,
        # Safe: no warpgroup reads shared memory that it wrote, but where commit_smem fences.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(x, w, jnp.asarray(table), flags, jnp.asarray(call.regions))
    return product
