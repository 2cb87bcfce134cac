"""Triton kernels on one GPU: local products, rewritten ones, host streaming, folded ranks.

Run from the repository's root, one part a process (a kernel that hangs ends with its process); a
line of JSON a row, as it is done::

  timeout 120 python -m experiments.triton.run folded --out experiments/results/triton_folded.json
  timeout 200 python -m experiments.triton.run gemm --out experiments/results/triton_gemm.json
  timeout 100 python -m experiments.triton.run stream --out experiments/results/triton_stream.json
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import check, lowering, processes, results, shapes, timing
from syncopate_jax.backends import triton_call
from syncopate_jax.backends.triton_ordered import OrderedTriton
from syncopate_jax.kernel.tiles import fewest_workers
from syncopate_jax.ops import all_gather_matmul, matmul_reduce_scatter, stream_matmul
from syncopate_jax.ops.stream_chunks import Pace, Rates, chunk_bounds
from syncopate_jax.options import Launch
from syncopate_jax.pallas_kernels import matmul_triton
from syncopate_jax.pallas_kernels.matmul_triton import MatmulConfig
from syncopate_jax.runtime.folded import fold

CONFIGS = {
    "128x256": MatmulConfig(group=8, num_stages=4, persistent=False),
    "128x128 two a processor": MatmulConfig(128, 128, group=8, num_warps=4, persistent=False),
    "128x256 persistent": MatmulConfig(num_stages=4, flat=False),
    "128x256 persistent, flat": MatmulConfig(),
    "128x256 described": MatmulConfig(num_stages=4, described=True, flat=False),
    "128x256 described, flat": MatmulConfig(num_stages=4, described=True),
    "128x256 described, flat, 3 stages": MatmulConfig(described=True, parts=1),
    "128x256 late": MatmulConfig(described=True, late=2),
}
USUAL = "usual"  # what a shape's product has by default
TINY = (shapes.Gemm("tiny", 1024, 512, 1536),)
CHUNKS = 8
# Bytes a second: all chunks are there once the first is multiplied, or each comes only then.
LINKS = {"flags": 1e15, "flags, one by one": 1.0}
WORST = 5e-3  # relative error that bfloat16 operands and results explain
AXIS = "ranks"


def compile_all(
    todo: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]],
    lower: bool = False,
    threads: int = 12,
) -> dict[str, Callable[..., Any]]:
    """Compiled functions, several at a time; what does not compile is reported and left out.

    With ``lower`` they are only lowered, and none is returned.
    """
    if lower:
        for name, (function, example) in todo.items():
            processes.emit(lowering.lowered(name, function, example))
        return {}

    def one(item: tuple[str, tuple[Callable[..., Any], Sequence[Any]]]) -> tuple[str, Any]:
        name, (function, example) = item
        try:
            return name, jax.jit(function).lower(*example).compile()
        except Exception as error:  # a configuration too large for the device, say
            print(f"{name}: {str(error)[:300]}", flush=True)
            return name, None

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return {name: found for name, found in pool.map(one, todo.items()) if found is not None}


def _cores() -> int:
    return int(getattr(jax.devices()[0], "core_count", None) or lowering.CORES)


def local(gemm: shapes.Gemm, config: MatmulConfig, sms: int) -> Callable[..., jax.Array]:
    """The kernel as it was written."""
    rows, columns = config.tiles(gemm.m, gemm.n)
    grid = fewest_workers(rows * columns, sms) if config.walks else rows * columns
    kernel = matmul_triton.matmul(gemm.m, gemm.k, gemm.n, "bfloat16", config, grid)
    return lambda x, w: triton_call.run_alone(kernel, x, w, grid=grid)[0]


def behind_flags(
    gemm: shapes.Gemm, config: MatmulConfig, sms: int, chunks: int, link: float
) -> Callable[..., jax.Array]:
    """The rewritten kernel, each chunk behind its flag, in streaming's order for such a link."""
    kernel = matmul_triton.matmul(gemm.m, gemm.k, gemm.n, "bfloat16", config, sms)
    tiles, tile = config.tiles(gemm.m, gemm.n), (config.block_m, config.block_n)
    rates = Rates(link=link, gap=0.0)
    pace = Pace.of(rates, tiles, tile, side=0, depth=gemm.k, itemsize=2, sms=sms)
    bounds = chunk_bounds(tiles[0], chunks)
    table = stream_matmul.tile_table(tiles, pace.taken(bounds, config.group), 0, bounds)
    ordered = OrderedTriton(kernel, table[:, :2], table[:, 2], fewest_workers(len(table), sms))
    return lambda x, w, flags: ordered(x, w, flags=flags)[0]


