"""Matrix products in Triton, written as for one device: one tile a program, and persistent.

``y[M, N] = x[M, K] @ w[K, N]``, row-major or by strides, accumulated in float32. The directives say
how tiles are walked; without a rewriter they are comments. The fastest one is in
``matmul_triton_late``.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from syncopate_jax.errors import InputError
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.triton_kernel import triton_kernel
from syncopate_jax.pallas_kernels import triton_stages
from syncopate_jax.pallas_kernels.matmul_triton_late import late_matmul_kernel
from syncopate_jax.pallas_kernels.triton_tiles import grouped_tile


@triton.jit
def matmul_kernel(
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
):
    """One tile of y a program."""
    # syncopate: axis m: extent=M, tile=BLOCK_M
    # syncopate: axis n: extent=N, tile=BLOCK_N
    # syncopate: axis k: extent=K, tile=BLOCK_K
    # syncopate: reads x_ptr[m, k] as x
    # syncopate: reads w_ptr[k, n] as w
    # syncopate: writes y_ptr[m, n] as y
    # syncopate: tiles one per program
    # syncopate: dispatch tile -> m=tile_m, n=tile_n
    tile = tl.program_id(0)
    tile_m, tile_n = grouped_tile(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    # syncopate: end dispatch
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (rows[:, None] * stride_xm + depth[None, :])
    w_ptrs = w_ptr + (depth[:, None] * stride_wk + columns[None, :])
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # syncopate: reduce k=step
    for step in range(tl.cdiv(K, BLOCK_K)):
        # Edges are cut only where there are any: a mask costs a little.
        left = K - step * BLOCK_K
        x_inside = (rows[:, None] < M) & (depth[None, :] < left)
        w_inside = (depth[:, None] < left) & (columns[None, :] < N)
        if M % BLOCK_M == 0 and K % BLOCK_K == 0:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=x_inside, other=0.0)
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            w = tl.load(w_ptrs)
        else:
            w = tl.load(w_ptrs, mask=w_inside, other=0.0)
        total = tl.dot(x, w, total)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_wk
    # syncopate: epilogue total
    y_ptrs = y_ptr + (rows[:, None] * stride_ym + columns[None, :])
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=inside)
    # syncopate: end epilogue


@triton.jit
def persistent_matmul_kernel(
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
    FLAT: tl.constexpr,
):
    """Every ``PROGRAMS``-th tile of y a program.

    ``FLAT``: tiles and their k steps are one loop, so that loads of the next tile begin before this
    one is stored.
    """
    # syncopate: axis m: extent=M, tile=BLOCK_M
    # syncopate: axis n: extent=N, tile=BLOCK_N
    # syncopate: axis k: extent=K, tile=BLOCK_K
    # syncopate: reads x_ptr[m, k] as x
    # syncopate: reads w_ptr[k, n] as w
    # syncopate: writes y_ptr[m, n] as y
    # syncopate: tiles persistent
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLAT):
        # syncopate: dispatch tile -> m=tile_m, n=tile_n
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
        # syncopate: end dispatch
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        # syncopate: reduce k=step
        for step in range(tl.cdiv(K, BLOCK_K)):
            # From scalars: a flat loop forgets of a vector that it carries what lies together.
            rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            depth = step * BLOCK_K + tl.arange(0, BLOCK_K)
            x_ptrs = x_ptr + (rows[:, None] * stride_xm + depth[None, :])
            w_ptrs = w_ptr + (depth[:, None] * stride_wk + columns[None, :])
            x_inside = (rows[:, None] < M) & (depth[None, :] < K)
            w_inside = (depth[:, None] < K) & (columns[None, :] < N)
            if M % BLOCK_M == 0 and K % BLOCK_K == 0:
                x = tl.load(x_ptrs)
            else:
                x = tl.load(x_ptrs, mask=x_inside, other=0.0)
            if N % BLOCK_N == 0 and K % BLOCK_K == 0:
                w = tl.load(w_ptrs)
            else:
                w = tl.load(w_ptrs, mask=w_inside, other=0.0)
            total = tl.dot(x, w, total)
        # syncopate: epilogue total
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        y_ptrs = y_ptr + (rows[:, None] * stride_ym + columns[None, :])
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=inside)
        # syncopate: end epilogue


@triton.jit
def described_matmul_kernel(
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
    FLAT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """As ``persistent_matmul_kernel``; the copy unit loads and stores, by tensor descriptors."""
    # syncopate: axis m: extent=M, tile=BLOCK_M
    # syncopate: axis n: extent=N, tile=BLOCK_N
    # syncopate: axis k: extent=K, tile=BLOCK_K
    # syncopate: reads x_ptr[m, k] as x
    # syncopate: reads w_ptr[k, n] as w
    # syncopate: writes y_ptr[m, n] as y
    # syncopate: tiles persistent
    x_blocks = tl.make_tensor_descriptor(x_ptr, [M, K], [stride_xm, 1], [BLOCK_M, BLOCK_K])
    w_blocks = tl.make_tensor_descriptor(w_ptr, [K, N], [stride_wk, 1], [BLOCK_K, BLOCK_N])
    y_blocks = tl.make_tensor_descriptor(y_ptr, [M, N], [stride_ym, 1], [BLOCK_M, BLOCK_N // PARTS])
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLAT):
        # syncopate: dispatch tile -> m=tile_m, n=tile_n
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
        # syncopate: end dispatch
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        # syncopate: reduce k=step
        for step in range(tl.cdiv(K, BLOCK_K)):
            # Past the edge the copy unit gives zeros.
            x = x_blocks.load([tile_m * BLOCK_M, step * BLOCK_K])
            w = w_blocks.load([step * BLOCK_K, tile_n * BLOCK_N])
            total = tl.dot(x, w, total)
        # syncopate: epilogue total
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        if PARTS == 1:
            y_blocks.store([row, column], total.to(y_ptr.dtype.element_ty))
        else:
            # A half has room in shared memory beside 4 stages of the next tile's loads.
            halves = tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            y_blocks.store([row, column], left.to(y_ptr.dtype.element_ty))
            y_blocks.store([row, column + BLOCK_N // 2], right.to(y_ptr.dtype.element_ty))
        # syncopate: end epilogue


LATE = 2
"""K step from which on the tile before is stored, by default."""


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """How the product is cut, in elements, and how a tile is computed.

    The defaults take any operands; ``usual`` is the fastest that takes those it is told of. Both
    were found over 12 shapes on one H200, see experiments/triton.

    Attributes:
      group: rows of tiles that are walked down before the next column.
      persistent: programs compute several tiles each.
      described: loads and stores go through tensor descriptors, by the copy unit; implies
        ``persistent``, and rows of a multiple of 16 bytes.
      flat: of a program with several tiles: loads of the next begin before one is stored. With
        pointers that takes shared memory for the store: 3 stages of 128x256x64 in 16 bits.
      parts: bands of columns that descriptors store a tile in, 1 or 2; 1 leaves room for 3 stages.
      late: k step of the next tile from which on a tile is stored, in four bands; 0: it is stored
        when it is done. Implies ``described`` and ``flat``, and takes ``late + 4`` k steps. Meant
        for results of 16 bits, as wider ones spill registers, and for consumers, as a tile that
        others wait for must not be put off.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group: int = 16
    num_warps: int = 8
    num_stages: int = 3
    persistent: bool = True
    described: bool = False
    flat: bool = True
    parts: int = 2
    late: int = 0

    @classmethod
    def usual(
        cls,
        mkn: tuple[int, int, int],
        dtype: jax.typing.DTypeLike,
        out_dtype: jax.typing.DTypeLike,
        programs: int,
    ) -> Self:
        """By default, of row-major operands and a result of these dtypes, by so many programs.

        Where all are of 16 bits and rows are multiples of 16 bytes, by descriptors: late where
        there are steps enough and programs have more than three tiles each, else flat. Otherwise
        pointers: flat with 3 stages where a block's memory holds the store of a tile beside them,
        or as many stages as it holds, up to 4.
        """
        m, k, n = mkn
        late = cls(described=True, late=LATE)
        narrow = {jnp.dtype(dtype).itemsize, jnp.dtype(out_dtype).itemsize} == {2}
        if narrow and k % 8 == n % 8 == 0:
            many = math.prod(late.tiles(m, n)) > 3 * programs
            return late if many and late.has_steps(k) else cls(described=True)
        block = late.block_m, late.block_n, late.block_k
        stages, flat = triton_stages.fitting(block, dtype, out_dtype)
        return cls(num_stages=stages, flat=flat)

    @property
    def kernel(self) -> Any:
        """The function under ``triton.jit``."""
        if self.late:
            return late_matmul_kernel
        if self.described:
            return described_matmul_kernel
        return persistent_matmul_kernel if self.persistent else matmul_kernel

    @property
    def walks(self) -> bool:
        """Whether a program computes several tiles."""
        return self.persistent or self.described or self.late > 0

    def has_steps(self, k: int) -> bool:
        """Whether a tile has the k steps that a late store of four bands takes."""
        return -(-k // self.block_k) >= self.late + 4

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Tiles along m and n."""
        return -(-m // self.block_m), -(-n // self.block_n)

    def arguments(self, m: int, k: int, n: int, programs: int) -> dict[str, int]:
        """Arguments of the kernel for row-major operands."""
        found = {"M": m, "N": n, "K": k, "stride_xm": k, "stride_wk": n, "stride_ym": n}
        found |= {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        found |= {"GROUP": self.group}
        if self.late:
            return found | {"PROGRAMS": programs, "LATE": self.late}
        found |= {"PROGRAMS": programs, "FLAT": self.flat} if self.walks else {}
        return found | ({"PARTS": self.parts} if self.described else {})


def matmul(
    m: int,
    k: int,
    n: int,
    out_dtype: jax.typing.DTypeLike,
    config: MatmulConfig | None = None,
    programs: int = 1,
) -> PallasKernel:
    """``y[m, n] = x[m, k] @ w[k, n]``, a local kernel; ``programs`` are those of a persistent one.

    Without ``config`` the operands are taken to be as wide as the result.

    Raises:
      InputError: ``config`` is described, and rows are no multiple of 16 bytes; or late, and there
        are too few k steps.

    Example::

      kernel = matmul(8192, 4096, 7168, "bfloat16")
    """
    config = config or MatmulConfig.usual((m, k, n), out_dtype, out_dtype, programs)
    _check(config, k, n, jnp.dtype(out_dtype))
    return triton_kernel(
        config.kernel,
        config.arguments(m, k, n, programs),
        out_dtypes={"y": out_dtype},
        reference=functools.partial(_reference, out_dtype=out_dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _check(config: MatmulConfig, k: int, n: int, dtype: jnp.dtype) -> None:
    odd = [(name, size) for name, size in (("K", k), ("N", n)) if size * dtype.itemsize % 16]
    if (config.described or config.late) and odd:
        name, size = odd[0]
        raise InputError(
            f"matmul_triton: tensor descriptors need rows of a multiple of 16 bytes, found {name} "
            f"= {size} of {dtype}; use a config with described=False and late=0"
        )
    if config.late and not config.has_steps(k):
        raise InputError(
            f"matmul_triton: late={config.late} needs {config.late + 4} k steps of "
            f"{config.block_k}, found K = {k}; use a config with late=0"
        )


def _reference(x: jax.Array, w: jax.Array, *, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(out_dtype)
