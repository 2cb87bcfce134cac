"""What each piece of the machinery costs: the fused kernel with one of them left out at a time.

Ranks are folded onto one GPU, so that links play no part. What is left out makes results wrong, and
only the whole kernel's are checked; times are of the device at work, inputs alternating. A line of
JSON a kernel; ``--table FILE`` turns the rows of a result file into the docs' table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from experiments.common import lowering, processes, timing
from experiments.two_gpus import correct, problems, programs
from experiments.two_gpus.problems import Operator, Problem
from experiments.two_gpus.programs import Ranks
from syncopate_jax.backends.gpu_copy import Copier
from syncopate_jax.backends.gpu_places import Places
from syncopate_jax.backends.gpu_signals import Signals
from syncopate_jax.options import Launch
from syncopate_jax.pallas_kernels import contraction_mosaic_gpu, matmul_mosaic_gpu

MKN, TINY = (8192, 4096, 4096), (64, 64, 64)
WHOLE, LOCAL = "all", "local kernel"
CASES = (
    (problems.GATHER, "tma_dedicated"),
    (problems.GATHER, "ldst_dedicated"),
    (problems.SCATTER, "tma_dedicated"),
    (problems.SCATTER, "tma_colocated"),
    (problems.SCATTER, "ldst_colocated"),
)


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Nothing is waited for."""
    with mock.patch.object(Signals, "wait", lambda *_, **__: None):
        yield


@contextlib.contextmanager
def no_signals() -> Iterator[None]:
    """Nothing is raised; waits are there and find what they wait for."""
    honest = Signals.wait

    def wait(self: Signals, slot: Any, count: Any, *where: Any, **named: Any) -> None:
        honest(self, slot, 0, *where, **named)

    with (
        mock.patch.object(Signals, "signal", lambda *_: None),
        mock.patch.object(Signals, "wait", wait),
    ):
        yield


@contextlib.contextmanager
def no_sends() -> Iterator[None]:
    """Nothing is copied to a peer, nor a tile stored there; what says that it was is raised."""
    honest = Places._store

    def store(self: Any, key: Any, rank: Any, starts: Any, use: Any) -> None:
        if self.own_only:
            honest(self, key, rank, starts, use)
        else:
            pl.when(rank == self.table.row)(lambda: honest(self, key, rank, starts, use))

    with (
        mock.patch.object(Copier, "_copy", lambda *_: None),
        mock.patch.object(Places, "_store", store),
    ):
        yield


@contextlib.contextmanager
def nothing_but_table() -> Iterator[None]:
    """The order of tiles is the table's, and no more."""
    with no_sends(), no_waits(), mock.patch.object(Signals, "signal", lambda *_: None):
        yield


LEFT_OUT: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    WHOLE: contextlib.nullcontext,
    "no waits": no_waits,
    "no signals": no_signals,
    "no sends": no_sends,
    "table only": nothing_but_table,
}


def fused(problem: Problem, ranks: Ranks, backend: str, tiny: bool) -> Any:
    launch = Launch(sms=lowering.CORES)
    given = {"backend": backend, "target": "mosaic_gpu", "launch": launch}
    return programs.program(problem, ranks, {"backend": "xla"} if tiny else given)


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel: what is left out while it is lowered, and its program."""

    left_out: Callable[[], contextlib.AbstractContextManager[None]]
    fn: Any
    problem: Problem
    ranks: Ranks

    @property
    def shapes(self) -> tuple[Any, ...]:
        return programs.operands(self.problem, self.ranks, jnp.bfloat16)


def kernels(operator: Operator, backend: str, args: argparse.Namespace) -> dict[str, Variant]:
    """Variants of a fused kernel by what they lack."""
    ranks = Ranks(args.ranks, True)
    problem = Problem("machinery", operator, *(TINY if args.tiny else MKN))
    return {
        label: Variant(context, fused(problem, ranks, backend, args.tiny), problem, ranks)
        for label, context in LEFT_OUT.items()
    }


def of_one_rank(args: argparse.Namespace) -> dict[str, Variant]:
    """The local kernel in its own order, and one rank's fused kernel, which has but the table."""
    m, k, n = TINY if args.tiny else MKN
    problem, ranks = Problem("machinery", problems.SCATTER, m, k, n), Ranks(1, True)
    sizes = {"m": m, "k": k, "n": n}
    _, config = contraction_mosaic_gpu.choose_config(
        "mn", sizes, {}, "bfloat16", False, workers=lowering.CORES
    )

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        if args.tiny:
            return x @ w
        product = matmul_mosaic_gpu.matmul(x[0], w[0], config=config, num_sms=lowering.CORES)
        return product[None]

    tabled = fused(problem, ranks, "tma_colocated", args.tiny)
    found = {LOCAL: jax.jit(local), "table only": tabled}
    return {
        label: Variant(contextlib.nullcontext, fn, problem, ranks) for label, fn in found.items()
    }


