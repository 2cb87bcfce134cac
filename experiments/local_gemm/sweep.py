"""A search for the configuration of each local Hopper matrix product, beside XLA's, on one GPU.

Run on a machine with a Hopper GPU, from the repository's root::

  python -m experiments.local_gemm.sweep --out experiments/results/local_gemm_sweep.json
  python -m experiments.local_gemm.sweep --adopt experiments/results/local_gemm_sweep.json

Each shape is a process. All compile at once; then one after the other checks every candidate, times
them and XLA in turn on the busy device, and the best of them in bursts too. What is best in both is
then measured again, in blocks of its own: those are the ratios that count. ``--adopt`` needs no GPU
and writes what was chosen into the tuned configurations.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common import check, lowering, processes, results, shapes, timing
from experiments.local_gemm import run
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu as kernel
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu_config as config_module
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu_split as split_module
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import Limits, MatmulConfig
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_operands import Operands

BASES = {
    "128x256": MatmulConfig(),
    "256x192": MatmulConfig(tile_m=256, tile_n=192, stages=3, epilogue_slots=3, group=8),
    "128x224": MatmulConfig(tile_n=224, epilogue_n=32, cluster_m=2, group=8, k_snake=8),
    "128x192": MatmulConfig(tile_n=192, k_snake=8),
    "128x128": MatmulConfig(tile_n=128, stages=6, k_snake=8),
}
"""Tiles, from the one that loads least for what it computes."""
WASTE = 1.04  # times the fewest cycles of any candidate, at most
LARGE = ("128x256", "256x192")  # tried in more ways
FINALISTS = 3
BUSY, BURSTS = "busy", "bursts"
BLOCK_MS = 20.0  # of a block on the busy device, at least
IDLE_SECONDS, BURST_CALLS = 0.1, 20
TASK_SECONDS, STAGE = 45.0, "sweep"


def cycles(config: MatmulConfig, gemm: shapes.Gemm, sms: int) -> float:
    """Elements of the output that one SM computes, one after the other."""
    tiles, workers = math.prod(config.tiles(gemm.m, gemm.n)), max(sms // config.cluster, 1)
    split = config.split_last and split_module.divided_tiles(tiles, workers)
    waves = tiles / workers if split else -(-tiles // workers)
    return waves * config.tile_m * config.tile_n


def variants(name: str, config: MatmulConfig) -> dict[str, MatmulConfig]:
    """A base as it is, with its warpgroups one after the other, with its last tiles divided."""
    staggered = dataclasses.replace(config, stagger=min(config.stages - 2, 2))
    found = {name: config, f"{name} stagger": staggered}
    if name in LARGE:
        found |= {
            f"{key} split": dataclasses.replace(one, split_last=True) for key, one in found.items()
        }
        found[f"{name} stagger snake"] = dataclasses.replace(staggered, k_snake=128 // config.group)
    if not config.overlaps(jnp.bfloat16):
        found[f"{name} unlent"] = dataclasses.replace(config, lends_stage=False)
    return found


def candidates(gemm: shapes.Gemm, limits: Limits, without: Sequence[str]) -> dict[str, Any]:
    """Configurations that suit a product, by name, and the one that is tuned now."""
    x, w = run.shapes_of(gemm)
    operands = Operands(x, w, jax.ShapeDtypeStruct((gemm.m, gemm.n), jnp.bfloat16))
    least = min(cycles(config, gemm, limits.sms) for config in BASES.values())
    found: dict[str, MatmulConfig] = {"tuned": run.tuned(gemm)}
    fewest = math.inf
    for name, base in BASES.items():
        if name not in LARGE and cycles(base, gemm, limits.sms) >= fewest:
            continue  # it loads more, too
        fewest = min(fewest, cycles(base, gemm, limits.sms))
        for key, config in variants(name, base).items():
            if cycles(config, gemm, limits.sms) > WASTE * least:
                continue
            fitted = config.fit(limits.shared_memory, jnp.bfloat16, jnp.bfloat16)
            suits = kernel.unsupported_reason(operands, fitted, limits) is None
            if suits and fitted not in found.values() and not any(w in key for w in without):
                found[key] = fitted
    return found


def speedups(
    functions: dict[str, Callable[..., jax.Array]], inputs: Any, regime: str, ms: float, rounds: int
) -> dict[str, float]:
    """How many times as fast as XLA each is, by medians, and XLA's microseconds."""
    calls = (
        max(3, math.ceil(BLOCK_MS / ms)) if regime == BUSY else BURST_CALLS // (2 if ms > 1 else 1)
    )
    pause = 0.0 if regime == BUSY else IDLE_SECONDS
    seconds = timing.interleaved_seconds(
        functions, inputs, rounds=rounds, calls=calls, pause=pause, seed=rounds
    )
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    found = {name: round(medians["xla"] / each, 4) for name, each in medians.items()}
    return found | {"xla": round(medians["xla"] * 1e6, 2)}


def best(measured: Sequence[dict[str, float]]) -> list[str]:
    """Names by their mean over what was measured, best first."""
    names = set.intersection(*map(set, measured)) - {"xla"}
    mean = {name: statistics.geometric_mean(each[name] for each in measured) for name in names}
    return sorted(names, key=lambda name: (-mean[name], name))


