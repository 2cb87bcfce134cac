"""Whether device memory comes back to its base after many calls of changing shapes.

On one GPU, ranks folded; prints a line of JSON. Programs are compiled once, and operands are made
once, before the base is read; it stops at the limit of calls or of seconds, whichever comes first.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common import lowering, processes
from experiments.two_gpus import problems, programs
from experiments.two_gpus.problems import Problem
from experiments.two_gpus.programs import Ranks

SIZES = ((256, 256, 256), (512, 256, 384), (400, 272, 512), (768, 128, 256))
EVERY = 50  # calls between readings


def in_use() -> int:
    """Bytes that arrays hold on the first device; 0 where it does not say."""
    gc.collect()
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_in_use", 0))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="tma_dedicated")
    parser.add_argument("--target", default="mosaic_gpu")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--tiny", action="store_true", help="by XLA, without a GPU")
    parser.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    args = parser.parse_args(argv)
    ranks = Ranks(2, True)
    given = {"backend": args.backend, "target": args.target}
    options = {"backend": "xla"} if args.tiny else given
    row: dict[str, Any] = {**given, "asked": args.calls}
    runs = []
    for operator in (problems.GATHER, problems.SCATTER):
        for mkn in SIZES[: 1 if args.tiny else None]:
            problem = Problem("memory", operator, *mkn)
            fn = programs.program(problem, ranks, options)
            shapes = programs.operands(problem, ranks, jnp.bfloat16)
            if args.lower:
                processes.emit(lowering.lowered(f"{operator.name} {mkn}", fn, shapes))
                continue
            inputs = tuple(ranks.random(s, i) for i, s in enumerate(shapes))
            runs.append((fn.lower(*shapes).compile(), inputs))
    if args.lower:
        return row
    for fn, inputs in runs:
        jax.block_until_ready(fn(*inputs))
    base, most, begun, calls = in_use(), 0, time.monotonic(), 0
    while calls < args.calls and time.monotonic() - begun < args.seconds:
        fn, inputs = runs[calls % len(runs)]
        result = jax.block_until_ready(fn(*inputs))
        del result
        calls += 1
        if calls % EVERY == 0:
            most = max(most, in_use() - base)
    row |= {"calls": calls, "base_bytes": base, "after_bytes": in_use(), "most_above_base": most}
    processes.emit(row)
    return row


if __name__ == "__main__":
    main()
