"""The local product in Gluon: one warp loads, two warpgroups multiply, each 64 rows of a tile.

Gluon is Triton's own lower level (``triton.experimental.gluon``): layouts, shared memory, barriers
and which warps do what are written out. The copy unit loads and stores; no thread that multiplies
computes an address of an operand, and all that two warpgroups share is what has been loaded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Renamed after Triton 3.6.
load_block = getattr(tma, "async_load", tma.async_copy_global_to_shared)
store_block = getattr(tma, "async_store", tma.async_copy_shared_to_global)
PARTS = gl.constexpr(2)
"""Warpgroups that multiply; each has so much of a tile's rows."""


@gluon.jit
def grouped_tile(
    tile,
    TILES_M: gl.constexpr,
    TILES_N: gl.constexpr,
    GROUP: gl.constexpr,
    SNAKE: gl.constexpr,
):
    """As ``matmul_triton.grouped_tile``, which Gluon cannot call.

    ``SNAKE``: every other group from its last column to its first.
    """
    group = tile // (GROUP * TILES_N)
    first = group * GROUP
    rows = gl.minimum(TILES_M - first, GROUP)
    inside = tile - group * (GROUP * TILES_N)
    column = inside // rows
    if SNAKE:
        column = gl.where(group % 2 == 0, column, TILES_N - 1 - column)
    return first + inside % rows, column


