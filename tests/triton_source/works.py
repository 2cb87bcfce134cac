"""Small operators to rewrite, by kernel and scheme; nothing is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

from syncopate_jax import compiler
from syncopate_jax.backends import triton_backends, triton_call
from syncopate_jax.backends.triton_kernel import COUNTERS, PEERS, TABLE, FusedTriton
from syncopate_jax.backends.triton_layout import FlaggedTritonMaker
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, ComputeDep, Operation
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.triton_kernel import triton_kernel
from syncopate_jax.options import Launch
from syncopate_jax.pallas_kernels import attention_triton, contraction_triton, matmul_triton
from syncopate_jax.registry import templates
from tests.triton_source import foreign

M, K, N, RANKS = 32, 32, 48, 2
BLOCKS: dict[str, Any] = dict(block_m=16, block_n=16, block_k=16, group=2, num_warps=4)


def part(name: str, shape: tuple[int, ...], axis: int, rank: int, ranks: int = RANKS) -> Chunk:
    """What a rank has of a tensor that is cut along ``axis``."""
    size = shape[axis] // ranks
    return Chunk(name, Box.full(shape).with_axis(axis, rank * size, (rank + 1) * size))


def gather(axis: int, dtype: str = "float32", ranks: int = RANKS, **shapes: Any) -> Plan:
    """Every rank pushes its part of each tensor along ``axis`` to all others, nearest first."""
    lists: list[list[Operation]] = [[] for _ in range(ranks)]
    for step in range(1, ranks):
        for rank, ops in enumerate(lists):
            for name, shape in shapes.items():
                own = part(name, shape, axis, rank, ranks)
                ops.append(P2P(rank, rank, (rank + step) % ranks, own, own))
    starts = [
        Region(r, name, part(name, shape, axis, r, ranks).box)
        for r in range(ranks)
        for name, shape in shapes.items()
    ]
    goals = [Goal(r, name, Box.full(shape)) for r in range(ranks) for name, shape in shapes.items()]
    tensors = [Tensor(name, shape, dtype) for name, shape in shapes.items()]
    return build_plan("gather", ranks, tensors, starts, goals, lists)


def gather_and_scatter(x: tuple[int, ...], y: tuple[int, ...]) -> Plan:
    """Rows of x go to everyone; rows of y, once computed, to their owner, who adds them."""
    gathered = gather(0, x=x)
    lists = [list(gathered.ops(rank)) for rank in range(RANKS)]
    for rank, ops in enumerate(lists):
        to = (rank + 1) % RANKS
        piece = part("y", y, 0, to)
        ops.append(P2P(rank, rank, to, piece, piece, (ComputeDep(rank, piece),), reduce="sum"))
    everyone = tuple(range(RANKS))
    produced = [Region(r, "y", Box.full(y), produced=True) for r in everyone]
    sums = [Goal(r, "y", part("y", y, 0, r).box, ranks=everyone, reduce="sum") for r in everyone]
    return build_plan(
        "gather_and_scatter",
        RANKS,
        [*gathered.tensors, Tensor("y", y, "float32", per_rank=True)],
        [*gathered.initial, *produced],
        [*gathered.goals, *sums],
        lists,
    )


def scatter(tensor: str = "y") -> Plan:
    return templates.get("reduce_scatter_direct")(
        RANKS, (M, N), axis=0, tensor=tensor, dtype="float32"
    )


def plain() -> PallasKernel:
    config = matmul_triton.MatmulConfig(**BLOCKS, persistent=False)
    return matmul_triton.matmul(M, K, N, "float32", config)


def persistent() -> PallasKernel:
    config = matmul_triton.MatmulConfig(**BLOCKS)
    return matmul_triton.matmul(M, K, N, "float32", config, 4)


def attention() -> PallasKernel:
    return attention_triton.attention(2, 32, 32, 16, "float32", block_q=16, block_k=16, num_warps=4)


def contraction() -> PallasKernel:
    return contraction_triton.contraction(
        "Gmk", "Gkn", "mn", {"G": RANKS, "m": M, "k": 16, "n": N},
        tiles={"m": 16, "n": 16, "k": 16}, dtype="float32", out_dtype="float32", num_warps=4,
    )  # fmt: skip


def contraction_by_rank() -> PallasKernel:
    return contraction_triton.contraction(
        "Gmk", "kn", "Gmn", {"G": RANKS, "m": M, "k": K, "n": N},
        tiles={"m": 16, "n": 16, "k": 16}, dtype="float32", out_dtype="float32", num_warps=4,
    )  # fmt: skip


def tutorial() -> PallasKernel:
    strides = {"stride_am": K, "stride_ak": 1, "stride_bk": N, "stride_bn": 1}
    strides |= {"stride_cm": N, "stride_cn": 1, "ACTIVATION": ""}
    blocks = {f"BLOCK_SIZE_{x}": 16 for x in "MNK"} | {"GROUP_SIZE_M": 2}
    arguments = {"M": M, "N": N, "K": K, **strides, **blocks}
    return triton_kernel(foreign.tutorial_matmul, arguments, out_dtypes={"c_ptr": "float32"})


Work = tuple[Callable[[], PallasKernel], Callable[[], Plan], dict[str, str], str]
WORKS: dict[str, Work] = {
    "matmul_waits_for_copies": (plain, lambda: gather(0, x=(M, K)), {"x": "x"}, "copy_engine"),
    "matmul_waits": (plain, lambda: gather(0, x=(M, K)), {"x": "x"}, "ldst_dedicated"),
    "matmul_waits_inside": (plain, lambda: gather(0, w=(K, N)), {"w": "w"}, "ldst_dedicated"),
    "matmul_signals": (plain, scatter, {"y": "y"}, "ldst_dedicated"),
    "matmul_waits_and_signals": (
        plain,
        lambda: gather_and_scatter((M, K), (M, N)),
        {"x": "x", "y": "y"},
        "ldst_dedicated",
    ),
    "matmul_loads_from_peers": (plain, lambda: gather(0, x=(M, K)), {"x": "x"}, "ldst_colocated"),
    "matmul_stores_at_peers": (plain, scatter, {"y": "y"}, "ldst_colocated"),
    "persistent_waits": (persistent, lambda: gather(0, x=(M, K)), {"x": "x"}, "ldst_dedicated"),
    "persistent_signals": (persistent, scatter, {"y": "y"}, "ldst_dedicated"),
    "persistent_stores_at_peers": (persistent, scatter, {"y": "y"}, "ldst_colocated"),
    "attention_waits_inside": (
        attention,
        lambda: gather(1, k=(2, 32, 16), v=(2, 32, 16)),
        {"k": "k", "v": "v"},
        "ldst_dedicated",
    ),
    "attention_loads_from_peers": (
        attention,
        lambda: gather(1, k=(2, 32, 16), v=(2, 32, 16)),
        {"k": "k", "v": "v"},
        "ldst_colocated",
    ),
    "contraction_waits_inside": (
        contraction,
        lambda: gather(0, x=(RANKS, M, 16)),
        {"x": "lhs"},
        "ldst_dedicated",
    ),
    "contraction_waits": (
        contraction_by_rank,
        lambda: gather(0, x=(RANKS, M, K)),
        {"x": "lhs"},
        "ldst_dedicated",
    ),
    "tutorial_waits": (tutorial, lambda: gather(0, a=(M, K)), {"a": "a_ptr"}, "ldst_dedicated"),
}


def fused(name: str, monkeypatch: pytest.MonkeyPatch, folded: bool = False) -> FusedTriton:
    """The kernel of a work, on a mesh or folded."""
    kernel, plan, axis_map, backend = WORKS[name]
    monkeypatch.setattr(triton_call, "NEEDED", ("triton",))
    count = 1 if backend == "ldst_dedicated" else 0
    launch = Launch(sms=(3 + count) * (RANKS if folded else 1), communicating=count, folded=folded)
    made = compiler.compile(
        kernel(), plan(), axis_map, axis_name="x", backend=backend, target="triton", launch=launch
    )
    if backend == "copy_engine":
        laid = triton_backends.lay_out(made.work, FlaggedTritonMaker, 0)
    else:
        used = {"ldst_dedicated": triton_backends.DEDICATED}
        laid = triton_backends.lay_out(
            made.work, used.get(backend, triton_backends.COLOCATED).maker, count
        )
    return FusedTriton(backend, made.work, laid)


def parameters(kernel: FusedTriton) -> tuple[list[str], list[str]]:
    """Arrays that a launch takes, and that it gives."""
    own = [kernel.pointers[name] for name in kernel.work.kernel.operands]
    made = list(kernel._made_here())
    if kernel.work.launch.folded:
        return [*own, TABLE, PEERS], [*made, COUNTERS]
    far = [name for name in kernel.between if name in made]
    return [*own, TABLE, PEERS, COUNTERS, *far], [name for name in made if name not in far]
