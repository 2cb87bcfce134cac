"""Whether device memory comes back to its base after many calls of changing shapes.

On one GPU, ranks folded; prints a line of JSON::

  python -m experiments.two_gpus.memory
"""

from __future__ import annotations

import gc
import json
from typing import Any

import jax
import jax.numpy as jnp

from experiments.two_gpus import problems, programs
from experiments.two_gpus.problems import Problem
from experiments.two_gpus.programs import Ranks

CALLS = 1000
SIZES = ((256, 256, 256), (512, 256, 384), (400, 272, 512), (768, 128, 256))


def in_use() -> int:
    """Bytes that arrays hold on the first device."""
    gc.collect()
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_in_use", 0))


def main(calls: int = CALLS) -> dict[str, Any]:
    ranks = Ranks(2, True)
    runs = []
    for operator in (problems.GATHER, problems.SCATTER):
        for mkn in SIZES:
            problem = Problem("memory", operator, *mkn)
            fn = programs.program(problem, ranks, {"backend": "tma_dedicated"})
            runs.append((fn, programs.operands(problem, ranks, jnp.bfloat16)))
    for fn, shapes in runs:
        jax.block_until_ready(fn(*(ranks.random(s, 0) for s in shapes)))
    base, worst = in_use(), 0
    for call in range(calls):
        fn, shapes = runs[call % len(runs)]
        jax.block_until_ready(fn(*(ranks.random(s, call) for s in shapes)))
        if call % 100 == 99:
            worst = max(worst, in_use() - base)
    row = {"calls": calls, "base_bytes": base, "after_bytes": in_use(), "most_above_base": worst}
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
