"""Every operator with one backend against float64, while ranks come late and memory is poisoned.

A process a backend, under a time limit; a line of JSON an operator. Run by ``run.py`` on devices of
their own, by ``experiments.hopper.run`` on ranks folded onto one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.common import lowering, processes
from experiments.two_gpus import problems, programs
from experiments.two_gpus.problems import GATHER, REDUCE, SCATTER, TO_ROWS, Operator, Problem
from experiments.two_gpus.programs import AXIS, Ranks
from syncopate_jax.errors import SyncopateError
from syncopate_jax.options import Launch
from syncopate_jax.runtime.folded import fold

LIMIT = 5e-3
POISON = 2**27  # elements of float32 on each device: more than a problem's buffers
LATE = 100  # rounds of a loop whose condition the host reads: some milliseconds in all
MKN = (200, 136, 192)  # of one rank; cuts tiles raggedly along all three
GRADED = (200, 144, 192)
"""Gradients read operands across: the tensor cores then want rows of a multiple of 32 bytes."""
WHOLE_TILES = (256, 136, 256)
STORES_TILES = (("mosaic_gpu", "ldst_colocated"),)
"""Backends whose tiles are stored from registers: whole ones, at peers, and nothing is gathered."""


def late_and_summed(problem: Problem, ranks: Ranks, options: dict[str, Any]) -> Any:
    """The operator between a loop that makes one rank late and an independent sum over ranks."""
    operator = problem.operator
    fn = programs.one_rank(operator, options)

    def one(x: jax.Array, w: jax.Array, late: jax.Array) -> tuple[jax.Array, jax.Array]:
        count = jnp.where(lax.axis_index(AXIS) == late, LATE, 0)
        value = lax.fori_loop(0, count, lambda _, v: jnp.sin(v) + 1, jnp.ones((128,)))
        x = x + (value[0] * 0).astype(x.dtype)
        return fn(x, w), lax.psum(jnp.sum(x.astype(jnp.float32)), AXIS)

    if ranks.folded:
        return jax.jit(jax.vmap(one, in_axes=(0, 0, None), axis_name=AXIS))
    specs = (ranks.spec(operator.x), ranks.spec(operator.w), jax.P())
    outs = (ranks.spec(operator.y), jax.P())
    return jax.jit(
        jax.shard_map(one, mesh=ranks.mesh, in_specs=specs, out_specs=outs, check_vma=False)
    )


def gradients(problem: Problem, ranks: Ranks, options: dict[str, Any]) -> Any:
    """Both gradients, given the operands and a cotangent."""
    if ranks.folded:  # inside, see ``fold``
        fn = programs.one_rank(problem.operator, options)
        return jax.jit(fold(lambda x, w, ct: jax.vjp(fn, x, w)[1](ct), AXIS))
    whole = programs.program(problem, ranks, options)
    return jax.jit(lambda x, w, ct: jax.vjp(whole, x, w)[1](ct))


def shapes_of(problem: Problem, ranks: Ranks, graded: bool) -> tuple[Any, ...]:
    """What a check's program takes."""
    shapes: tuple[Any, ...] = programs.operands(problem, ranks, jnp.bfloat16)
    if graded:
        result = ranks.shape((problem.m, problem.n), problem.operator.y, jnp.bfloat16)
        return (*shapes, result)
    return (*shapes, jax.ShapeDtypeStruct((), jnp.int32))


def poison(ranks: Ranks) -> None:
    """Leaves NaN in the memory that the next call gets."""
    filled = [
        jax.device_put(jnp.full((POISON,), jnp.nan), device)
        for device in jax.devices()[: 1 if ranks.folded else ranks.count]
    ]
    jax.block_until_ready(filled)
    for array in filled:
        array.delete()


def whole(array: jax.Array, dimension: int | None, ranks: Ranks) -> np.ndarray:
    """All ranks' parts as one array in float64."""
    found = np.asarray(array, np.float64)
    if not ranks.folded:
        return found
    return found[0] if dimension is None else np.concatenate(list(found), axis=dimension)


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    """Error relative to what is wanted, infinite where there is none."""
    error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    return error if error == error else float("inf")


