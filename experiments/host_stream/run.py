"""Host streaming: a matrix product beside the copy of its operand from pinned host memory.

Checks values first, then times, in one run: the streamed product, its copy alone, its kernel alone,
and one after the other, ours and XLA's; brought in by the copy engine or by CTAs that read. Needs
one Hopper GPU. A line of JSON a variant; ``--out`` writes them to a file::

  python -m experiments.host_stream.run --pause 0.02 --out experiments/results/host_stream.json

``--busy`` has each variant run for some time before it is timed, at the clock of a device that
never rests::

  python -m experiments.host_stream.run --busy 0.3 --calls 100 --out OUT.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.common import lowering, processes, results, timing
from syncopate_jax.native import copies
from syncopate_jax.ops import stream_matmul as op
from syncopate_jax.ops import stream_readers
from syncopate_jax.ops.stream_chunks import Pace, Rates, chunk_bounds
from syncopate_jax.ops.stream_readers import Arrival, Readers
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_kernel import CTA_AXIS, WARPGROUP_AXIS
from syncopate_jax.runtime import custom_call

SHAPE, TINY = (8192, 4096, 14336), (512, 128, 256)  # M, K, N
CONFIG = MatmulConfig()
WAYS: dict[str, int | None] = {"16 chunks": 16, "paced": None}  # None: sized by the rates
READ = {
    "4 readers": Readers(),
    "4 readers, no parts": Readers(parts=1),
    "4 readers, 8 parts": Readers(parts=8),
    "2 readers": Readers(ctas=2),
    "2 readers, no parts": Readers(ctas=2, parts=1),
    "2 readers, 8 parts": Readers(ctas=2, parts=8),
}
TURN = Fraction(16, 7)  # bands of x that keep 128 workers busy: 56 tiles are across
CALLS, SETS = 20, 2
WORST = 5e-3  # relative error that bf16 operands and results explain
Times = dict[str, list[float]]
Todo = dict[str, tuple[Callable[..., jax.Array], tuple[int, ...], bool]]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures here")
    parser.add_argument("--shape", nargs=3, type=int, default=SHAPE, metavar=("M", "K", "N"))
    parser.add_argument("--check-only", action="store_true", help="compare values, time nothing")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pause", type=float, default=0.0, help="idle seconds before each block")
    parser.add_argument("--busy", type=float, default=0.0, help="seconds of calls before a block")
    parser.add_argument("--calls", type=int, default=CALLS, help="of a block")
    parser.add_argument("--tiny", action="store_true", help="a tiny product, without a GPU")
    parser.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    args = parser.parse_args(argv)
    m, k, n = TINY if args.tiny else args.shape
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    sets = []
    for i in range(1 if args.lower else SETS):
        x, w = random((m, k), 2 * i), random((k, n), 2 * i + 1)
        wt = jnp.asarray(w.T)
        hosted = [jax.device_put(a, host) for a in (x, wt, w)]
        sets.append((x, w, hosted[0], wt, *hosted[1:]))
    jax.block_until_ready(sets)
    todo = variants((m, k, n), args.tiny)
    if args.lower:
        for name, (function, takes, _) in todo.items():
            processes.emit(lowering.lowered(name, function, [sets[0][i] for i in takes]))
        return {}
    sides = build(todo, sets[0])
    worst = check(sides, sets)
    processes.emit({"worst_relative_error": worst, "variants": len(sides)})
    looped = max(check_loop(sets, backend) for backend in op.BACKENDS)
    processes.emit({"worst_relative_error": looped, "inside": "lax.scan"})
    if args.check_only:
        return {}
    memory = in_use(device)
    times, cost = measure(sides, sets, args)
    check(sides, sets)
    cut = {f"stream x, {way}": np.diff(bounds_of((m, k, n), way)).tolist() for way in WAYS}
    rows = [
        {
            "variant": name,
            "median_us": round(statistics.median(seen) * 1e6, 1),
            "all_us": [round(t * 1e6, 1) for t in seen],
            **({"host_work_us": cost[name]} if name in cost else {}),
            **({"sizes": cut[name]} if name in cut else {}),
        }
        for name, seen in times.items()
    ]
    for row in rows:
        processes.emit(row)
    head = {
        "experiment": "host_stream",
        **results.environment(),
        "summary": summary(rows),
        "shape": {"m": m, "k": k, "n": n, "dtype": "bfloat16", "data": "normal"},
        "options": {n: getattr(args, n) for n in ("rounds", "pause", "busy", "calls")}
        | {"sets": SETS},
        "worst_relative_error": max(worst, looped),
        "device_bytes_grown": in_use(device) - memory,
    }
    print(head["summary"])
    if args.out:
        results.write(args.out, head, rows)
    return head


def in_use(device: jax.Device) -> int:
    """Bytes that arrays hold; 0 where the device does not say."""
    return int((device.memory_stats() or {}).get("bytes_in_use", 0))


def random(shape: tuple[int, int], seed: int) -> jax.Array:
    key = jax.random.key(seed, impl="rbg")
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(key)


@dataclasses.dataclass(frozen=True)
class Side:
    """One thing that is timed: a compiled function and which of the set it takes."""

    run: Callable[..., jax.Array]
    takes: tuple[int, ...]
    product: bool = True


def bounds_of(shape: Sequence[int], way: str) -> list[int]:
    """Where the chunks of x start, in tiles, and the end; ``way`` is of ``WAYS``."""
    m, k, n = shape
    tiles, tile, chunks = CONFIG.tiles(m, n), (CONFIG.tile_m, CONFIG.tile_n), WAYS[way]
    if chunks is not None:
        return chunk_bounds(tiles[0], chunks)
    return Pace.of(Rates(), tiles, tile, side=0, depth=k, itemsize=2, sms=_cores()).bounds()


def taken(shape: Sequence[int]) -> list[int]:
    """The bands of x that are multiplied together where CTAs read it: where each run starts."""
    m, k, n = shape
    tiles, tile = CONFIG.tiles(m, n), (CONFIG.tile_m, CONFIG.tile_n)
    sms = max(_cores() - Readers().ctas, 1)
    pace = Pace.of(op.READ, tiles, tile, side=0, depth=k, itemsize=2, sms=sms)
    arrival = Arrival.of(Readers(), CONFIG, (m, k), 2, side=0, axis=0, turn=pace.turn)
    return pace.taken(arrival.bounds, CONFIG.group)


def variants(shape: Sequence[int], tiny: bool) -> Todo:
    """Every variant by name: its function, which of the set it takes, and whether it multiplies."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    todo: Todo = {
        "gemm XLA": (lambda x, w: x @ w, (0, 1), True),
        "copy x XLA": (lambda x: jax.device_put(x, device), (2,), False),
        "copy x then gemm XLA": (lambda x, w: jax.device_put(x, device) @ w, (2, 1), True),
    }
    one = _copy_in([0, shape[0] // CONFIG.tile_m])
    todo["copy x, one chunk"] = one, (2,), False
    for way, chunks in WAYS.items():
        stream = functools.partial(op.stream_matmul, chunks=chunks)
        todo[f"stream x, {way}"] = stream, (2, 1), True
        todo[f"copy x, {way}"] = _copy_in(bounds_of(shape, way)), (2,), False
    for way, readers in READ.items():
        by = functools.partial(op.stream_matmul, backend="tma_dedicated", readers=readers)
        todo[f"stream x, {way}"] = by, (2, 1), True
    if tiny:  # our kernels run on a GPU alone; the streamed product has another form on the CPU
        return todo

    def gemm(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul_mosaic_gpu.matmul(x, w, config=CONFIG, num_sms=_cores())

    todo["gemm"] = gemm, (0, 1), True
    todo["copy x then gemm"] = lambda x, w: gemm(one(x), w), (2, 1), True
    todo["copy w XLA"] = lambda w: jax.device_put(w, device), (4,), False
    todo["copy w, one chunk"] = _copy_in([0, shape[2] // CONFIG.tile_m]), (4,), False
    for way, chunks in WAYS.items():
        ordered = functools.partial(_ordered, bounds=bounds_of(shape, way))
        todo[f"gemm in the order of {way}"] = ordered, (0, 1), True
        stream = functools.partial(op.stream_matmul, w_transposed=True, chunks=chunks)
        todo[f"stream w, {way}"] = stream, (0, 4), True
    by = functools.partial(op.stream_matmul, backend="tma_dedicated")
    todo["stream w, 4 readers"] = functools.partial(by, w_transposed=True), (0, 4), True
    todo["stream w [K, N], 4 readers"] = by, (0, 5), True
    for way in ("4 readers", "2 readers"):
        todo[f"copy x, {way}"] = functools.partial(_read_in, readers=READ[way]), (2,), False
    todo["copy w, 4 readers"] = functools.partial(_read_in, readers=READ["4 readers"]), (4,), False
    ordered = functools.partial(_ordered, bounds=taken(shape))
    todo["gemm in the order of 4 readers"] = ordered, (0, 1), True
    return todo


def build(todo: Todo, example: Sequence[jax.Array]) -> dict[str, Side]:
    """Compiles every variant, several at a time."""

    def compile_one(item: tuple[str, Any]) -> tuple[str, Side]:
        name, (function, takes, product) = item
        lowered = jax.jit(function).lower(*(example[i] for i in takes))
        return name, Side(lowered.compile(), takes, product)

    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(compile_one, todo.items()))


def _cores() -> int:
    return int(getattr(jax.devices()[0], "core_count", None) or lowering.CORES)


def _copy_in(bounds: Sequence[int]) -> Callable[[jax.Array], jax.Array]:
    """The streamed operand's copies, and nothing beside them; bounds of chunks in tiles of rows."""

    def copy(x: jax.Array) -> jax.Array:
        call = op.stream_call(x.shape, x.dtype.itemsize, bounds, CONFIG.tile_m, 0)
        call = dataclasses.replace(call, joined=True)
        type_ = jax.ShapeDtypeStruct(x.shape, x.dtype)
        (out,), raised = copies.start(call, copies.ALONE, [x], [type_])
        return copies.join([out], raised, [])[0]

    return copy


def _read_in(x: jax.Array, *, readers: Readers) -> jax.Array:
    """The streamed operand's copy by the CTAs that read it, and nothing beside them."""
    shape = (x.shape[0], x.shape[1])
    arrival = Arrival.of(readers, CONFIG, shape, 2, side=0, axis=0, turn=TURN)

    def kernel(source: Any, target: Any) -> None:
        stream_readers.read(readers, arrival, stream_readers.counters(arrival), source, target)

    out: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, x.dtype),
        grid=(readers.ctas,),
        grid_names=(CTA_AXIS,),
        num_threads=CONFIG.warpgroups + 1,
        thread_name=WARPGROUP_AXIS,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(custom_call.in_place(x))
    return out


def _ordered(x: jax.Array, w: jax.Array, *, bounds: Sequence[int]) -> jax.Array:
    """The kernel of the streamed product alone: its order and its waits, all flags up."""
    return matmul_mosaic_gpu.matmul(
        x,
        w,
        config=CONFIG,
        num_sms=_cores(),
        table=jnp.asarray(op.tile_table(CONFIG.tiles(x.shape[0], w.shape[1]), bounds, 0)),
        flags=jnp.ones(len(bounds) - 1, jnp.int32),
    )


@jax.jit
def _reference(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


@jax.jit
def _error(y: jax.Array, reference: jax.Array) -> jax.Array:
    off = y.astype(jnp.float32) - reference
    return jnp.sqrt(jnp.sum(off * off) / jnp.sum(reference * reference))


def check(sides: dict[str, Side], sets: Sequence[Sequence[jax.Array]]) -> float:
    """Worst relative error; inputs alternate, so that data of the last call would be noticed."""
    wanted = [(_reference(s[0], s[1]), s[0], s[1]) for s in sets]
    worst = 0.0
    for name, side in sides.items():
        for at, arrays in enumerate((*sets, *sets)):
            got = side.run(*(arrays[i] for i in side.takes))
            product, x, w = wanted[at % len(sets)]
            copied = x if side.takes[0] == 2 else w.T  # of those that do not multiply
            error = float(_error(got, product if side.product else copied.astype(jnp.float32)))
            if not error < (WORST if side.product else 1e-12):
                raise SystemExit(f"{name}: relative error {error} on input set {at}")
            worst = max(worst, error)
        processes.emit({"right": name})  # of a variant that hangs, this line is missing
    return worst


def check_loop(sets: Sequence[Sequence[jax.Array]], backend: str) -> float:
    """The operator inside ``lax.scan``, where one call site runs several times."""
    x_host, w = sets[0][2], sets[0][1]

    @jax.jit
    def loop(x_host: jax.Array, w: jax.Array, scales: jax.Array) -> jax.Array:
        def body(total: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
            y = op.stream_matmul(x_host, w * scale, backend=backend)
            return total + y.astype(jnp.float32), None

        zero = jnp.zeros((x_host.shape[0], w.shape[1]), jnp.float32)
        return jax.lax.scan(body, zero, scales)[0]

    got = loop(x_host, w, jnp.array([1, 2, -1, 4], jnp.bfloat16))
    error = float(_error(got, 6 * _reference(sets[0][0], w)))
    if not error < WORST:
        raise SystemExit(f"{backend} in a loop: relative error {error}")
    return error


def measure(
    sides: dict[str, Side], sets: Sequence[Sequence[jax.Array]], args: argparse.Namespace
) -> tuple[Times, dict[str, dict[str, float]]]:
    """Seconds a call, in rounds over all variants; and the handlers' host work of each."""
    times: Times = {name: [] for name in sides}
    cost = {}
    order = list(sides)
    for turn in range(args.rounds):
        np.random.default_rng(turn).shuffle(order)
        for name in order:
            side = sides[name]
            given = [tuple(arrays[i] for i in side.takes) for arrays in sets]
            out = side.run(*given[0])
            out = side.run(*given[1]).block_until_ready()
            time.sleep(args.pause)
            timing.keep_busy(side.run, given, args.busy)
            copies.take_cost()
            begun = time.perf_counter()
            for call in range(args.calls):
                out = side.run(*given[call % SETS])
            out.block_until_ready()
            times[name].append((time.perf_counter() - begun) / args.calls)
            seen = copies.take_cost()
            if seen["start_calls"]:
                cost[name] = {key: seen[key] for key in ("start_work_us", "start_most_us")}
    return times, cost


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every streamed product against its bound; the best one against copy-then-product."""
    medians = {row["variant"]: row["median_us"] for row in rows if "variant" in row}
    alone = {n: t for n, t in medians.items() if "in the order" not in n}
    then = {n: t for n, t in alone.items() if "then" in n}
    first = {n: t for n, t in alone.items() if n not in then}
    best: dict[str, tuple[float, str]] = {}
    for kind in ("stream x", "copy x", "copy w", "gemm", "copy x then gemm"):
        found = [(t, n) for n, t in (then if "then" in kind else first).items() if kind in n]
        if not found:
            return {}
        best[kind] = min(found)
    gemm, stream = best["gemm"][0], best["stream x"][0]
    return {
        "best": {kind: name for kind, (_, name) in best.items()},
        "over_max_of_copy_and_gemm": {
            name: round(t / max(best[f"copy {operand}"][0], gemm), 4)
            for operand in "xw"
            for name, t in first.items()
            if name.startswith(f"stream {operand}")
        },
        "copy_then_gemm_over_stream": round(best["copy x then gemm"][0] / stream, 4),
        "copy_then_gemm_xla_over_stream": round(medians["copy x then gemm XLA"] / stream, 4),
    }


if __name__ == "__main__":
    main()
