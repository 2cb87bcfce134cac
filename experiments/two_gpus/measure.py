"""One problem: every version of it is built, checked against XLA's result, and timed.

Run by ``run.py``, a process a problem. It traces and compiles our kernels at once, and waits for
its turn before it touches a device: so one process at a time does.
"""

from __future__ import annotations

import argparse
import glob
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common import lowering, processes, timing
from experiments.two_gpus import problems, programs
from experiments.two_gpus.problems import Problem
from experiments.two_gpus.programs import Ranks
from syncopate_jax.errors import SyncopateError
from syncopate_jax.native import copies

WRONG = 5e-3  # of the norm of XLA's result; sums in another order differ by 2.5e-3 in bfloat16
REPEATS = 8
RATE = 650e12  # to guess how many calls make up a block


def traced(problem: Problem, ranks: Ranks, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Our versions as compiled programs, and why others are none."""
    pool = ThreadPoolExecutor(8)
    shapes = programs.operands(problem, ranks, jnp.bfloat16)
    pending: dict[str, Future[Any]] = {}
    failed: dict[str, str] = {}
    for label, options in choices.items():
        try:
            lowered = programs.program(problem, ranks, options).lower(*shapes)
            pending[label] = pool.submit(lowered.compile)
            if problem.small:
                lowered = programs.repeated_program(problem, ranks, options, REPEATS).lower(*shapes)
                pending[f"{REPEATS} x {label}"] = pool.submit(lowered.compile)
        except (SyncopateError, ValueError, NotImplementedError) as error:
            failed[label] = f"{type(error).__name__}: {error}"[:300]
    done = {}
    for label, future in pending.items():
        try:
            done[label] = future.result()
        except Exception as error:
            failed[label] = f"{type(error).__name__}: {error}"[:300]
    return {"versions": done, "failed": failed}


def jax_kernel(problem: Problem, ranks: Ranks) -> dict[str, Any]:
    """JAX's own fused all-gather-matmul, in several configurations."""
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as collective

    found = {}
    dimension = collective.MatmulDimension
    for tile_m, tile_n, wg in ((128, 128, dimension.N),):
        for width in (8, 16):
            config = collective.TuningConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=64,
                max_concurrent_steps=4,
                grid_minor_dim=dimension.M,
                grid_tile_width=width,
                wg_dimension=wg,
            )

            def one(x: jax.Array, w: jax.Array, config: Any = config) -> jax.Array:
                return collective.all_gather_lhs_matmul(
                    x, w, programs.AXIS, config=config, dtype=jnp.bfloat16
                )

            label = f"jax {tile_m}x{tile_n} {wg.name} {width}"
            found[label] = jax.jit(ranks.over(one, 0, 1, 1))
    return found


def relative_error(found: jax.Array, wanted: jax.Array) -> float:
    @jax.jit
    def norms(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b * b))

    return float(norms(found, wanted))


def device_us(fn: Callable[..., Any], inputs: tuple[Any, ...], calls: int = 5) -> dict[str, float]:
    """Per kernel name the time on the first device, in microseconds a call, from a profile."""
    jax.block_until_ready(fn(*inputs))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                result = fn(*inputs)
            jax.block_until_ready(result)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data: Any = jax.profiler.ProfileData.from_file(path)  # type: ignore[attr-defined]
        total: dict[str, float] = {}
        for plane in data.planes:
            if plane.name != "/device:GPU:0":
                continue
            for line in plane.lines:
                for event in line.events if line.name.startswith("Stream") else ():
                    name = event.name.split("(")[0].split("<")[0][:40]
                    total[name] = total.get(name, 0.0) + event.duration_ns / 1e3 / calls
    return {name: round(value, 1) for name, value in total.items()}


def host_us(fn: Callable[..., Any], inputs: tuple[Any, ...], calls: int = 8) -> float:
    """Time until a call returns to Python, its work only queued."""
    jax.block_until_ready(fn(*inputs))
    begin = time.perf_counter()
    for _ in range(calls):
        result = fn(*inputs)
    found = (time.perf_counter() - begin) / calls
    jax.block_until_ready(result)
    return round(found * 1e6, 1)