def call_error(
    run: Any, problem: Problem, ranks: Ranks, arrays: Sequence[jax.Array], seed: int
) -> float:
    """The relative error of one call, infinite where the sum beside it is wrong."""
    operator, (x, w) = problem.operator, arrays
    poison(ranks)
    y, total = run(x, w, np.int32(seed % (ranks.count + 1)))
    exact = whole(x, operator.x, ranks) @ whole(w, operator.w, ranks)
    sums, given = np.asarray(total, np.float64).ravel(), np.asarray(x, np.float64)
    right = np.abs(sums - given.sum()).max() <= 1e-4 * np.abs(given).sum()
    return off(whole(y, operator.y, ranks), exact) if right else float("inf")


def gradients_error(run: Any, problem: Problem, ranks: Ranks, arrays: Sequence[jax.Array]) -> float:
    """The larger relative error of the two gradients."""
    poison(ranks)
    found = [np.asarray(a, np.float64) for a in run(*arrays)]
    if ranks.folded:  # each rank's own share of them: what JAX's own collectives give
        with jax.enable_x64(True):
            exact = gradients(problem, ranks, {"backend": "xla"})
            wanted = exact(*(jnp.asarray(a, jnp.float64) for a in arrays))
    else:
        x, w, ct = (np.asarray(a, np.float64) for a in arrays)
        wanted = ct @ w.T, x.T @ ct
    return max(off(a, np.asarray(b)) for a, b in zip(found, wanted, strict=True))


def check(problem: Problem, ranks: Ranks, run: Any, calls: int, graded: bool) -> dict[str, Any]:
    """Errors of calls with other values each."""
    operator, errors = problem.operator, []
    shapes = shapes_of(problem, ranks, graded)
    for seed in range(calls):
        arrays = [ranks.random(s, 10 * seed + i) for i, s in enumerate(shapes) if s.ndim]
        if operator.w is None and ranks.folded:
            arrays[1] = jnp.broadcast_to(arrays[1][:1], arrays[1].shape)
        if graded:
            errors.append(gradients_error(run, problem, ranks, arrays))
        else:
            errors.append(call_error(run, problem, ranks, arrays, seed))
    wrong = sum(not error <= LIMIT for error in errors)
    return {"wrong": wrong, "worst": float(f"{max(errors):.2e}")}


