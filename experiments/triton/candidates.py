"""Local products in Triton that may become ``pallas_kernels/matmul_triton.py``'s.

They differ in how tiles are loaded and stored (pointers, or descriptors by the copy unit), in their
order, in whether the loop over tiles and the one over k steps are one (so that loads of the next
tile begin while this one is finished), in when a tile is stored, and in stages and numbers of
programs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import triton
import triton.language as tl

from syncopate_jax.kernel.tiles import fewest_workers
from syncopate_jax.pallas_kernels.matmul_triton_late import late_matmul_kernel
from syncopate_jax.pallas_kernels.triton_tiles import grouped_tile


@triton.jit
def snaked_tile(tile, TILES_M: tl.constexpr, TILES_N: tl.constexpr, GROUP: tl.constexpr,
                SNAKE: tl.constexpr):  # fmt: skip
    """As ``grouped_tile``; ``SNAKE``: every other group from its last column to its first."""
    tile_m, tile_n = grouped_tile(tile, TILES_M, TILES_N, GROUP)
    if SNAKE:
        ahead = tile // (GROUP * TILES_N) % 2 == 0
        tile_n = tl.where(ahead, tile_n, TILES_N - 1 - tile_n)
    return tile_m, tile_n


@triton.jit
def store_parts(y_blocks, total, row, column, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
                PARTS: tl.constexpr):  # fmt: skip
    """Stores a tile in ``PARTS`` bands of columns, one after the other through shared memory."""
    if PARTS == 1:
        y_blocks.store([row, column], total.to(y_blocks.dtype))
    else:
        halves = tl.permute(tl.reshape(total, (BLOCK_M, 2, WIDTH // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        store_parts(y_blocks, left, row, column, BLOCK_M, WIDTH // 2, PARTS // 2)
        store_parts(y_blocks, right, row, column + WIDTH // 2, BLOCK_M, WIDTH // 2, PARTS // 2)


@triton.jit
def described(
    x_ptr,
    w_ptr,
    y_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SNAKE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Descriptors load and, in ``PARTS`` bands, store."""
    x_blocks = tl.make_tensor_descriptor(x_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    w_blocks = tl.make_tensor_descriptor(w_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    y_blocks = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N // PARTS])
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = snaked_tile(tile, tiles_m, tiles_n, GROUP, SNAKE)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            x = x_blocks.load([tile_m * BLOCK_M, step * BLOCK_K])
            w = w_blocks.load([step * BLOCK_K, tile_n * BLOCK_N])
            total = tl.dot(x, w, total)
        store_parts(y_blocks, total, tile_m * BLOCK_M, tile_n * BLOCK_N, BLOCK_M, BLOCK_N, PARTS)


@triton.jit
def pointed(
    x_ptr,
    w_ptr,
    y_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SNAKE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Pointers load (``cp.async``) and store."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = snaked_tile(tile, tiles_m, tiles_n, GROUP, SNAKE)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            # From scalars: a fused loop forgets that a vector it carries lies together.
            rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            depth = step * BLOCK_K + tl.arange(0, BLOCK_K)
            x_ptrs = x_ptr + (rows[:, None] * K + depth[None, :])
            w_ptrs = w_ptr + (depth[:, None] * N + columns[None, :])
            if M % BLOCK_M == 0 and K % BLOCK_K == 0:
                x = tl.load(x_ptrs)
            else:
                x = tl.load(x_ptrs, mask=(rows[:, None] < M) & (depth[None, :] < K), other=0.0)
            if N % BLOCK_N == 0 and K % BLOCK_K == 0:
                w = tl.load(w_ptrs)
            else:
                w = tl.load(w_ptrs, mask=(depth[:, None] < K) & (columns[None, :] < N), other=0.0)
            total = tl.dot(x, w, total)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        y_ptrs = y_ptr + (rows[:, None] * N + columns[None, :])
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel and its sizes; ``even``: as few programs as take no more turns."""

    kernel: Any
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group: int = 16
    stages: int = 3
    warps: int = 8
    flatten: bool = True
    parts: int = 2
    even: bool = True
    snake: bool = False
    late: int = 2

    def grid(self, m: int, n: int, most: int) -> int:
        tiles = -(-m // self.block_m) * -(-n // self.block_n)
        return fewest_workers(tiles, most) if self.even else min(tiles, most)

    def arguments(self, m: int, k: int, n: int, most: int) -> dict[str, Any]:
        """Of the kernel's parameters that are no arrays."""
        found = {
            "M": m, "N": n, "K": k, "BLOCK_M": self.block_m, "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k, "GROUP": self.group, "SNAKE": self.snake,
            "PROGRAMS": self.grid(m, n, most), "FLATTEN": self.flatten, "PARTS": self.parts,
            "LATE": self.late, "stride_xm": k, "stride_wk": n, "stride_ym": n,
        }  # fmt: skip
        return {name: found[name] for name in self.kernel.arg_names if name in found}

    @property
    def sizes(self) -> dict[str, Any]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return named | {"kernel": self.kernel.__name__}


CANDIDATES = {
    "late": Candidate(late_matmul_kernel),
    "late, from step 1": Candidate(late_matmul_kernel, late=1),
    "late, from step 4": Candidate(late_matmul_kernel, late=4),
    "late, 4 stages": Candidate(late_matmul_kernel, stages=4),
    "late, group 8": Candidate(late_matmul_kernel, group=8),
    "late, all programs": Candidate(late_matmul_kernel, even=False),
    "pointers, flat, 3 stages": Candidate(pointed),
    "pointers, flat, 3 stages, snake": Candidate(pointed, snake=True),
    "descriptors, flat, 2 parts, 3 stages": Candidate(described),
    "descriptors, flat, 1 part, 3 stages": Candidate(described, parts=1),
}
"""The first is the usual product, the one of 2 parts that of few tiles a program, the first of
pointers the one for other operands. Those that lost sooner are in the README, with the commits that
have their code."""