def measure(problem: Problem, ranks: Ranks, built: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """One row of the results; medians of the time of a call in microseconds."""
    shapes = programs.operands(problem, ranks, jnp.bfloat16)
    pairs = [tuple(ranks.random(s, 2 * i + j) for j, s in enumerate(shapes)) for i in range(2)]
    xla = {"backend": "xla"}
    versions: dict[str, Any] = {"xla": programs.program(problem, ranks, xla), **built["versions"]}
    failed = dict(built["failed"])
    if problem.small:
        versions[f"{REPEATS} x xla"] = programs.repeated_program(problem, ranks, xla, REPEATS)
    if args.rivals and problem.operator is problems.GATHER:
        versions |= jax_kernel(problem, ranks)
    wanted = jax.block_until_ready(versions["xla"](*pairs[0]))
    errors: dict[str, float] = {}
    for label, fn in list(versions.items()):
        if label == "xla" or label.startswith(f"{REPEATS} x"):
            continue
        try:
            errors[label] = relative_error(jax.block_until_ready(fn(*pairs[0])), wanted)
        except Exception as error:
            failed[label] = f"{type(error).__name__}: {error}"[:300]
            del versions[label]
    del wanted
    one_call = problem.flops / ranks.count / RATE
    calls = max(args.min_calls, int(args.block_ms * 1e-3 / one_call))
    calls = args.min_calls if args.tiny else min(calls, 40)
    product, product_shapes = programs.local(problem, ranks, jnp.matmul)
    exchange, exchange_shapes = programs.exchange(problem, ranks)
    alone = {
        "gemm": (product, tuple(ranks.random(s, 7 + i) for i, s in enumerate(product_shapes))),
        "exchange": (
            exchange,
            tuple(ranks.random(s, 9 + i) for i, s in enumerate(exchange_shapes)),
        ),
    }
    if problem.small:
        again = programs.repeated(jnp.matmul, REPEATS)
        several, _ = programs.local(problem, ranks, again)
        alone[f"{REPEATS} x gemm"] = several, alone["gemm"][1]
        exchanges, _ = programs.exchange(problem, ranks, REPEATS)
        alone[f"{REPEATS} x exchange"] = exchanges, alone["exchange"][1]
    bound: dict[str, Callable[[Any], Any]] = {
        label: lambda pair, fn=fn: fn(*pair) for label, fn in versions.items()
    }
    bound |= {
        label: lambda _, fn=fn, inputs=inputs: fn(*inputs) for label, (fn, inputs) in alone.items()
    }
    seconds = timing.interleaved_seconds(
        bound, [(pair,) for pair in pairs], rounds=args.rounds, calls=calls
    )
    medians = {
        label: round(statistics.median(values) * 1e6, 1) for label, values in seconds.items()
    }
    wanted = jax.block_until_ready(versions["xla"](*pairs[1]))
    for label in set(errors) & set(versions):
        again = relative_error(jax.block_until_ready(versions[label](*pairs[1])), wanted)
        errors[label] = max(errors[label], again)
    row = summary(problem, medians, errors, built["versions"])
    row["calls"], row["failed"] = calls, failed
    right = [label for label in errors if label in built["versions"]]
    row["host_us"] = {label: host_us(versions[label], pairs[0]) for label in ("xla", *right)}
    cost = copies.take_cost() if "copy_engine" in row["host_us"] else {}
    if cost.get("start_calls"):
        row["handlers_us"] = {name: round(value, 1) for name, value in cost.items()}
    if args.profile and row["best"]:
        row["device_us"] = {
            label: device_us(versions[label], pairs[0]) for label in ("xla", row["best"])
        }
    return row


def summary(
    problem: Problem, medians: dict[str, float], errors: dict[str, float], ours: Mapping[str, Any]
) -> dict[str, Any]:
    """What the medians say; the best of ours counts, if it is right and its ranks greet."""
    right = [label for label in errors if label in ours and errors[label] <= WRONG]
    right = [label for label in right if problems.BARRIER not in label]
    best = min(right, key=medians.__getitem__, default=None)
    row: dict[str, Any] = {
        "operator": problem.operator.name,
        "name": problem.name,
        "m": problem.m,
        "k": problem.k,
        "n": problem.n,
        "best": best,
        "median_us": medians,
        "errors": {label: float(f"{value:.2e}") for label, value in errors.items()},
        "wrong": [label for label, value in errors.items() if not value <= WRONG],
    }
    if best is None:
        return row
    time_us, xla, gemm = medians[best], medians["xla"], medians["gemm"]
    row["to_gemm"] = round(time_us / gemm, 4)
    row["to_bound"] = round(time_us / max(gemm, medians["exchange"]), 4)
    row["speedup"] = round(xla / time_us, 4)
    row["gap_closed"] = round((xla - time_us) / (xla - gemm), 4) if xla > gemm else None
    rivals = [medians[label] for label in medians if label.startswith("jax ")]
    if rivals:
        row["speedup_to_jax"] = round(min(rivals) / time_us, 4)
    repeated = f"{REPEATS} x "
    inside = [label for label in right if repeated + label in medians]
    if inside and repeated + "xla" in medians:
        fastest = min(inside, key=lambda label: medians[repeated + label])
        row["best_inside"] = fastest
        row["to_gemm_inside"] = round(medians[repeated + fastest] / medians[repeated + "gemm"], 4)
        bound = max(medians[repeated + "gemm"], medians[repeated + "exchange"])
        row["to_bound_inside"] = round(medians[repeated + fastest] / bound, 4)
        row["speedup_inside"] = round(medians[repeated + "xla"] / medians[repeated + fastest], 4)
    return row


def parser() -> argparse.ArgumentParser:
    """Options that ``run.py`` passes on."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--ranks", type=int, default=2)
    found.add_argument("--folded", action="store_true", help="all ranks on one device")
    found.add_argument("--tiny", action="store_true", help="tiny problems, without a GPU")
    found.add_argument("--rounds", type=int, default=7)
    found.add_argument("--block-ms", type=float, default=8.0, help="length of a timed block")
    found.add_argument("--min-calls", type=int, default=3, help="calls in a timed block, at least")
    found.add_argument("--profile", action="store_true", help="also profile the best version")
    found.add_argument("--rivals", action="store_true", help="also time JAX's fused kernel")
    found.add_argument("--barriers", action="store_true", help="small ones with XLA's barrier too")
    found.add_argument("--target", default="mosaic_gpu", help="what kernels are written in")
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = parser()
    arguments.add_argument("--problem", type=int, required=True, help="its number")
    arguments.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    args = arguments.parse_args(argv)
    problem = (problems.TINY if args.tiny else problems.PROBLEMS)[args.problem]
    ranks = Ranks(args.ranks, args.folded)
    choices = problems.choices(problem, args.barriers, args.target)
    if args.tiny:
        choices = {"xla again": {"backend": "xla"}}
    elif args.folded:
        choices = {k: v for k, v in choices.items() if v["backend"] != "copy_engine"}
    if args.lower:
        return {"rows": list(lowered(problem, ranks, choices, args.rivals))}
    built = traced(problem, ranks, choices)
    processes.wait_turn()
    row = measure(problem, ranks, built, args)
    processes.emit(row)
    return row


def lowered(
    problem: Problem, ranks: Ranks, choices: Mapping[str, Any], rivals: bool
) -> Iterator[dict[str, Any]]:
    """A row a program of ours and of JAX's kernel: whether it lowers."""
    shapes = programs.operands(problem, ranks, jnp.bfloat16)
    made = {}
    for label, options in choices.items():
        made[label] = programs.program(problem, ranks, options)
        if problem.small:
            again = programs.repeated_program(problem, ranks, options, REPEATS)
            made[f"{REPEATS} x {label}"] = again
    if rivals and problem.operator is problems.GATHER:
        made |= jax_kernel(problem, ranks)
    for label, fn in made.items():
        row = {"operator": problem.operator.name, **dict(zip("mkn", problem.mkn, strict=True))}
        row |= lowering.lowered(label, fn, shapes)
        processes.emit(row)
        yield row


if __name__ == "__main__":
    main()