def operands(gemm: shapes.Gemm, seed: int) -> tuple[jax.Array, jax.Array]:
    x_key, w_key = jax.random.split(jax.random.key(seed, impl="rbg"))
    x = jax.random.normal(x_key, (gemm.m, gemm.k), jnp.bfloat16)
    return x, jax.random.normal(w_key, (gemm.k, gemm.n), jnp.bfloat16)


def config_of(name: str, gemm: shapes.Gemm, sms: int) -> MatmulConfig:
    """One of ``CONFIGS``, or what the shape's product has by default."""
    if name != USUAL:
        return CONFIGS[name]
    return MatmulConfig.usual((gemm.m, gemm.k, gemm.n), jnp.bfloat16, jnp.bfloat16, sms)


def form(config: MatmulConfig) -> str:
    """What sets a configuration apart, in a word."""
    return "late" if config.late else "described" if config.described else "flat"


def gemm_part(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """XLA's product, the kernel's in each configuration, and rewritten ones with all flags up."""
    sms = _cores()
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    gemms = TINY if args.tiny else shapes.named_gemms()
    names = args.configs.split(";")
    todo: dict[str, Any] = {}
    for gemm in gemms:
        configs = {name: config_of(name, gemm, sms) for name in names}
        example = (
            jax.ShapeDtypeStruct((gemm.m, gemm.k), jnp.bfloat16),
            jax.ShapeDtypeStruct((gemm.k, gemm.n), jnp.bfloat16),
        )
        flags = jax.ShapeDtypeStruct((CHUNKS,), jnp.int32)
        todo[f"{gemm.name} xla"] = (lambda x, w: x @ w, example)
        for name, config in configs.items():
            todo[f"{gemm.name} {name}"] = (local(gemm, config, sms), example)
        for name, config in configs.items():
            for kind, link in LINKS.items():
                run = behind_flags(gemm, config, sms, CHUNKS, link)
                todo[f"{gemm.name} {name}, {kind}"] = (run, (*example, flags))
    compiled = compile_all(todo, args.lower)
    if args.lower:
        return {"summary": {}}, []
    print(f"compiled {len(compiled)} of {len(todo)} in {time.perf_counter() - begun:.0f} s")
    up = jnp.ones((CHUNKS,), jnp.int32)
    for gemm in gemms:
        if time.perf_counter() - begun > args.seconds:
            print(f"out of time before {gemm.name}")
            break
        inputs = [operands(gemm, seed) for seed in range(2)]
        versions = {
            name.removeprefix(f"{gemm.name} "): run
            for name, run in compiled.items()
            if name.startswith(f"{gemm.name} ")
        }
        versions = {
            name: functools.partial(lambda run, x, w: run(x, w, up), run)
            if name.endswith(tuple(LINKS))
            else run
            for name, run in versions.items()
        }
        errors: dict[str, float] = {}
        for name, run in list(versions.items()):
            try:
                found = check.checked_error(f"{gemm.name} {name}", run(*inputs[0]), *inputs[0])
            except ValueError as error:
                print(f"WRONG {error}", flush=True)
                del versions[name]
            else:
                errors[name] = found[0]
        calls = max(10, int(6e-3 / (gemm.flops / 700e12)))
        seconds = timing.interleaved_seconds(
            versions, inputs, rounds=args.rounds, calls=calls, pause=args.pause
        )
        median = {n: statistics.median(v) * 1e6 for n, v in seconds.items()}
        alone = {n: t for n, t in median.items() if n in names}
        best = min(alone, key=alone.__getitem__)
        rows.append(
            {
                **dataclasses.asdict(gemm),
                "best": best,
                "usual": form(config_of(USUAL, gemm, sms)),
                "speedup": round(median["xla"] / alone[best], 4),
                "median_us": {n: round(t, 1) for n, t in median.items()},
                "worst_error": max(errors.values()),
                "calls": calls,
            }
        )
        processes.emit(rows[-1])
    return {"summary": gemm_summary(rows), "configs": _configs()}, rows


def _configs() -> dict[str, Any]:
    return {name: dataclasses.asdict(config) for name, config in CONFIGS.items()}


def gemm_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means: against XLA, and of flags that are up against no flags."""
    if not rows:
        return {}
    found: dict[str, Any] = {
        "speedup_geomean": statistics.geometric_mean(r["speedup"] for r in rows),
        "speedup_min": min(r["speedup"] for r in rows),
    }
    for name in (USUAL, *CONFIGS):
        ratios = [
            r["median_us"]["xla"] / r["median_us"][name] for r in rows if name in r["median_us"]
        ]
        if ratios:
            found[f"{name} against xla"] = statistics.geometric_mean(ratios)
        for kind in LINKS:
            over = [
                r["median_us"][f"{name}, {kind}"] / r["median_us"][name]
                for r in rows
                if f"{name}, {kind}" in r["median_us"] and name in r["median_us"]
            ]
            if over:
                found[f"{name}, {kind} over none"] = statistics.geometric_mean(over)
                found[f"{name}, {kind} over none, worst"] = max(over)
    return {n: round(v, 4) for n, v in found.items()}


# --- host streaming ----------------------------------------------------------------------------


def stream_part(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The product beside the copy of x from pinned host memory; its parts alone."""
    gemm = TINY[0] if args.tiny else shapes.Gemm("stream", 8192, 4096, 14336)
    device, sms = jax.devices()[0], _cores()
    config = config_of(USUAL, gemm, sms)
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    here = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    sets = [operands(gemm, seed) for seed in range(2)]
    hosted = [jax.device_put(x, host) for x, _ in sets]
    streamed = [(x, w) for x, (_, w) in zip(hosted, sets, strict=True)]
    stream = functools.partial(
        stream_matmul.stream_matmul, target="triton", config=config, num_sms=sms
    )
    # What each is given, a tuple an input set.
    versions: dict[str, tuple[Callable[..., jax.Array], list[tuple[jax.Array, ...]]]] = {
        "copy, XLA": (lambda x: jax.device_put(x, here), [(x,) for x in hosted]),
        "gemm, XLA": (lambda x, w: x @ w, sets),
        "gemm": (local(gemm, config, sms), sets),
        "stream, 16 chunks": (functools.partial(stream, chunks=16), streamed),
        "stream, paced": (stream, streamed),
    }
    todo = {name: (function, given[0]) for name, (function, given) in versions.items()}
    compiled = compile_all(todo, args.lower)
    if args.lower:
        return {"summary": {}}, []
    for name, run in compiled.items():
        for given, (x, w) in zip(versions[name][1], sets, strict=True):
            if len(given) == 2:  # a product
                check.checked_error(name, run(*given), x, w)
    found: dict[str, list[float]] = {name: [] for name in compiled}
    for turn in range(args.rounds):
        for name in np.random.default_rng(turn).permutation(list(compiled)).tolist():
            run, given = compiled[name], versions[name][1]
            time.sleep(args.pause)
            timing.keep_busy(run, given, args.busy)
            found[name].append(timing.block_seconds(run, given, args.calls))
    median = {name: statistics.median(v) * 1e6 for name, v in found.items()}
    best = min((t, n) for n, t in median.items() if "stream" in n)
    bound = max(median["copy, XLA"], min(median["gemm"], median["gemm, XLA"]))
    summary = {"best": best[1], "stream_over_bound": round(best[0] / bound, 4)}
    row: dict[str, Any] = {
        **dataclasses.asdict(gemm),
        "median_us": {n: round(t, 1) for n, t in median.items()},
    }
    row |= summary
    processes.emit(row)
    return {"summary": summary}, [row]


# --- folded ranks ------------------------------------------------------------------------------


def folded_part(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Right values first, ragged sizes and all; then times of one AG and one RS shape."""
    rows = []
    todo: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    if args.sweep:
        return _sweep()
    for ranks in (2, 4):
        for kind in ("AG", "RS"):
            timed = (256, 64, 128) if args.tiny else (8192, 4096, 4096)
            sizes = {"ragged": (200 * ranks, 136 * ranks, 192 * ranks), "timed": timed}
            for size, (m, k, n) in sizes.items():
                for target, backend in BACKENDS[-1:] if args.tiny else BACKENDS:
                    if size == "ragged" and target != "triton":
                        continue
                    name = f"{kind} W={ranks} {size} {target} {backend}"
                    todo[name] = _folded(kind, ranks, m, k, n, target, backend)
                    facts[name] = (kind, ranks, size, target, backend, m, k, n)
    compiled = compile_all(todo, args.lower)
    if args.lower:
        return {"summary": {}}, []
    wanted: dict[Any, jax.Array] = {}
    for name, run in compiled.items():
        kind, ranks, size, target, backend, m, k, n = facts[name]
        key = (kind, ranks, m)
        calls = 30 if size == "timed" else 4
        inputs = [_rows(kind, ranks, m, k, n, seed) for seed in range(2)]
        worst = 0.0
        for call in range(4):
            x, w = inputs[call % 2]
            if (*key, call % 2) not in wanted:
                wanted[*key, call % 2] = _exact(kind, x, w)
            worst = max(worst, float(_error(run(x, w), wanted[*key, call % 2])))
        if not worst < WORST:
            print(f"WRONG {name}: relative error {worst}", flush=True)
        row = {"case": name, "m": m, "k": k, "n": n, "ranks": ranks, "worst_error": worst}
        if size == "timed":
            times = [timing.block_seconds(run, inputs, calls) for _ in range(5)]
            row["median_us"] = round(statistics.median(times) * 1e6, 1)
        rows.append(row)
        processes.emit(row)
    right = all(row["worst_error"] < WORST for row in rows)
    return {"summary": {"all_right": right, "cases": len(rows), "asked": len(todo)}}, rows


def _sweep() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How many programs of a rank communicate."""
    m, k, n = 8192, 4096, 4096
    todo = {
        f"{kind} W=2 {count} communicating": _folded(
            kind, 2, m, k, n, "triton", "ldst_dedicated", communicating=count
        )
        for kind in ("AG", "RS")
        for count in (2, 8, 16)
    }
    rows = []
    for name, run in compile_all(todo).items():
        kind = name[:2]
        inputs = [_rows(kind, 2, m, k, n, seed) for seed in range(2)]
        worst = max(float(_error(run(*i), _exact(kind, *i))) for i in inputs)
        times = [timing.block_seconds(run, inputs, 30) for _ in range(5)]
        us = round(statistics.median(times) * 1e6, 1)
        rows.append({"case": name, "worst_error": worst, "median_us": us})
        processes.emit(rows[-1])
    return {"summary": {"all_right": all(r["worst_error"] < WORST for r in rows)}}, rows


BACKENDS = (
    ("triton", "ldst_dedicated"),
    ("triton", "ldst_colocated"),
    ("mosaic_gpu", "tma_dedicated"),
    ("mosaic_gpu", "tma_colocated"),
    ("mosaic_gpu", "ldst_dedicated"),
    ("mosaic_gpu", "ldst_colocated"),
    ("mosaic_gpu", "xla"),
)


def _folded(
    kind: str, ranks: int, m: int, k: int, n: int, target: str, backend: str, **launch: int
) -> tuple[Callable[..., jax.Array], Sequence[Any]]:
    operator = all_gather_matmul if kind == "AG" else matmul_reduce_scatter
    given = {"backend": backend} if backend == "xla" else {"backend": backend, "target": target}
    run = fold(lambda x, w: operator(x, w, axis_name=AXIS, launch=Launch(**launch), **given), AXIS)
    x, w = _shapes(kind, ranks, m, k, n)
    return run, [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (x, w)]


def _shapes(kind: str, ranks: int, m: int, k: int, n: int) -> tuple[Any, Any]:
    """m x k x n is the whole problem: AG cuts m and n, RS cuts k."""
    if kind == "AG":
        return (ranks, m // ranks, k), (ranks, k, n // ranks)
    return (ranks, m, k // ranks), (ranks, k // ranks, n)


def _rows(kind: str, ranks: int, m: int, k: int, n: int, seed: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed, impl="rbg"))
    made = zip(keys, _shapes(kind, ranks, m, k, n), strict=True)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in made]


@functools.partial(jax.jit, static_argnums=0)
def _exact(kind: str, x: jax.Array, w: jax.Array) -> jax.Array:
    wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    if kind == "AG":
        return wide("wmk,vkn->vwmn", x, w).reshape(len(w), -1, w.shape[-1])
    return wide("wmk,wkn->mn", x, w).reshape(len(x), -1, w.shape[-1])


@jax.jit
def _error(found: jax.Array, wanted: jax.Array) -> jax.Array:
    off = found.astype(jnp.float32) - wanted
    return jnp.sqrt(jnp.sum(off * off) / jnp.sum(wanted * wanted))


PARTS = {"gemm": gemm_part, "stream": stream_part, "folded": folded_part}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--configs", default=USUAL, help="names, semicolons between")
    parser.add_argument("--tiny", action="store_true", help="small problems")
    parser.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    parser.add_argument("--sweep", action="store_true", help="numbers of communicating programs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.03, help="idle seconds before each block")
    parser.add_argument("--busy", type=float, default=0.0, help="stream: calls before each block")
    parser.add_argument("--calls", type=int, default=20, help="stream: of a block")
    parser.add_argument("--seconds", type=float, default=150, help="measure no new shape after it")
    args = parser.parse_args(argv)
    import triton

    head, rows = PARTS[args.part](args)
    environment = results.environment()
    environment["versions"]["triton"] = triton.__version__
    options = {name: getattr(args, name) for name in ("rounds", "pause", "busy", "calls")}
    name = f"triton_{args.part}"
    head = {"experiment": name, **environment, **head, "options": options}
    if args.out:
        results.write(args.out, head, rows)
    print(head["summary"])


if __name__ == "__main__":
    main()
