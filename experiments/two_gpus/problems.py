"""What is run on two GPUs: operators, problems by importance, and options to try, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from syncopate_jax.ops import (
    all_gather_matmul,
    all_to_all_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from syncopate_jax.options import Launch

SMALL_FLOPS = 3e11  # two H200s take some 250 microseconds, about as long as a call's host work


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator, by the index of the dimension of x [m, k], w [k, n] and y [m, n] that ranks
    share; None where each has the whole.

    Attributes:
      divided: which of m, k, n is divided among the ranks in the local product.
    """

    name: str
    function: Callable[..., jax.Array]
    x: int | None
    w: int | None
    y: int | None
    divided: str
    options: dict[str, Any] = field(default_factory=dict)


GATHER = Operator("all_gather_matmul", all_gather_matmul, 0, 1, 1, "n")
SCATTER = Operator("matmul_reduce_scatter", matmul_reduce_scatter, 1, 0, 0, "k")
REDUCE = Operator("matmul_all_reduce", matmul_all_reduce, 1, 0, None, "k")
TO_ROWS = Operator("all_to_all_matmul", all_to_all_matmul, 1, None, 0, "m")
TO_COLUMNS = Operator("matmul_all_to_all", matmul_all_to_all, 0, None, 1, "m")
OPERATORS = (
    GATHER,
    SCATTER,
    REDUCE,
    TO_ROWS,
    TO_COLUMNS,
    Operator("all_gather_matmul of k", all_gather_matmul, 1, 1, 1, "n", {"dimension": "k"}),
    Operator(
        "all_gather_matmul of w's k",
        all_gather_matmul,
        0,
        0,
        0,
        "m",
        {"gathered": "w", "dimension": "k"},
    ),
    Operator(
        "all_gather_matmul of w's n",
        all_gather_matmul,
        0,
        1,
        0,
        "m",
        {"gathered": "w", "dimension": "n"},
    ),
    Operator("matmul_reduce_scatter of n", matmul_reduce_scatter, 1, 0, 1, "k", {"scatter": "n"}),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """The whole product of all ranks: x [m, k], w [k, n]."""

    name: str
    operator: Operator
    m: int
    k: int
    n: int

    @property
    def mkn(self) -> tuple[int, int, int]:
        return self.m, self.k, self.n

    def local(self, ranks: int) -> tuple[int, int, int]:
        """One rank's product."""
        return tuple(
            size // ranks if letter == self.operator.divided else size
            for letter, size in zip("mkn", self.mkn, strict=True)
        )  # type: ignore[return-value]

    @property
    def flops(self) -> int:
        """Of all ranks."""
        return 2 * self.m * self.k * self.n

    @property
    def small(self) -> bool:
        """Whether it is timed inside a longer program too: alone, it waits for the host."""
        return self.flops <= SMALL_FLOPS


def _problems() -> tuple[Problem, ...]:
    found = []
    models = (("llama3-8b", 4096, 14336), ("llama3-70b", 8192, 28672))
    for name, hidden, ffn in models:
        for m in (4096, 8192):
            found += [
                Problem(f"{name}/ffn_in", GATHER, m, hidden, 2 * ffn),
                Problem(f"{name}/ffn_out", SCATTER, m, ffn, hidden),
                Problem(f"{name}/ffn_out", REDUCE, m, ffn, hidden),
                Problem(f"{name}/attn_out", TO_ROWS, m, hidden, hidden),
                Problem(f"{name}/attn_in", TO_COLUMNS, m, hidden, hidden),
            ]
    found.insert(5, Problem("jax's row", GATHER, 2048, 4096, 8192))
    for m in (512, 1024, 2048):
        if m != 2048:
            found.append(Problem("llama3-8b/small", GATHER, m, 4096, 8192))
        found.append(Problem("llama3-8b/ffn_out", SCATTER, m, 14336, 4096))
        found.append(Problem("llama3-8b/ffn_out", REDUCE, m, 14336, 4096))
    found.append(Problem("qwen2-72b/ffn_in", GATHER, 8192, 8192, 2 * 29568))
    found.append(Problem("qwen2-72b/ffn_out", SCATTER, 8192, 29568, 8192))
    found.append(Problem("qwen2-72b/ffn_out", REDUCE, 8192, 29568, 8192))
    return tuple(found)


PROBLEMS = _problems()
TINY = (
    Problem("tiny", GATHER, 64, 32, 64),
    Problem("tiny", SCATTER, 64, 64, 32),
    Problem("tiny", TO_ROWS, 64, 32, 32),
)
BARRIER, TRITON = "barrier", "triton"
BACKENDS = ("tma_dedicated", "ldst_dedicated", "tma_colocated", "ldst_colocated", "copy_engine")


def options(label: str) -> dict[str, Any]:
    """What a label of a version means: ``colocated``, ``copy_engine /4`` with a split, ``dedicated
    8/1`` with the CTAs that only communicate and a split; ``barrier``: ranks do not greet. Before
    it ``triton``: a Triton kernel, which loads and stores."""
    target, _, rest = label.partition(" ")
    if target == TRITON:
        found = options(rest)
        name = found["backend"].replace("tma_", "ldst_")
        return found | {"target": TRITON, "backend": name}
    name, *words = label.split()
    barrier = BARRIER in words
    count, _, split = next((word for word in words if word != BARRIER), "").partition("/")
    found: dict[str, Any] = {"backend": name if name == "copy_engine" else f"tma_{name}"}
    if count or barrier:
        communicating = int(count) if count else None
        found["launch"] = Launch(communicating=communicating, device_barrier=barrier)
    if split:
        found["split"] = int(split)
    return found


def _labels(problem: Problem) -> tuple[str, ...]:
    """Versions to time; those that are known to be slow are left out.

    Small problems have four dedicated CTAs: on 128 of 132 multiprocessors their tiles, often 128,
    take one turn.
    """
    if problem.operator is GATHER:
        if problem.small:
            return "copy_engine", "dedicated 4/2", "dedicated 8/1"
        return "dedicated 2/1", "copy_engine"
    if problem.operator is TO_ROWS:
        return "copy_engine /4", "dedicated 4/4"
    if problem.operator is TO_COLUMNS:
        return ("colocated",) if problem.small else ("colocated", "dedicated 4/4")
    if problem.operator in (SCATTER, REDUCE) and problem.small:
        return "colocated", "dedicated 4/2"
    if problem.operator is SCATTER:
        return "colocated", "dedicated 4/4", "dedicated 4/2"
    return ("colocated",)


def choices(
    problem: Problem, barriers: bool = False, target: str = "mosaic_gpu"
) -> dict[str, dict[str, Any]]:
    """Options to time, by label; ``barriers``: of small problems also with XLA's barrier."""
    if target == TRITON:
        names = (
            "dedicated",
            "colocated",
            *(("copy_engine",) if problem.operator is GATHER else ()),
        )
        return {f"{TRITON} {name}": options(f"{TRITON} {name}") for name in names}
    labels = list(_labels(problem))
    if barriers and problem.small:
        labels += [f"{label} {BARRIER}" for label in labels if "copy_engine" not in label]
    return {label: options(label) for label in labels}
