"""Candidates for the local Triton product against XLA's, on one GPU.

All are compared on the first shapes; those that are fastest there go on to the rest. Every product
is compared with float32 before it is timed. Run from the repository's root; a line of JSON a row::

  timeout 200 python -m experiments.triton.compare --out experiments/results/triton_candidates.json

``--few`` compares all of them where programs have few tiles.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common import check, lowering, processes, results, shapes, timing
from experiments.triton.candidates import CANDIDATES, Candidate
from experiments.triton.run import TINY, operands
from syncopate_jax.backends import triton_call, triton_scratch

FIRST = (
    "llama3-70b/attn_out/tp4", "llama3-8b/ffn_in/tp2", "llama3-8b/attn_out/tp2",
    "qwen2-72b/ffn_in/tp4",
)  # fmt: skip
"""Shapes on which all are compared: short contractions, a usual one, and a ragged one."""
OPTIONS = ("rounds", "pause", "keep", "let_go", "few")
FEW = tuple(
    shapes.Gemm(f"{turns} tiles, {k} deep", 8192, k, 512 * turns)
    for turns in (1, 2, 3, 4)
    for k in (2048, 4096, 8192)
)
"""So many tiles of 128x256 a program, of 128 programs."""


def product(candidate: Candidate, gemm: shapes.Gemm, cores: int) -> Callable[..., jax.Array]:
    """The candidate's kernel as a function of x and w."""
    out = jax.ShapeDtypeStruct((gemm.m, gemm.n), jnp.bfloat16)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        (y,) = triton_call.call(
            [x, w],
            [out],
            candidate.arguments(gemm.m, gemm.k, gemm.n, cores),
            kernel=candidate.kernel,
            grid=(candidate.grid(gemm.m, gemm.n, cores),),
            name=candidate.kernel.__name__,
            num_warps=candidate.warps,
            num_stages=candidate.stages,
        )
        return y

    return run


def compiled(
    gemms: Iterable[shapes.Gemm], names: Iterable[str], cores: int, threads: int
) -> dict[tuple[str, str], Callable[..., jax.Array]]:
    """By shape and candidate, several at a time; what does not compile becomes a row."""

    def one(task: tuple[shapes.Gemm, str]) -> tuple[tuple[str, str], Any]:
        gemm, name = task
        example = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            for shape in ((gemm.m, gemm.k), (gemm.k, gemm.n))
        ]
        run = jnp.matmul if name == "xla" else product(CANDIDATES[name], gemm, cores)
        try:
            return (gemm.name, name), jax.jit(run).lower(*example).compile()
        except Exception as error:  # too large for the device, or the compiler cannot
            failed = f"{type(error).__name__}: {error}"[:300]
            processes.emit({"name": gemm.name, "candidate": name, "failed": failed})
            return (gemm.name, name), None

    tasks = [(gemm, name) for gemm in gemms for name in names]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return {key: run for key, run in pool.map(one, tasks) if run is not None}


def measure(
    gemm: shapes.Gemm, versions: dict[str, Callable[..., jax.Array]], args: argparse.Namespace
) -> dict[str, Any]:
    """One shape's row; a candidate that is wrong or does not run is left out, with its error."""
    inputs = [operands(gemm, seed) for seed in range(2)]
    wrong, errors = {}, {}
    for name, run in versions.items():
        try:
            errors[name] = check.checked_error(name, run(*inputs[0]), *inputs[0])[0]
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            wrong[name] = str(error)[:300]
    right = {name: versions[name] for name in errors}
    calls = max(10, int(6e-3 / (gemm.flops / 700e12)))
    seconds = timing.interleaved_seconds(
        right, inputs, rounds=args.rounds, calls=calls, pause=args.pause
    )
    median = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        **dataclasses.asdict(gemm),
        "median_us": {name: round(t * 1e6, 1) for name, t in median.items()},
        "of_xla": {name: round(median["xla"] / t, 4) for name, t in median.items()},
        "worst_error": max(errors.values()),
        "wrong": wrong,
        "calls": calls,
    }


