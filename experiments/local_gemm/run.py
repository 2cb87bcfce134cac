"""The local Hopper matrix product against XLA's, and its scheduled order against its natural one.

Run on a machine with a Hopper GPU, from the repository's root::

  python -m experiments.local_gemm.run --out experiments/results/local_gemm.json

A line of JSON a product, as it is done.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.common import check, lowering, processes, results, shapes, timing
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu as kernel
from syncopate_jax.pallas_kernels import tile_loop_mosaic_gpu as tile_loop
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import Limits, MatmulConfig
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_operands import Operands

CHUNKS = (4, 8, 16)
TINY = (shapes.Gemm("tiny/even", 512, 128, 256), shapes.Gemm("tiny/ragged", 512, 144, 208))
TINY_CONFIG = MatmulConfig(tile_n=128, stages=2)


def chunk_table(config: MatmulConfig, gemm: shapes.Gemm, chunks: int) -> np.ndarray | None:
    """A schedule that takes M in ``chunks`` chunks in order, or None if tiles straddle them."""
    m_tiles, n_tiles = config.tiles(gemm.m, gemm.n)
    if m_tiles % chunks:
        return None
    inner = tile_loop.NaturalOrder((m_tiles // chunks, n_tiles), config.group, config.minor)
    return np.concatenate([inner.table(c, c * m_tiles // chunks) for c in range(chunks)])


def operands(gemm: shapes.Gemm, seed: int) -> tuple[jax.Array, jax.Array]:
    x_key, w_key = jax.random.split(jax.random.key(seed, impl="rbg"))
    x = jax.random.normal(x_key, (gemm.m, gemm.k), jnp.bfloat16)
    return x, jax.random.normal(w_key, (gemm.k, gemm.n), jnp.bfloat16)


def tuned(gemm: shapes.Gemm) -> MatmulConfig:
    x, w, y = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((gemm.m, gemm.k), (gemm.k, gemm.n), (gemm.m, gemm.n))
    )
    device = jax.devices()[0]
    sms = None if device.platform == "gpu" else lowering.CORES
    kind = device.device_kind if device.platform == "gpu" else lowering.KIND
    return kernel.pick_config(Operands(x, w, y), Limits.of(device, sms=sms), kind)


def versions(
    gemm: shapes.Gemm, config: MatmulConfig, matmul: Callable[..., jax.Array], scheduled: bool
) -> dict[str, tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]]:
    """XLA's product, the kernel's in its natural order, and in schedules whose flags are set; with
    what each takes beside the operands."""
    found: dict[str, Any] = {
        "xla": (lambda x, w: x @ w, ()),
        "natural": (functools.partial(matmul, config=config), ()),
    }
    for chunks in CHUNKS if scheduled else ():
        if (table := chunk_table(config, gemm, chunks)) is not None:
            found[f"scheduled_{chunks}"] = (
                lambda x, w, table, flags: matmul(x, w, config=config, table=table, flags=flags),
                (jnp.asarray(table), jnp.ones((chunks,), jnp.int32)),
            )
    return found


def shapes_of(gemm: shapes.Gemm) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    x, w = (gemm.m, gemm.k), (gemm.k, gemm.n)
    return jax.ShapeDtypeStruct(x, jnp.bfloat16), jax.ShapeDtypeStruct(w, jnp.bfloat16)


def measure(
    gemm: shapes.Gemm,
    config: MatmulConfig,
    functions: Mapping[str, Callable[..., jax.Array]],
    args: Any,
) -> dict[str, Any]:
    """One row of the results; medians in microseconds."""
    inputs = [operands(gemm, seed) for seed in range(2)]
    before = {
        name: check.checked_error(f"{gemm.name} {name}", function(*inputs[0]), *inputs[0])
        for name, function in functions.items()
    }
    calls = max(args.min_calls, int(args.block_ms * 1e-3 / (gemm.flops / 700e12)))
    seconds = timing.interleaved_seconds(
        functions, inputs, rounds=args.rounds, calls=calls, pause=args.pause
    )
    after = {
        name: check.checked_error(f"{gemm.name} {name}", function(*inputs[1]), *inputs[1])
        for name, function in functions.items()
    }
    medians = {name: statistics.median(values) * 1e6 for name, values in seconds.items()}
    return {
        **dataclasses.asdict(gemm),
        "config": dataclasses.asdict(config),
        "calls": calls,
        "median_us": {name: round(value, 2) for name, value in medians.items()},
        "speedup": round(medians["xla"] / medians["natural"], 4),
        "errors_before": before,
        "errors_after": after,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    rows = [row for row in rows if "speedup" in row]
    if not rows:
        return {}
    speedups = [row["speedup"] for row in rows]
    overheads = [
        value / row["median_us"]["natural"]
        for row in rows
        for name, value in row["median_us"].items()
        if name.startswith("scheduled")
    ]
    found = {"speedup_geomean": statistics.geometric_mean(speedups), "speedup_min": min(speedups)}
    if overheads:
        found["scheduled_geomean"] = statistics.geometric_mean(overheads)
        found["scheduled_max"] = max(overheads)
    return {name: round(value, 4) for name, value in found.items()}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="only shapes whose name contains this")
    parser.add_argument("--named", type=int, nargs=2, help="of the twelve named shapes, from, to")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block-ms", type=float, default=8.0, help="length of a timed block")
    parser.add_argument("--min-calls", type=int, default=3, help="calls in a timed block, at least")
    parser.add_argument("--pause", type=float, default=0.0, help="idle seconds before each block")
    parser.add_argument("--scheduled", action="store_true", help="also time scheduled orders")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes in interpret mode, no GPU")
    parser.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    args = parser.parse_args(argv)

    matmul: Callable[..., jax.Array] = kernel.matmul
    gemms = shapes.local_gemms() if args.named is None else shapes.named_gemms()[slice(*args.named)]
    if args.tiny:
        gemms, args.scheduled = TINY, False
        interpret = plgpu.InterpretGPUParams()
        matmul = functools.partial(kernel.matmul, num_sms=1, interpret=interpret)
    elif args.lower:
        matmul = functools.partial(kernel.matmul, num_sms=lowering.CORES)
    chosen = [gemm for gemm in gemms if args.only in gemm.name]
    configs = {gemm: TINY_CONFIG if args.tiny else tuned(gemm) for gemm in chosen}
    rows: list[dict[str, Any]] = []
    built: dict[tuple[shapes.Gemm, str], tuple[Any, Any]] = {}
    with ThreadPoolExecutor(12) as pool:
        for gemm in chosen:
            made = versions(gemm, configs[gemm], matmul, args.scheduled)
            for name, (function, extra) in made.items():
                if args.lower:
                    given = (*shapes_of(gemm), *extra)
                    rows.append(lowering.lowered(f"{gemm.name} {name}", function, given))
                    processes.emit(rows[-1])
                elif name == "xla":  # which measures as it compiles: on a device of its own
                    built[gemm, name] = jax.jit(function), extra
                else:
                    lowered = jax.jit(function).lower(*shapes_of(gemm), *extra)
                    built[gemm, name] = pool.submit(lowered.compile), extra
        ready = {
            key: (made.result() if isinstance(made, Future) else made, extra)
            for key, (made, extra) in built.items()
        }
    processes.wait_turn()
    for gemm in chosen if not args.lower else ():
        functions = {
            name: lambda x, w, run=run, extra=extra: run(x, w, *extra)
            for (of, name), (run, extra) in ready.items()
            if of is gemm
        }
        rows.append(measure(gemm, configs[gemm], functions, args))
        processes.emit(rows[-1])
    head = {"experiment": "local_gemm", **results.environment(), "summary": summary(rows)}
    options = ("rounds", "block_ms", "min_calls", "pause", "scheduled")
    head["options"] = {name: getattr(args, name) for name in options}
    if args.out:
        results.write(args.out, head, rows)
    print(head["summary"])
    return head


if __name__ == "__main__":
    main()