def soaked(options: dict[str, Any], ranks: Ranks, calls: int, even: bool) -> Any:
    """Two operators by turns, in one program, each call with other inputs; the worst error."""
    count = ranks.count
    second = TO_ROWS if options["backend"] == "copy_engine" else SCATTER
    depth = 384 * count if second is TO_ROWS else 384
    pair, left, rights = (GATHER, second), (200, 256), ((256, 384), (depth, 256))
    if even:
        pair, left, rights = (SCATTER, REDUCE), (256 * count, 128), ((128, 256), (128, 256))

    def worse(so_far: jax.Array, operator: Operator, x: jax.Array, w: jax.Array) -> Any:
        found = programs.one_rank(operator, options)(x, w)
        wanted = programs.one_rank(operator, {"backend": "xla"})(x, w)
        difference = found.astype(jnp.float32) - wanted.astype(jnp.float32)
        error = jnp.linalg.norm(difference) / jnp.linalg.norm(wanted.astype(jnp.float32))
        return jnp.maximum(so_far, jnp.where(jnp.isnan(error), jnp.inf, error)), found

    def one(key: jax.Array) -> jax.Array:
        def step(so_far: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            own = jax.random.split(jax.random.fold_in(key, lax.axis_index(AXIS)), 3)
            x, w, v = (
                jax.random.normal(k, s, jnp.bfloat16)
                for k, s in zip(own, (left, *rights), strict=True)
            )
            if second is TO_ROWS:  # every rank has all of it
                v = jax.random.normal(key, rights[1], jnp.bfloat16)
            so_far, hidden = worse(so_far, pair[0], x, w)
            so_far, _ = worse(so_far, pair[1], x if even else hidden, v)
            return so_far, None

        keys = jax.random.split(key, calls)
        return lax.pmax(lax.scan(step, jnp.float32(0), keys)[0], AXIS)

    if ranks.folded:
        run = jax.vmap(lambda _, key: one(key), in_axes=(0, None), axis_name=AXIS)
        return jax.jit(lambda key: run(jnp.arange(count), key)[0])
    mapped = jax.shard_map(
        one, mesh=ranks.mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    return jax.jit(mapped)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--backend", required=True)
    found.add_argument("--target", default="mosaic_gpu")
    found.add_argument("--ranks", type=int, default=2)
    found.add_argument("--folded", action="store_true", help="all ranks on one device")
    found.add_argument("--operators", nargs="*", default=None, help="names; by default all")
    found.add_argument("--calls", type=int, default=4, help="of each operator")
    found.add_argument("--gradients", action="store_true", help="check them, not the values")
    found.add_argument("--soak", type=int, default=0, help="calls of each of two operators")
    found.add_argument("--late-us", type=int, default=0, help="ranks begin late by up to this")
    found.add_argument("--watchdog-us", type=int, default=0, help="give up waits after this")
    found.add_argument("--sms", type=int, help="multiprocessors to use")
    found.add_argument("--even", action="store_true", help="sizes that cut no tile")
    found.add_argument("--tiny", action="store_true", help="tiny sizes by XLA, without a GPU")
    found.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    return found


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The operators' options."""
    if args.tiny or args.backend == "xla":
        return {"backend": "xla"}
    launch = Launch(sms=args.sms, late_us=args.late_us, watchdog_us=args.watchdog_us)
    return {"backend": args.backend, "target": args.target, "launch": launch}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parser().parse_args(argv)
    ranks, options, rows = Ranks(args.ranks, args.folded), asked(args), []
    even = args.even or (args.target, args.backend) in STORES_TILES
    usual = GRADED if args.gradients else MKN
    sizes = (16, 16, 16) if args.tiny else WHOLE_TILES if even else usual
    mkn = tuple(size * args.ranks for size in sizes)
    common = {"target": args.target, "backend": args.backend, "ranks": args.ranks}
    common |= {"late_us": args.late_us} if args.late_us else {}
    built: list[tuple[Problem | None, dict[str, Any], Any, Any]] = []
    if args.soak:
        row = {"operator": "two by turns", **common, "calls": 2 * args.soak}
        run = soaked(options, ranks, args.soak, (args.target, args.backend) in STORES_TILES)
        built.append((None, row, run, (jax.eval_shape(lambda: jax.random.key(0)),)))
    for operator in problems.OPERATORS if args.calls else ():
        if args.operators is None or operator.name in args.operators:
            problem = Problem("correct", operator, *mkn)
            row = {"operator": operator.name, **common, **dict(zip("mkn", mkn, strict=True))}
            row |= {"calls": args.calls} | ({"of": "gradients"} if args.gradients else {})
            make = gradients if args.gradients else late_and_summed
            shapes = shapes_of(problem, ranks, args.gradients)
            built.append((problem, row, make(problem, ranks, options), shapes))
    with ThreadPoolExecutor(8) as pool:
        pending = []
        for problem, row, fn, shapes in built:
            if args.lower:
                rows.append(lowering.lowered(str(row["operator"]), fn, shapes) | row)
                processes.emit(rows[-1])
                continue
            try:
                pending.append((problem, row, pool.submit(fn.lower(*shapes).compile)))
            except SyncopateError as error:
                rows.append(row | {"refused": str(error)[-300:]})
                processes.emit(rows[-1])
        for problem, row, future in pending:
            try:
                if problem is None:
                    worst = float(future.result()(jax.random.key(0)))
                    row |= {"wrong": int(not worst <= LIMIT), "worst": float(f"{worst:.2e}")}
                else:
                    row |= check(problem, ranks, future.result(), args.calls, args.gradients)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            rows.append(row)
            processes.emit(row)
    return rows


if __name__ == "__main__":
    main()
