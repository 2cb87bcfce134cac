"""What was measured on two GPUs: the rows a machine is fitted to, and those that are predicted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.common import results
from experiments.two_gpus import link, measure, problems
from experiments.two_gpus.problems import Problem
from syncopate_jax.ir.machine import Machine
from syncopate_jax.registry import operators

LINKS = "two_gpus_h200_sixth.json"  # the newest has a row that no link can reach
BARRIER = 7.8e-6  # seconds of XLA's barrier before kernels of older runs, the median of a profile
RESULTS = results.ROOT / "experiments" / "results"
RANKS = 2
COPIERS = {
    "copy engine, one way": "copy engine",
    "tma, both ways": "tma",
    "ldst, both ways": "ldst",
}
# Parts of the names of kernels in a profile of XLA's unfused program.
KERNELS = {
    "nvjet": "product kernel",
    "gemm_fusion": "product kernel",
    "ncclDevKernel": "collective kernel",
    "transpose_fusion": "rearranging kernel",
}
FUSED = "mosaic_gpu_kernel"  # likewise, of our own
INSIDE = f"{measure.REPEATS} x "


@dataclass(frozen=True, slots=True)
class Run:
    """One file of results whose fused kernels launched as many CTAs as today's.

    Attributes:
      tiles: of every fused kernel in it; None for those that the library takes today.
      least: seconds below which a call that was timed alone says nothing of its device: other
        processes, which waited for their turn, had the host's cores.
      barrier: seconds of the barrier between devices before each kernel that talks to peers, in the
        median of its profiles; ranks that greet have none.
      lag: share of a tile after which dedicated CTAs were told of the one before.
    """

    file: str
    tiles: dict[str, int] | None = None
    least: float = 0.0
    barrier: float = 0.0
    lag: float | None = None


RUNS = (
    Run("two_gpus_h200.json"),
    Run(
        "two_gpus_h200_third.json",
        tiles={"m": 128, "n": 256},
        least=3e-4,
        barrier=BARRIER,
        lag=0.75,
    ),
)
BY_FILE = {run.file: run for run in RUNS}
FILES = tuple(BY_FILE)


@dataclass(frozen=True, slots=True)
class Bare:
    """One time of a product, an exchange or a link alone.

    Attributes:
      file: that it is from.
      what: ``product``, ``product inside`` (a long program), ``exchange``, or how a link was used:
        by the clock; ``product kernel``, ``collective kernel``, ``rearranging kernel``: on the
        device, from the profile of XLA's unfused program; ``call kernels``: what is beside the
        fused kernel in the profile of a version that talks to peers, and not that kernel.
      problem: None of a link.
      size: bytes that a rank receives, of an exchange or a link.
      ctas: that copied, 0 where none does.
      calls: of a timed block.
      seconds: measured, of one call.
      in_a_row: exchanges of a link in one program, of which ``seconds`` is one.
    """

    file: str
    what: str
    problem: Problem | None
    size: int
    ctas: int
    calls: int
    seconds: float
    in_a_row: int = 1

    def predicted(self, machine: Machine) -> float:
        """Seconds by the figures of ``machine``."""
        if self.problem is None:
            return self._link(machine)
        what, calls, size = self.what, self.calls, self.size
        kind = kind_of(self.problem)
        product = machine.product(*self.problem.local(RANKS))
        held = size * RANKS // (RANKS - 1)
        if what == "product":
            return machine.timed(product, machine.host_product, calls)
        if what == "product inside":
            return inside(machine, product, self.problem, calls)
        if what == "exchange":
            exchange = machine.exchange(kind, size, held)
            return machine.timed(exchange, machine.host_exchange, calls)
        return {
            "call kernels": machine.call_seconds,
            "product kernel": product,
            "collective kernel": machine.collective(kind, size),
            "rearranging kernel": held / machine.rearrange_bandwidth,
        }[what]

    def _link(self, machine: Machine) -> float:
        if self.what == "copy engine":
            device = machine.copy_engine_latency + self.size / machine.link_bandwidth
            return machine.timed(device, 0.0, self.calls)
        one, most = {
            "tma": (machine.copy_unit_cta_bandwidth, machine.copy_unit_bandwidth),
            "ldst": (machine.load_store_cta_bandwidth, machine.load_store_bandwidth),
        }[self.what]
        beside = machine.call_seconds + BARRIER + machine.copier_seconds
        device = beside + self.size / min(self.ctas * one, most)
        busy = device * self.in_a_row
        return machine.timed(busy, machine.host_exchange, self.calls) / self.in_a_row


@dataclass(frozen=True, slots=True)
class Timed:
    """One time of an operator: a fused one's, or XLA's.

    Attributes:
      file: that it is from.
      label: of the options, as in ``problems.options``, or ``xla``.
      inside: whether it ran several times in one program.
      seconds: measured, of one operator.
    """

    file: str
    problem: Problem
    label: str
    inside: bool
    calls: int
    seconds: float


def inside(machine: Machine, device: float, problem: Problem, calls: int) -> float:
    """Seconds of one of several in a program, of what takes ``device`` seconds alone.

    Its product is slowed as much as a product alone, whatever the device does beside.
    """
    many = measure.REPEATS
    product = machine.product(*problem.local(RANKS))
    hot = machine.sustained(product, problem.flops / RANKS) - product
    busy = many * (device + hot + machine.between_seconds)
    return machine.timed(busy, machine.host_exchange, calls) / many


def problem_of(row: dict[str, Any]) -> Problem:
    """The problem of a row of results."""
    operator = next(o for o in problems.OPERATORS if o.name == row["operator"])
    return Problem(row["name"], operator, row["m"], row["k"], row["n"])


def kind_of(problem: Problem) -> str:
    """The kind of a problem's exchange."""
    return operators.get(problem.operator.name).kind


