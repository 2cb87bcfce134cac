"""The link between two GPUs: copy engine, copy unit (TMA) and loads and stores, by size and CTAs.

Run by ``run.py``; a line of JSON a point. Both GPUs send at once, as the operators do, but for the
copy engine's one-way rows, whose times have the host's work for a call in them; the others are of
exchanges in a row inside one program.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.common import lowering, processes
from experiments.two_gpus.programs import AXIS, Ranks
from syncopate_jax.backends.gpu_copy import Part
from syncopate_jax.backends.gpu_ldst import LdstMover
from syncopate_jax.backends.gpu_tma import TmaMover

COLUMNS = 4096
WARPGROUPS = 3
ROUNDS, CALLS = 5, 10
TIMES = 9  # exchanges in one program; odd, so that each has the other's data at the end
PIECES = {"tma": (32, 256), "ldst": (1, 4096, 8)}


def push(kind: str, ctas: int, rows: int) -> Callable[[jax.Array], jax.Array]:
    """Each rank's [rows, COLUMNS] into its peer's memory, by ``ctas`` CTAs."""
    mover: Any = TmaMover() if kind == "tma" else LdstMover()
    piece: Any = PIECES[kind]
    down, across = rows // piece[0], COLUMNS // piece[1]
    dtype = jnp.dtype(jnp.bfloat16)

    def body(src: Any, dst: Any) -> None:
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        me = lax.axis_index(AXIS)

        def side(ref: Any) -> Any:
            def at(number: Any, use: Any) -> None:
                row = lax.div(number, jnp.int32(across)) * piece[0]
                use(ref, row, lax.rem(number, jnp.int32(across)) * piece[1])

            return at

        def far(number: Any, use: Any) -> None:
            for rank in range(2):

                @pl.when(me != rank)
                def _(rank: int = rank) -> None:
                    side(plgpu.remote_ref(dst, {AXIS: rank}))(number, use)

        def run(**scratch: Any) -> None:
            first, stride = cta * WARPGROUPS + wg, jnp.int32(ctas * WARPGROUPS)
            part = Part(first, stride, down * across, side(src), far)
            mover.run(scratch, wg, part, piece, dtype)

        scratch: dict[str, Any] = {}
        if kind == "tma":
            shape = (WARPGROUPS, mover.stages, *piece)
            scratch = {
                f"smem_{dtype}": plgpu.SMEM(shape, dtype),
                "loaded": plgpu.Barrier(num_barriers=WARPGROUPS * mover.stages),
            }
        pl.run_scoped(run, collective_axes="wg", **scratch)
        pl.semaphore_signal(arrived, device_id={AXIS: 1 - me})

        @pl.when((cta == 0) & (wg == 0))
        def _() -> None:
            pl.semaphore_wait(arrived, ctas * WARPGROUPS, decrement=False)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, COLUMNS), dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )


def in_a_row(exchange: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """``exchange`` ``TIMES`` times, each of what the one before has brought."""

    def run(x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (exchange(x), None), x, None, length=TIMES)[0]

    return run


def seconds(fn: Callable[[], Any]) -> float:
    """Median time of a call among blocks of calls."""
    jax.block_until_ready(fn())
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            result = fn()
        jax.block_until_ready(result)
        found.append((time.perf_counter() - begin) / CALLS)
    return statistics.median(found)


def report(row: dict[str, Any], size: int, taken: float) -> None:
    row |= {"bytes": size, "median_us": round(taken * 1e6, 1)}
    processes.emit(row | {"gb_per_s": round(size / taken / 1e9, 1)})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    args = parser.parse_args(argv)
    ranks = Ranks(2, False)
    points = [("tma", ctas, 8192) for ctas in (1, 2, 4, 8, 16, 32)]
    points += [("tma", 8, rows) for rows in (128, 512, 2048)]
    points += [("ldst", ctas, 8192) for ctas in (4, 16, 64)]
    pool = ThreadPoolExecutor(8)
    pending = []
    for kind, ctas, rows in points:
        like = ranks.shape((2 * rows, COLUMNS), 0, jnp.bfloat16)
        spec = ranks.spec(0)
        fn = jax.jit(
            jax.shard_map(
                in_a_row(push(kind, ctas, rows)),
                mesh=ranks.mesh,
                in_specs=spec,
                out_specs=spec,
                check_vma=False,
            )
        )
        if args.lower:
            processes.emit(lowering.lowered(f"{kind}, {ctas} CTAs, {rows} rows", fn, (like,)))
        else:
            pending.append((kind, ctas, like, pool.submit(fn.lower(like).compile)))
    if args.lower:
        return
    processes.wait_turn()
    for size in (2**16, 2**20, 2**22, 2**24, 2**26, 2**28):
        x = jax.device_put(jnp.ones((size // 2,), jnp.bfloat16), jax.devices()[0])
        taken = seconds(lambda x=x: jax.device_put(x, jax.devices()[1]))
        report({"by": "copy engine, one way"}, size, taken)
    for kind, ctas, like, future in pending:
        x = ranks.random(like, 0)
        compiled = future.result()
        y = compiled(x)
        right = bool(jnp.all(y[: like.shape[0] // 2] == x[like.shape[0] // 2 :]))
        taken = seconds(lambda compiled=compiled, x=x: compiled(x)) / TIMES
        row = {"by": f"{kind}, both ways", "ctas": ctas, "right": right, "in_a_row": TIMES}
        report(row, like.shape[0] * COLUMNS, taken)
    permute = in_a_row(lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]))
    for rows in (128, 2048, 8192):
        x = ranks.random(ranks.shape((2 * rows, COLUMNS), 0, jnp.bfloat16), 0)
        swap = jax.jit(ranks.over(lambda x, _: permute(x), 0, 0, 0))
        taken = seconds(lambda swap=swap, x=x: swap(x, x)) / TIMES
        row = {"by": "XLA's permute, both ways", "in_a_row": TIMES}
        report(row, rows * COLUMNS * 2, taken)


if __name__ == "__main__":
    main()