@gluon.jit
def following(stage, STAGES: gl.constexpr):
    """The stage after one."""
    return gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def place(
    job,
    FIRST: gl.constexpr,
    SPLIT: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP: gl.constexpr,
    SNAKE: gl.constexpr,
):
    """Row and column of a job: of tiles from ``FIRST`` on one of ``SPLIT`` parts of columns."""
    TILES_M: gl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile_m, tile_n = grouped_tile(FIRST + job // SPLIT, TILES_M, TILES_N, GROUP, SNAKE)
    return tile_m * BLOCK_M, tile_n * BLOCK_N + job % SPLIT * (BLOCK_N // SPLIT)


@gluon.jit
def columns_of(stages, stage, WIDTH: gl.constexpr):
    """The first columns of a stage, which lie together: a swizzle is of 64 columns."""
    if stages.shape[2] == WIDTH:
        return stages.index(stage)
    else:
        return stages.index(stage)._reinterpret(
            stages.dtype, [stages.shape[1], WIDTH], stages.layout
        )


@gluon.jit
def load_jobs(
    x_blocks,
    w_ptr,
    x_stages,
    w_stages,
    full,
    free,
    stage,
    turn,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    SPLIT: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    SNAKE: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """Fills the stages with the operands of every ``PROGRAMS``-th job; the next stage and turn."""
    STAGES: gl.constexpr = x_stages.shape[0]
    BLOCK_M: gl.constexpr = x_stages.shape[1]
    BLOCK_K: gl.constexpr = x_stages.shape[2]
    BLOCK_N: gl.constexpr = w_stages.shape[2]
    WIDTH: gl.constexpr = BLOCK_N // SPLIT
    BYTES: gl.constexpr = (BLOCK_M + WIDTH) * BLOCK_K * x_stages.dtype.primitive_bitwidth // 8
    w_blocks = tma.make_tensor_descriptor(w_ptr, [K, N], [N, 1], [BLOCK_K, WIDTH], w_stages.layout)
    for job in range(gl.program_id(0), COUNT, PROGRAMS):
        row, column = place(job, FIRST, SPLIT, M, N, BLOCK_M, BLOCK_N, GROUP, SNAKE)
        for step in range((K + BLOCK_K - 1) // BLOCK_K):
            mbarrier.wait(free.index(stage), turn)
            here = full.index(stage)
            mbarrier.expect(here, BYTES)
            load_block(x_blocks, [row, step * BLOCK_K], here, x_stages.index(stage))
            w_stage = columns_of(w_stages, stage, WIDTH)
            load_block(w_blocks, [step * BLOCK_K, column], here, w_stage)
            stage, turn = following(stage, STAGES), turn ^ (stage == STAGES - 1)
    return stage, turn


@gluon.jit
def load_tiles(
    x_ptr,
    w_ptr,
    x_stages,
    w_stages,
    full,
    free,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    SNAKE: gl.constexpr,
    PROGRAMS: gl.constexpr,
    WHOLE: gl.constexpr,
    REST: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Fills the stages, one after the other, as they become free."""
    x_blocks = tma.make_tensor_descriptor(
        x_ptr, [M, K], [K, 1], [x_stages.shape[1], x_stages.shape[2]], x_stages.layout
    )
    stage, turn = load_jobs(
        x_blocks, w_ptr, x_stages, w_stages, full, free, gl.to_tensor(0), gl.to_tensor(1),
        0, WHOLE, 1, M, N, K, GROUP, SNAKE, PROGRAMS,
    )  # fmt: skip
    if REST > 0:
        load_jobs(
            x_blocks, w_ptr, x_stages, w_stages, full, free, stage, turn,
            WHOLE, REST * SPLIT, SPLIT, M, N, K, GROUP, SNAKE, PROGRAMS,
        )  # fmt: skip


@gluon.jit
def store_bands(y_blocks, y_bands, part, row, column, BAND: gl.constexpr):
    """Stores a part of a tile in bands of columns, each in the next of the buffers."""
    ROWS: gl.constexpr = part.shape[0]
    WIDTH: gl.constexpr = part.shape[1]
    BUFFERS: gl.constexpr = y_bands.shape[0]
    if y_bands.shape[2] == WIDTH:
        band = y_bands.index(BAND % BUFFERS)
        tma.store_wait(BUFFERS - 1)
        band.store(part)
        hopper.fence_async_shared()
        store_block(y_blocks, [row, column], band)
    else:
        HALF: gl.constexpr = WIDTH // 2
        left, right = part.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        store_bands(y_blocks, y_bands, left, row, column, BAND)
        store_bands(y_blocks, y_bands, right, row, column + HALF, BAND + HALF // y_bands.shape[2])


@gluon.jit
def rounded(total, dtype: gl.constexpr):
    """Sums in ``dtype``, two of 16 bits in a register: 16-bit values would take one each.

    By an instruction that stays where it is: else the sums would be kept, to be rounded later.
    """
    if dtype.primitive_bitwidth == 32:
        return total
    else:
        round_two: gl.constexpr = (
            "cvt.rn.bf16x2.f32 $0, $2, $1;"
            if dtype == gl.bfloat16
            else "cvt.rn.f16x2.f32 $0, $2, $1;"
        )
        left, right = total.reshape([total.shape[0], total.shape[1] // 2, 2]).split()
        return gl.inline_asm_elementwise(
            round_two, "=r,r,r", [left, right], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def values(kept, dtype: gl.constexpr):
    """What ``rounded`` gave, as a tensor of ``dtype``."""
    if dtype.primitive_bitwidth == 32:
        return kept
    else:
        left = kept.to(gl.int16).to(dtype, bitcast=True)
        right = (kept >> 16).to(gl.int16).to(dtype, bitcast=True)
        return gl.join(left, right).reshape([kept.shape[0], kept.shape[1] * 2])


@gluon.jit
def multiply_jobs(
    y_blocks,
    y_bands,
    x_stages,
    w_stages,
    full,
    free,
    stage,
    turn,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    SPLIT: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    SNAKE: gl.constexpr,
    PROGRAMS: gl.constexpr,
    PART: gl.constexpr,
    LATE: gl.constexpr,
):
    """Multiplies what ``load_jobs`` loads, rows ``PART`` of each tile; the next stage and turn."""
    STAGES: gl.constexpr = x_stages.shape[0]
    BLOCK_M: gl.constexpr = x_stages.shape[1]
    BLOCK_K: gl.constexpr = x_stages.shape[2]
    BLOCK_N: gl.constexpr = w_stages.shape[2]
    ROWS: gl.constexpr = BLOCK_M // PARTS
    WIDTH: gl.constexpr = BLOCK_N // SPLIT
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dtype: gl.constexpr = y_bands.dtype
    # Before the first tile one past the edge is kept, of which the copy unit stores nothing.
    kept = rounded(gl.zeros((ROWS, WIDTH), gl.float32, sums), dtype)
    row, column = gl.to_tensor(M), gl.to_tensor(0)
    for job in range(gl.program_id(0), COUNT, PROGRAMS):
        total = gl.zeros((ROWS, WIDTH), gl.float32, sums)
        mbarrier.wait(full.index(stage), turn)
        x, w = x_stages.index(stage).slice(PART * ROWS, ROWS, 0), columns_of(w_stages, stage, WIDTH)
        total = hopper.warpgroup_mma(x, w, total, use_acc=False, is_async=True)
        total = hopper.warpgroup_mma_wait(1, deps=[total])
        if LATE:
            store_bands(y_blocks, y_bands, values(kept, dtype), row, column, 0)
        before, stage, turn = stage, following(stage, STAGES), turn ^ (stage == STAGES - 1)
        for _ in range(1, (K + BLOCK_K - 1) // BLOCK_K):
            mbarrier.wait(full.index(stage), turn)
            x = x_stages.index(stage).slice(PART * ROWS, ROWS, 0)
            w = columns_of(w_stages, stage, WIDTH)
            total = hopper.warpgroup_mma(x, w, total, is_async=True)
            # The product before is done, and so is its stage; this one is in flight.
            total = hopper.warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(free.index(before))
            before, stage, turn = stage, following(stage, STAGES), turn ^ (stage == STAGES - 1)
        total = hopper.warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(free.index(before))
        row, column = place(job, FIRST, SPLIT, M, N, BLOCK_M, BLOCK_N, GROUP, SNAKE)
        row += PART * ROWS
        kept = rounded(total, dtype)
        if not LATE:
            store_bands(y_blocks, y_bands, values(kept, dtype), row, column, 0)
    if LATE:
        store_bands(y_blocks, y_bands, values(kept, dtype), row, column, 0)
    return stage, turn


@gluon.jit
def multiply_tiles(
    y_ptr,
    y_bands,
    x_stages,
    w_stages,
    full,
    free,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    SNAKE: gl.constexpr,
    PROGRAMS: gl.constexpr,
    WHOLE: gl.constexpr,
    REST: gl.constexpr,
    SPLIT: gl.constexpr,
    PART: gl.constexpr,
    LATE: gl.constexpr,
):
    """Multiplies what is in the stages, 4 warps the rows ``PART`` of each tile, and stores it.

    ``LATE``: while the first product of the next tile is under way.
    """
    y_blocks = tma.make_tensor_descriptor(
        y_ptr, [M, N], [N, 1], [y_bands.shape[1], y_bands.shape[2]], y_bands.layout
    )
    stage, turn = multiply_jobs(
        y_blocks, y_bands, x_stages, w_stages, full, free, gl.to_tensor(0), gl.to_tensor(0),
        0, WHOLE, 1, M, N, K, GROUP, SNAKE, PROGRAMS, PART, LATE,
    )  # fmt: skip
    if REST > 0:
        multiply_jobs(
            y_blocks, y_bands, x_stages, w_stages, full, free, stage, turn,
            WHOLE, REST * SPLIT, SPLIT, M, N, K, GROUP, SNAKE, PROGRAMS, PART, False,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def specialized(
    x_ptr,
    w_ptr,
    y_ptr,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    SNAKE: gl.constexpr,
    PROGRAMS: gl.constexpr,
    WHOLE: gl.constexpr,
    REST: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    BANDS: gl.constexpr,
    BUFFERS: gl.constexpr,
    LATE: gl.constexpr,
):
    """Every ``PROGRAMS``-th tile of y a program; a tile is stored in ``BANDS`` of columns.

    After ``WHOLE`` tiles the ``REST`` is computed in ``SPLIT`` parts of columns, a band at least
    each, where a last turn would leave most programs idle.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    y_shape: gl.constexpr = [BUFFERS, BLOCK_M // PARTS, BLOCK_N // BANDS]
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], dtype)
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_N], dtype)
    y_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(y_shape[1:], dtype)
    x_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_layout)
    w_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], w_layout)
    upper = gl.allocate_shared_memory(dtype, y_shape, y_layout)
    lower = gl.allocate_shared_memory(dtype, y_shape, y_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=PARTS)
    hopper.fence_async_shared()
    # The launch's warps do the first; the others have the warps and registers a thread that follow.
    gl.warp_specialize(
        [
            (multiply_tiles, (y_ptr, upper, x_stages, w_stages, full, free,
                              M, N, K, GROUP, SNAKE, PROGRAMS, WHOLE, REST, SPLIT, 0, LATE)),
            (multiply_tiles, (y_ptr, lower, x_stages, w_stages, full, free,
                              M, N, K, GROUP, SNAKE, PROGRAMS, WHOLE, REST, SPLIT, 1, LATE)),
            (load_tiles, (x_ptr, w_ptr, x_stages, w_stages, full, free,
                          M, N, K, GROUP, SNAKE, PROGRAMS, WHOLE, REST, SPLIT)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