def means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric mean of XLA's time over each candidate's, of those that all rows have; best first.

    XLA's own is 1.
    """
    everywhere = set.intersection(*(set(row["of_xla"]) for row in rows)) if rows else set()
    found = {
        name: statistics.geometric_mean(row["of_xla"][name] for row in rows) for name in everywhere
    }
    return {n: round(v, 4) for n, v in sorted(found.items(), key=lambda item: -item[1])}


def lower_all(gemms: Iterable[shapes.Gemm], cores: int) -> None:
    """Lowers every candidate for every shape, which compiles its kernel; no GPU is needed."""
    for gemm in gemms:
        example = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            for shape in ((gemm.m, gemm.k), (gemm.k, gemm.n))
        ]
        for name, candidate in CANDIDATES.items():
            run = product(candidate, gemm, cores)
            processes.emit(lowering.lowered(f"{gemm.name} {name}", run, example))


def compare(args: argparse.Namespace, cores: int, save: Callable[..., None]) -> dict[str, Any]:
    """Both rounds: all candidates on the first shapes, the best on all; saved after each shape.

    Returns:
      By round, how many shapes were measured by then and the candidates' ``means``.
    """
    begun = time.perf_counter()
    gemms = FEW if args.few else _gemms(args)
    first = [gemm for gemm in gemms if gemm.name in FIRST] or list(gemms)
    rest = [gemm for gemm in gemms if gemm not in first]
    names, rows, summary = ["xla", *(args.only or CANDIDATES)], [], {}
    for label, some in (("first shapes", first), ("all shapes", rest)):
        made = compiled(some, names, cores, args.threads)
        print(f"{label}: compiled by {time.perf_counter() - begun:.0f} s", flush=True)
        for gemm in some:
            if time.perf_counter() - begun > args.seconds:
                print(f"out of time before {gemm.name}", flush=True)
                break
            versions = {name: made[gemm.name, name] for name in names if (gemm.name, name) in made}
            rows.append(measure(gemm, versions, args))
            processes.emit(rows[-1])
            summary[label] = {"shapes": len(rows), "of_xla": means(rows)}
            save(summary, rows)
        kept = [name for name in means(rows) if name != "xla"][: args.keep]
        names = ["xla", *dict.fromkeys([*kept, next(iter(CANDIDATES))])]
    return summary


def _gemms(args: argparse.Namespace) -> Iterable[shapes.Gemm]:
    return TINY if args.tiny else shapes.named_gemms()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true", help="a small problem")
    parser.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    parser.add_argument("--few", action="store_true", help="shapes of few tiles a program")
    parser.add_argument("--only", nargs="*", choices=CANDIDATES, help="candidates; by default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.03, help="idle seconds before each block")
    parser.add_argument("--keep", type=int, default=6, help="candidates that see all shapes")
    parser.add_argument("--threads", type=int, default=14, help="that compile")
    parser.add_argument("--let-go", action="store_true", help="of scratch memory at every wait")
    parser.add_argument("--seconds", type=float, default=130, help="measure no new shape after it")
    args = parser.parse_args(argv)
    if args.lower:
        lower_all(_gemms(args), lowering.CORES)
        return
    import triton

    if args.let_go:  # as the driver does by default
        triton_scratch.keep = lambda: False  # type: ignore[assignment]
    environment = results.environment()
    environment["versions"]["triton"] = triton.__version__
    head = {
        "experiment": "triton_candidates",
        **environment,
        "candidates": {name: candidate.sizes for name, candidate in CANDIDATES.items()},
        "options": {name: getattr(args, name) for name in OPTIONS},
    }

    def save(summary: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        if args.out:
            results.write(args.out, {**head, "summary": summary}, rows)

    cores = int(getattr(jax.devices()[0], "core_count", None) or lowering.CORES)
    for label, found in compare(args, cores, save).items():
        print(
            label, *(f"{value:.3f} {name}" for name, value in found["of_xla"].items()), sep="\n  "
        )


if __name__ == "__main__":
    main()
