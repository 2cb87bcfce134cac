"""XLA with the flags that overlap collectives with products, in a process of its own.

Run by ``run.py`` with the flags in ``XLA_FLAGS``, a process a problem; prints a line of JSON. The
collective is written out, and once left to the partitioner, whose loops of products and permutes it
is that "windowed einsum" means. Small problems are also timed in one program, written out.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from experiments.common import lowering, processes, timing
from experiments.two_gpus import problems, programs
from experiments.two_gpus.measure import REPEATS
from experiments.two_gpus.programs import Ranks

FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_threshold_for_windowed_einsum_mib=0",
    "--xla_gpu_multi_streamed_windowed_einsum=true",
)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--problem", type=int, required=True, help="its number")
    parser.add_argument("--tiny", action="store_true", help="tiny problems, without a GPU")
    parser.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    ranks = Ranks(args.ranks, False)
    problem = (problems.TINY if args.tiny else problems.PROBLEMS)[args.problem]
    shapes = programs.operands(problem, ranks, jnp.bfloat16)
    xla = {"backend": "xla"}
    written = programs.program(problem, ranks, xla)
    sharding = NamedSharding(ranks.mesh, ranks.spec(problem.operator.y))
    left = jax.jit(lambda x, w: x @ w, out_shardings=sharding)
    product, product_shapes = programs.local(problem, ranks, jnp.matmul)
    row: dict[str, Any] = {"operator": problem.operator.name, "name": problem.name}
    row |= dict(zip("mkn", problem.mkn, strict=True))
    rivals = {"written": written, "partitioned": left}
    if problem.small:
        many = programs.repeated_program(problem, ranks, xla, REPEATS)
        rivals[f"{REPEATS} x written"] = many
    if args.lower:
        for label, fn in rivals.items():
            processes.emit(row | lowering.lowered(label, fn, shapes))
        return row
    processes.wait_turn()  # XLA measures as it compiles: on devices of its own
    pairs = [tuple(ranks.random(s, 2 * i + j) for j, s in enumerate(shapes)) for i in range(2)]
    inputs = tuple(ranks.random(s, 7 + i) for i, s in enumerate(product_shapes))
    versions: dict[str, Any] = {
        label: functools.partial(_on_pair, fn) for label, fn in rivals.items()
    }
    versions["gemm"] = lambda _: product(*inputs)
    one_call = problem.flops / ranks.count / 650e12
    calls = 1 if args.tiny else max(3, min(20, int(8e-3 / one_call)))
    seconds = timing.interleaved_seconds(
        versions, [(pair,) for pair in pairs], rounds=args.rounds, calls=calls
    )
    row["median_us"] = {
        label: round(statistics.median(values) * 1e6, 1) for label, values in seconds.items()
    }
    processes.emit(row)
    return row


def _on_pair(fn: Any, pair: tuple[jax.Array, jax.Array]) -> jax.Array:
    return fn(*pair)


if __name__ == "__main__":
    main()