def received(problem: Problem, ranks: int) -> int:
    """Bytes that a rank receives in the exchange of a problem, in bfloat16."""
    m, k, n = problem.mkn
    whole = {"all_gather_matmul": m * k, "all_to_all_matmul": m * k // ranks}
    whole |= {"matmul_reduce_scatter": m * n, "matmul_all_reduce": 2 * m * n}
    whole |= {"matmul_all_to_all": m * n // ranks}
    return 2 * whole[problem.operator.name] * (ranks - 1) // ranks


def read(runs: Sequence[Run] = RUNS) -> tuple[list[Bare], list[Timed]]:
    """All rows of the results, but for those that say nothing of a device."""
    bare: list[Bare] = []
    timed: list[Timed] = []
    for row in _rows(LINKS, "link"):
        if row.get("by") in COPIERS:  # else how the task ended
            what, seconds = COPIERS[row["by"]], row["median_us"] * 1e-6
            given = row["bytes"], row.get("ctas", 0), link.CALLS, seconds
            bare.append(Bare(LINKS, what, None, *given, in_a_row=row.get("in_a_row", 1)))
    for run in runs:
        for row in _rows(run.file, "speed"):
            if "median_us" in row:
                _read_speed(run, row, bare, timed)
    return bare, timed


def _rows(file: str, stage: str) -> Iterator[dict[str, Any]]:
    found = json.loads((RESULTS / file).read_text())["rows"]
    return (row for row in found if row["stage"] == stage)


def _read_speed(run: Run, row: dict[str, Any], bare: list[Bare], timed: list[Timed]) -> None:
    file, problem, calls = run.file, problem_of(row), row["calls"]
    size = received(problem, RANKS)

    def add(what: str, us: float) -> None:
        bare.append(Bare(file, what, problem, size, 0, calls, us * 1e-6))

    for label, kernels in row.get("device_us", {}).items():
        if label == "xla":
            for kernel, us in kernels.items():
                for what in (what for name, what in KERNELS.items() if name in kernel):
                    add(what, us)
        elif not (label.startswith("copy_engine") or run.barrier):
            add("call kernels", sum(us for kernel, us in kernels.items() if FUSED not in kernel))
    alone = {"gemm": "product", f"{INSIDE}gemm": "product inside", "exchange": "exchange"}
    left_out = f"{INSIDE}exchange"  # nothing of XLA's in a program is told apart
    for label, median in row["median_us"].items():
        inside = label.startswith(INSIDE)
        seconds = median * 1e-6 / (measure.REPEATS if inside else 1)
        if not inside and seconds < run.least:
            continue
        if label in alone:
            add(alone[label], seconds * 1e6)
        elif not (label.startswith("jax ") or label == left_out or problems.BARRIER in label):
            name = label.removeprefix(INSIDE)
            timed.append(Timed(file, problem, name, inside, calls, seconds))
