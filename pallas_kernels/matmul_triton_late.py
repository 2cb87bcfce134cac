"""A matrix product in Triton that stores a tile under the products of the next one.

All warps of a program meet at every step, so a tile that is stored when it is done leaves the
tensor cores idle meanwhile. Here it is rounded, kept in registers, and stored band by band while k
steps of the next tile are under way. How that is written follows from what Triton 3.6 makes of it;
see experiments/triton.
"""

import triton
import triton.language as tl

from syncopate_jax.pallas_kernels.triton_tiles import grouped_tile


@triton.jit
def in_words(total, DTYPE: tl.constexpr):
    """Sums rounded to ``DTYPE``, those of two neighbouring columns in one word if of 16 bits.

    A loop that carries 16-bit values takes a register for each. By one instruction a word: pairs
    that are rounded first are put together by two more.
    """
    if DTYPE.primitive_bitwidth == 32:
        return total.to(DTYPE)
    else:
        left, right = tl.split(tl.reshape(total, (total.shape[0], total.shape[1] // 2, 2)))
        NAME: tl.constexpr = "bf16x2" if DTYPE.is_bf16() else "f16x2"
        return tl.inline_asm_elementwise(
            "cvt.rn." + NAME + ".f32 $0, $2, $1;",
            "=r,r,r",
            [left, right],
            tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def values(words, DTYPE: tl.constexpr):
    """What ``in_words`` was given, rounded."""
    if DTYPE.primitive_bitwidth == 32:
        return words
    else:
        left = words.to(tl.int16).to(DTYPE, bitcast=True)
        right = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return tl.reshape(tl.join(left, right), (words.shape[0], words.shape[1] * 2))


@triton.jit
def halves(words):
    """The left and the right columns."""
    cut = tl.reshape(words, (words.shape[0], 2, words.shape[1] // 2))
    return tl.split(tl.permute(cut, (0, 2, 1)))


@triton.jit
def store_band(y_bands, words, row, column, now, stored):
    """Stores a band if ``now``; returns how many were stored."""
    if now:
        y_bands.store([row, column], values(words, y_bands.dtype))
        stored += 1
    return stored


@triton.jit
def store_last(
    y_ptr, words, row, column, M: tl.constexpr, N: tl.constexpr, stride_ym: tl.constexpr
):
    """Stores a band by pointers: nothing is left that could go on while the copy unit reads it."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    band = values(words, DTYPE)
    rows = row + tl.arange(0, band.shape[0])
    columns = column + tl.arange(0, band.shape[1])
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(y_ptr + (rows[:, None] * stride_ym + columns[None, :]), band, mask=inside)


@triton.jit
def late_matmul_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    stride_xm: tl.constexpr,
    stride_wk: tl.constexpr,
    stride_ym: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LATE: tl.constexpr,
):
    """Every ``PROGRAMS``-th tile of y a program, stored from the next one's k step ``LATE`` on.

    ``LATE`` is 1 at least, and the next three steps there are too. Loads and stores go through
    tensor descriptors, by the copy unit.
    """
    # syncopate: axis m: extent=M, tile=BLOCK_M
    # syncopate: axis n: extent=N, tile=BLOCK_N
    # syncopate: axis k: extent=K, tile=BLOCK_K
    # syncopate: reads x_ptr[m, k] as x
    # syncopate: reads w_ptr[k, n] as w
    # syncopate: writes y_ptr[m, n] as y
    # syncopate: tiles persistent
    BAND: tl.constexpr = BLOCK_N // 4
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    x_blocks = tl.make_tensor_descriptor(x_ptr, [M, K], [stride_xm, 1], [BLOCK_M, BLOCK_K])
    w_blocks = tl.make_tensor_descriptor(w_ptr, [K, N], [stride_wk, 1], [BLOCK_K, BLOCK_N])
    y_bands = tl.make_tensor_descriptor(y_ptr, [M, N], [stride_ym, 1], [BLOCK_M, BAND])
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # Zeros that Triton does not know to be zeros: programs lie along one axis of the grid. Those it
    # knows it makes twice, by way of uniform registers.
    nothing = tl.full((BLOCK_M, BLOCK_N), 0, tl.int32) + tl.program_id(1)
    nothing = nothing.to(tl.float32, bitcast=True)
    left, right = halves(in_words(nothing, DTYPE))
    first, second = halves(left)
    third, fourth = halves(right)
    row = 0
    column = 0
    started = False
    stored = 0
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        # syncopate: dispatch tile -> m=tile_m, n=tile_n
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
        # syncopate: end dispatch
        total = nothing
        # syncopate: reduce k=step
        for step in range(tl.cdiv(K, BLOCK_K)):
            x = x_blocks.load([tile_m * BLOCK_M, step * BLOCK_K])
            w = w_blocks.load([step * BLOCK_K, tile_n * BLOCK_N])
            total = tl.dot(x, w, total)
            late = step - LATE
            stored = store_band(y_bands, first, row, column, started & (late == 0), stored)
            stored = store_band(y_bands, second, row, column + BAND, started & (late == 1), stored)
            stored = store_band(
                y_bands, third, row, column + 2 * BAND, started & (late == 2), stored
            )
            stored = store_band(
                y_bands, fourth, row, column + 3 * BAND, started & (late == 3), stored
            )
        left, right = halves(in_words(total, DTYPE))
        first, second = halves(left)
        third, fourth = halves(right)
        # Adds nothing, but says that the bands before are stored before these take their place:
        # else Triton keeps both.
        row = tile_m * BLOCK_M + (stored >> 30)
        column = tile_n * BLOCK_N
        started = True
    if started:
        store_last(y_ptr, first, row, column, M, N, stride_ym)
        store_last(y_ptr, second, row, column + BAND, M, N, stride_ym)
        store_last(y_ptr, third, row, column + 2 * BAND, M, N, stride_ym)
        store_last(y_ptr, fourth, row, column + 3 * BAND, M, N, stride_ym)
