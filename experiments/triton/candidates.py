"""Local products in Triton that may become ``pallas_kernels/matmul_triton.py``'s.

They differ in how tiles are loaded (pointers, or descriptors by the copy unit), in how they are
stored, in whether the loop over tiles and the one over k steps are one (so that loads of the next
tile begin while this one is finished), and in their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import triton
import triton.language as tl

from experiments.triton.specialized import specialized
from syncopate_jax.kernel.tiles import fewest_workers
from syncopate_jax.pallas_kernels.matmul_triton import grouped_tile


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
def store_whole(y_ptr, total, row, column, M: tl.constexpr, N: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Stores a tile through pointers."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    y_ptrs = y_ptr + (rows[:, None] * N + columns[None, :])
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=inside)


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
    SPECIALIZE: tl.constexpr,
):
    """Descriptors load and, in ``PARTS`` bands, store; 0 parts: pointers store."""
    x_blocks = tl.make_tensor_descriptor(x_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    w_blocks = tl.make_tensor_descriptor(w_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    width: tl.constexpr = BLOCK_N // max(PARTS, 1)
    y_blocks = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BLOCK_M, width])
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        tile_m, tile_n = snaked_tile(tile, tiles_m, tiles_n, GROUP, SNAKE)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            x = x_blocks.load([tile_m * BLOCK_M, step * BLOCK_K])
            w = w_blocks.load([step * BLOCK_K, tile_n * BLOCK_N])
            total = tl.dot(x, w, total)
        if PARTS:
            store_parts(y_blocks, total, tile_m * BLOCK_M, tile_n * BLOCK_N,
                        BLOCK_M, BLOCK_N, PARTS)  # fmt: skip
        else:
            store_whole(y_ptr, total, tile_m * BLOCK_M, tile_n * BLOCK_N, M, N, BLOCK_M, BLOCK_N)


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
    PARTS: tl.constexpr,
):
    """Pointers load (``cp.async``); a descriptor stores in ``PARTS`` bands, or pointers do."""
    width: tl.constexpr = BLOCK_N // max(PARTS, 1)
    if PARTS:
        y_blocks = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BLOCK_M, width])
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
        if PARTS:
            store_parts(y_blocks, total, tile_m * BLOCK_M, tile_n * BLOCK_N,
                        BLOCK_M, BLOCK_N, PARTS)  # fmt: skip
        else:
            store_whole(y_ptr, total, tile_m * BLOCK_M, tile_n * BLOCK_N, M, N, BLOCK_M, BLOCK_N)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel and its sizes; ``even``: as few programs as take no more turns.

    ``split``: in so many parts tiles of a last turn are computed that has few enough of them.
    """

    kernel: Any
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group: int = 16
    stages: int = 3
    warps: int = 8
    flatten: bool = True
    parts: int = 2
    specialize: bool = False
    even: bool = True
    bands: int = 1
    buffers: int = 1
    late: bool = True
    snake: bool = False
    split: int = 1

    def tiles(self, m: int, n: int) -> int:
        return -(-m // self.block_m) * -(-n // self.block_n)

    def rest(self, m: int, n: int, most: int) -> int:
        """Tiles of a last turn that all programs compute, in ``split`` parts; 0: no such turn."""
        last = self.tiles(m, n) % most
        return last if self.split > 1 and last * self.split <= most < self.tiles(m, n) else 0

    def grid(self, m: int, n: int, most: int) -> int:
        tiles = self.tiles(m, n)
        even = self.even and not self.rest(m, n, most)
        return fewest_workers(tiles, most) if even else min(tiles, most)

    def arguments(self, m: int, k: int, n: int, most: int) -> dict[str, Any]:
        """Of the kernel's parameters that are no arrays."""
        found = {
            "M": m, "N": n, "K": k, "BLOCK_M": self.block_m, "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k, "GROUP": self.group,
            "PROGRAMS": self.grid(m, n, most), "FLATTEN": self.flatten, "PARTS": self.parts,
            "SPECIALIZE": self.specialize, "STAGES": self.stages, "BANDS": self.bands,
            "BUFFERS": self.buffers, "LATE": self.late, "SNAKE": self.snake,
            "WHOLE": self.tiles(m, n) - self.rest(m, n, most), "REST": self.rest(m, n, most),
            "SPLIT": self.split,
        }  # fmt: skip
        return {name: found[name] for name in self.kernel.arg_names if name in found}

    @property
    def sizes(self) -> dict[str, Any]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return named | {"kernel": self.kernel.__name__}


CANDIDATES = {
    "pointers, flat, 3 stages": Candidate(pointed, parts=0),
    "pointers, flat, 3 stages, snake": Candidate(pointed, parts=0, snake=True),
    "specialized, late": Candidate(specialized, warps=4),
    "specialized, late, snake": Candidate(specialized, warps=4, snake=True),
    "specialized, late, 2 bands": Candidate(specialized, warps=4, bands=2, buffers=2, snake=True),
    "specialized, late, 4 stages, 2 bands": Candidate(
        specialized, warps=4, stages=4, bands=2, snake=True
    ),
    "specialized, late, 4 stages, 4 bands": Candidate(
        specialized, warps=4, stages=4, bands=4, buffers=2, snake=True
    ),
    "specialized, late, 4 stages, 4 bands, split": Candidate(
        specialized, warps=4, stages=4, bands=4, buffers=2, snake=True, split=4
    ),
    "specialized": Candidate(specialized, warps=4, late=False, snake=True),
    "specialized, late, group 8": Candidate(specialized, warps=4, group=8, snake=True),
    "specialized, late, all programs": Candidate(specialized, warps=4, even=False, snake=True),
    "specialized, late, 128x128": Candidate(
        specialized, block_n=128, warps=4, stages=5, snake=True
    ),
}
"""The first is as the persistent kernel is; earlier ones are in the README's table. From the fifth
on all snake."""