def search(gemm: shapes.Gemm, args: argparse.Namespace) -> dict[str, Any]:
    """A row of results for one product."""
    configs = candidates(gemm, Limits.of(jax.devices()[0]), args.without)
    shaped = run.shapes_of(gemm)
    begun = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        compiled = {
            name: pool.submit(
                jax.jit(functools.partial(kernel.matmul, config=config)).lower(*shaped).compile
            )
            for name, config in configs.items()
        }
    functions: dict[str, Any] = {name: made.result() for name, made in compiled.items()}
    functions["xla"] = jax.jit(lambda x, w: x @ w)
    inputs = [run.operands(gemm, seed) for seed in range(2)]
    jax.block_until_ready(inputs)
    compile_seconds = round(time.perf_counter() - begun, 1)
    processes.wait_turn()

    wrong: dict[str, str] = {}
    for name in list(functions):
        try:
            check.checked_error(f"{gemm.name} {name}", functions[name](*inputs[0]), *inputs[0])
        except ValueError as error:
            wrong[name] = str(error)
            del functions[name]
    ms = gemm.flops / 700e12 * 1e3
    some = functools.partial(speedups, inputs=inputs, ms=ms)
    busy = some(functions, regime=BUSY, rounds=args.rounds)
    finalists = dict.fromkeys(["xla", "tuned", *best([busy])[:FINALISTS]])
    bursts = some({n: functions[n] for n in finalists}, regime=BURSTS, rounds=args.rounds)
    winner = best([busy, bursts])[0]
    final = {name: functions[name] for name in dict.fromkeys(["xla", "tuned", winner])}
    again = {
        BUSY: some(final, regime=BUSY, rounds=2 * args.rounds),
        BURSTS: some(final, regime=BURSTS, rounds=args.rounds + 1),
    }
    errors = {
        name: check.checked_error(f"{gemm.name} {name}", function(*inputs[1]), *inputs[1])
        for name, function in final.items()
    }
    return {
        **dataclasses.asdict(gemm),
        "winner": winner,
        "speedup": {regime: each[winner] for regime, each in again.items()},
        "config": changes(configs[winner]),
        "search": {BUSY: busy, BURSTS: bursts},
        "again": again,
        "errors": errors,
        "wrong": wrong,
        "compile_seconds": compile_seconds,
    }


def changes(config: MatmulConfig) -> dict[str, Any]:
    """What a configuration has that is not the default."""
    default = dataclasses.asdict(MatmulConfig())
    return {key: v for key, v in dataclasses.asdict(config).items() if v != default[key]}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means and least of the ratios that were measured again."""
    found: dict[str, Any] = {}
    rows = [row for row in rows if "winner" in row]
    for regime in (BUSY, BURSTS) if rows else ():
        for who in ("winner", "tuned"):
            ratios = [
                row["again"][regime][row["winner"] if who == "winner" else who] for row in rows
            ]
            mean = round(statistics.geometric_mean(ratios), 4)
            found[f"{regime} {who}"] = {"geomean": mean, "least": min(ratios), "shapes": len(rows)}
    return found


def adopt(path: pathlib.Path) -> None:
    """Writes the configurations that a sweep chose where the library finds them."""
    swept = json.loads(path.read_text())
    kind = swept["device"].split("x ", 1)[1]
    file = pathlib.Path(config_module.__file__).with_name(config_module.TUNED_FILE)
    tuned = json.loads(file.read_text())
    entries = {(e["m"], e["n"], e["k"]): e for e in tuned.get(kind, [])}
    for row in swept["rows"]:
        if "winner" in row:
            sizes = {letter: row[letter] for letter in "mnk"}
            entries[row["m"], row["n"], row["k"]] = {**sizes, "config": row["config"]}
    tuned[kind] = [entries[key] for key in sorted(entries)]
    devices = (
        f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(e)}" for e in listed) + "\n  ]"
        for name, listed in tuned.items()
    )
    file.write_text("{\n" + ",\n".join(devices) + "\n}\n")


def lower(gemm: shapes.Gemm, args: argparse.Namespace) -> None:
    """Lowers a product's candidates where there is no GPU."""
    memory = config_module.HOPPER_SHARED_MEMORY
    for name, config in candidates(gemm, Limits(lowering.CORES, memory), args.without).items():
        product = functools.partial(kernel.matmul, config=config, num_sms=lowering.CORES)
        processes.emit(lowering.lowered(f"{gemm.name} {name}", product, run.shapes_of(gemm)))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--adopt", type=pathlib.Path, help="take what this file says was chosen")
    parser.add_argument("--all", action="store_true", help="all shapes, not the twelve named ones")
    parser.add_argument("--only", default="", help="only shapes whose name contains this")
    parser.add_argument("--without", nargs="*", default=[], help="no candidate named so, in part")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of a search; a check has twice these"
    )
    parser.add_argument("--seconds", type=float, default=500, help="for all")
    parser.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    parser.add_argument("--shape", help="this one, in this process")
    args = parser.parse_args(argv)
    if args.adopt:
        adopt(args.adopt)
        return {}
    gemms = shapes.local_gemms() if args.all or args.shape else shapes.named_gemms()
    chosen = [gemm for gemm in gemms if args.only in gemm.name and args.shape in (None, gemm.name)]
    if args.lower:
        for gemm in chosen:
            lower(gemm, args)
        return {}
    if args.shape:
        processes.emit(search(chosen[0], args))
        return {}
    if not args.out:
        parser.error("--out says where the results go")
    head = {"experiment": "local_gemm_sweep", **processes.environment()}
    head |= {"options": {"rounds": args.rounds, "without": args.without}}
    found = results.Results(args.out, head, summary)
    options = (
        "--rounds",
        str(args.rounds),
        *(("--without", *args.without) if args.without else ()),
    )
    module = "experiments.local_gemm.sweep"
    tasks = tuple(
        processes.Task(
            gemm.name, module, ("--shape", gemm.name, *options), TASK_SECONDS, processes.SHARING
        )
        for gemm in chosen
    )
    processes.run(processes.Stage(STAGE, tasks), found, time.monotonic() + args.seconds)
    return found.head


if __name__ == "__main__":
    main()