def measure(
    name: dict[str, Any], variants: dict[str, Variant], built: dict[str, Any], args: Any
) -> dict[str, Any]:
    """One row: the median time of each kernel in microseconds; the first one's values count."""
    first = next(iter(variants.values()))
    problem, ranks = first.problem, first.ranks
    pairs = [
        tuple(ranks.random(s, 2 * i + j) for j, s in enumerate(first.shapes)) for i in range(2)
    ]
    found = correct.whole(next(iter(built.values()))(*pairs[0]), problem.operator.y, ranks)
    x, w = (
        correct.whole(a, d, ranks)
        for a, d in zip(pairs[0], (problem.operator.x, problem.operator.w), strict=True)
    )
    error = correct.off(found[:256], x[:256] @ w)
    row: dict[str, Any] = {**name, **dict(zip("mkn", problem.mkn, strict=True))}
    row |= {"worst": float(f"{error:.2e}"), "wrong": int(not error <= correct.LIMIT)}
    seconds = timing.interleaved_seconds(built, pairs, rounds=args.rounds, calls=args.calls)
    medians = {label: statistics.median(values) * 1e6 for label, values in seconds.items()}
    return row | {"median_us": {label: round(us, 1) for label, us in medians.items()}}


def table(path: pathlib.Path) -> str:
    """The docs' table from a result file: time of the whole, and what goes with each piece."""
    rows = [r for r in json.loads(path.read_text())["rows"] if r["stage"] == "machinery"]
    labels = [label for label in LEFT_OUT if label != WHOLE]
    lines = ["| operator, backend | " + " | ".join([f"{WHOLE}, us", *labels]) + " |"]
    lines.append("|---" * (len(labels) + 2) + "|")
    for row in rows:
        if WHOLE not in row.get("median_us", {}):
            continue
        times = row["median_us"]
        cells = [f"{times[label] / times[WHOLE] - 1:+.1%}" for label in labels]
        name = f"`{row['operator']}`, `{row['backend']}`"
        lines.append(f"| {name} | {times[WHOLE]:.0f} | " + " | ".join(cells) + " |")
    for row in rows:
        if LOCAL in row.get("median_us", {}):
            times = row["median_us"]
            over = times["table only"] / times[LOCAL] - 1
            lines += ["", f"One rank: {times[LOCAL]:.0f} us in the local kernel's own order,"]
            lines.append(f"{over:+.1%} in the table's.")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=pathlib.Path, help="print the table of this result file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=20, help="in a timed block")
    parser.add_argument("--tiny", action="store_true", help="by XLA, without a GPU")
    parser.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    args = parser.parse_args(argv)
    if args.table:
        print(table(args.table))
        return []
    groups: list[tuple[dict[str, Any], dict[str, Variant]]] = [
        ({"operator": o.name, "backend": b}, kernels(o, b, args)) for o, b in CASES
    ]
    groups.append(({"operator": "one rank", "backend": "tma_colocated"}, of_one_rank(args)))
    rows: list[dict[str, Any]] = []
    compiling: list[dict[str, Any]] = []
    with ThreadPoolExecutor(12) as pool:
        for name, variants in groups:
            compiling.append({})
            for label, variant in variants.items():
                with variant.left_out():  # a kernel's text is made when it is lowered
                    jax.clear_caches()
                    if args.lower:
                        said = f"{name['operator']} {name['backend']} {label}"
                        rows.append(lowering.lowered(said, variant.fn, variant.shapes))
                        processes.emit(rows[-1])
                    else:
                        lowered = variant.fn.lower(*variant.shapes)
                        compiling[-1][label] = pool.submit(lowered.compile)
    if args.lower:
        return rows
    processes.wait_turn()
    for (name, variants), futures in zip(groups, compiling, strict=True):
        built = {label: future.result() for label, future in futures.items()}
        rows.append(measure(name, variants, built, args))
        processes.emit(rows[-1])
    return rows


if __name__ == "__main__":
    main()
