"""Every operator with one backend against float64, while ranks come late and memory is poisoned.

Run by ``run.py``, a process a backend, under a time limit; a line of JSON an operator.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.two_gpus import problems, programs
from experiments.two_gpus.problems import GATHER, SCATTER, Operator, Problem
from experiments.two_gpus.programs import AXIS, Ranks
from syncopate_jax.errors import SyncopateError
from syncopate_jax.options import Launch

LIMIT = 5e-3
POISON = 2**27  # elements of float32 on each device: more than a problem's buffers
LATE = 3000  # rounds of a loop that takes about a microsecond each


def checked(problem: Problem, ranks: Ranks, options: dict[str, Any]) -> Any:
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


def check(
    operator: Operator, backend: str, ranks: Ranks, mkn: tuple[int, int, int], calls: int
) -> dict[str, Any]:
    """One line of the results."""
    problem = Problem("correct", operator, *mkn)
    row: dict[str, Any] = {"operator": operator.name, "backend": backend}
    row |= dict(zip("mkn", mkn, strict=True)) | {"calls": calls}
    options: dict[str, Any] = {"backend": backend}
    if backend not in ("copy_engine", "xla"):
        options["launch"] = Launch(watchdog_us=5_000_000)
    try:
        run = checked(problem, ranks, options)
        worst, wrong = 0.0, 0
        for seed in range(calls):
            shapes = programs.operands(problem, ranks, jnp.bfloat16)
            x, w = (ranks.random(s, 10 * seed + i) for i, s in enumerate(shapes))
            if operator.w is None and ranks.folded:
                w = jnp.broadcast_to(w[:1], w.shape)
            poison(ranks)
            y, total = run(x, w, jnp.int32(seed % (ranks.count + 1)))
            exact = whole(x, operator.x, ranks) @ whole(w, operator.w, ranks)
            error = np.linalg.norm(whole(y, operator.y, ranks) - exact) / np.linalg.norm(exact)
            sums = np.asarray(total, np.float64).ravel()
            expected = np.asarray(x, np.float64).sum()
            off = np.abs(sums - expected).max() / np.abs(np.asarray(x, np.float64)).sum()
            wrong += not (error <= LIMIT and off <= 1e-4)
            worst = max(worst, float(error)) if error == error else float("inf")
        row |= {"wrong": wrong, "worst": float(f"{worst:.2e}")}
    except SyncopateError as error:
        row["refused"] = str(error).splitlines()[-1][:300]
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    return row


def soak(backend: str, ranks: Ranks, calls: int) -> dict[str, Any]:
    """Two operators by turns, in one program, each call with other inputs, all compared."""
    row: dict[str, Any] = {"operator": "gather and scatter by turns", "backend": backend}
    row["calls"] = 2 * calls
    given = {"backend": backend, "target": "mosaic_gpu"}

    def worse(so_far: jax.Array, found: jax.Array, wanted: jax.Array) -> jax.Array:
        found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
        off = jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)
        return jnp.maximum(so_far, jnp.where(jnp.isnan(off), jnp.inf, off))

    def one(key: jax.Array) -> jax.Array:
        def step(so_far: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            keys = jax.random.split(jax.random.fold_in(key, lax.axis_index(AXIS)), 3)
            x = jax.random.normal(keys[0], (200, 256), jnp.bfloat16)
            up = jax.random.normal(keys[1], (256, 384), jnp.bfloat16)
            down = jax.random.normal(keys[2], (384, 256), jnp.bfloat16)
            hidden = GATHER.function(x, up, axis_name=AXIS, **given)
            so_far = worse(so_far, hidden, GATHER.function(x, up, axis_name=AXIS, backend="xla"))
            if backend != "copy_engine":
                out = SCATTER.function(hidden, down, axis_name=AXIS, **given)
                exact = SCATTER.function(hidden, down, axis_name=AXIS, backend="xla")
                so_far = worse(so_far, out, exact)
            return so_far, None

        keys = jax.random.split(key, calls)
        return lax.pmax(lax.scan(step, jnp.float32(0), keys)[0], AXIS)

    if ranks.folded:
        run = jax.vmap(lambda _, key: one(key), in_axes=(0, None), axis_name=AXIS)
        found = jax.jit(lambda key: run(jnp.arange(ranks.count), key)[0])(jax.random.key(0))
    else:
        mapped = jax.shard_map(
            one, mesh=ranks.mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
        )
        found = jax.jit(mapped)(jax.random.key(0))
    row["worst"] = float(f"{float(found):.2e}")
    row["wrong"] = int(not float(found) <= LIMIT)
    return row


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folded", action="store_true", help="all ranks on one device")
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--soak", type=int, default=1000, help="calls of each of two operators")
    parser.add_argument("--mkn", type=int, nargs=3, default=(200, 136, 192), help="of one rank")
    args = parser.parse_args(argv)
    ranks = Ranks(args.ranks, args.folded)
    found = []
    for operator in problems.OPERATORS:
        mkn = tuple(size * args.ranks for size in args.mkn)
        if args.backend == "ldst_colocated":  # it stores whole tiles
            mkn = 256 * args.ranks, mkn[1], 256 * args.ranks
        found.append(check(operator, args.backend, ranks, mkn, args.calls))
        print(json.dumps(found[-1]), flush=True)
    if args.soak and args.backend in ("tma_dedicated", "tma_colocated", "copy_engine"):
        found.append(soak(args.backend, ranks, args.soak))
        print(json.dumps(found[-1]), flush=True)
    return found


if __name__ == "__main__":
    main()
