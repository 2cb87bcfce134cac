"""PyTorch on the same problems: NCCL and cuBLAS, and its fused operators on symmetric memory.

Run by ``run.py``, which starts it once; it starts a process a GPU. A line of JSON a problem. What
failed is in the lines, and once all are printed ends the process with an error that names it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines the fused operators of torch.ops.symm_mem
import torch.multiprocessing as multiprocessing

ROUNDS = 5


def timed(fn: Callable[[], Any], calls: int) -> float:
    """Median time of a call in microseconds, the slower rank's."""
    fn()
    found = []
    for _ in range(ROUNDS):
        fn()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            fn()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / calls)
    slowest = torch.tensor(statistics.median(found), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(slowest.item(), 1)


def versions(operator: str, m: int, k: int, n: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """What PyTorch offers for an operator, by label."""
    group = dist.group.WORLD
    make: Any = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    if operator == "all_gather_matmul":
        x, w, whole = make(m // ranks, k), make(k, n // ranks), make(m, k)

        def gather() -> torch.Tensor:
            dist.all_gather_into_tensor(whole, x)
            return whole @ w

        fused = lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group.group_name)  # noqa: E731
        return {"gemm": lambda: whole @ w, "nccl": gather, "fused": fused}
    x, w = make(m, k // ranks), make(k // ranks, n)
    if operator == "matmul_reduce_scatter":
        out = make(m // ranks, n)
        fused = lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(  # noqa: E731
            x, w, "sum", 0, group.group_name
        )
        return {
            "gemm": lambda: x @ w,
            "nccl": lambda: dist.reduce_scatter_tensor(out, x @ w),
            "fused": fused,
        }
    return {"gemm": lambda: x @ w, "nccl": lambda: dist.all_reduce(x @ w)}


def worker(rank: int, ranks: int, problems: list[Any]) -> None:
    """One GPU's process.

    Raises:
      RuntimeError: a version failed; all others were timed and printed before.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    failed = []
    for operator, name, m, k, n in problems:
        row: dict[str, Any] = {"operator": operator, "name": name, "m": m, "k": k, "n": n}
        calls = max(3, min(20, int(8e-3 / (2 * m * k * n / ranks / 650e12))))
        row["median_us"], row["failed"] = {}, {}
        for label, fn in versions(operator, m, k, n, ranks).items():
            try:
                row["median_us"][label] = timed(fn, calls)
            except Exception as error:
                row["failed"][label] = f"{type(error).__name__}: {error}"[:200]
                failed.append(f"{label} of {operator} {m}x{k}x{n}: {row['failed'][label]}")
        row["versions"] = {"torch": torch.__version__}
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()
    if failed:
        raise RuntimeError(f"PyTorch ran all but {len(failed)}: {'; '.join(failed)}")


def main() -> None:
    """Reads [[operator, name, m, k, n], ...] from the first argument."""
    problems, ranks = json.loads(sys.argv[1]), int(sys.argv[2])
    multiprocessing.spawn(worker, args=(ranks, problems), nprocs=ranks)


if __name__ == "__main__":
    main()
