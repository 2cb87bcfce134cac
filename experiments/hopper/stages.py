"""What is run on one GPU, most important first, as data.

Seconds are limits, some three times what a task is expected to take.
"""

from __future__ import annotations

from experiments.common.processes import SHARING, Stage, Task

CORRECT = "experiments.two_gpus.correct"
GPU_BACKENDS = ("tma_dedicated", "tma_colocated", "ldst_dedicated", "ldst_colocated")
PAIRS = (
    *(("mosaic_gpu", backend) for backend in GPU_BACKENDS),
    ("triton", "ldst_dedicated"),
    ("triton", "ldst_colocated"),
)
RANKS = (2, 3, 4, 8)
SOAK, LATE_SOAK, LATE_US = 2000, 300, 200
BRING, SEND = "all_gather_matmul", "matmul_all_reduce"
AT_ONCE = 12  # of sixteen cores, for tasks that are not timed
SANITIZER_SECONDS = 55


def _named(target: str, backend: str) -> tuple[str, ...]:
    return "--target", target, "--backend", backend


def _correct(name: str, pair: tuple[str, str], seconds: float, *more: object) -> Task:
    """A task of the correctness stage on folded ranks."""
    arguments = (*_named(*pair), "--folded", *map(str, more))
    return Task(f"{'/'.join(pair)} {name}", CORRECT, arguments, seconds, SHARING)


def _gathers(pair: tuple[str, str]) -> bool:
    """Whether the backend can do all operators and their gradients."""
    return pair != ("mosaic_gpu", "ldst_colocated")


def _sanitizer(tool: str, pair: tuple[str, str], operator: str) -> Task:
    arguments = ("--tool", tool, *_named(*pair), "--operators", operator)
    arguments += ("--limit", str(SANITIZER_SECONDS - 10))
    name = f"{'/'.join(pair)} {operator} {tool}"
    return Task(name, "experiments.hopper.sanitize", arguments, SANITIZER_SECONDS, SHARING)


def stages() -> tuple[Stage, ...]:
    """All of them."""
    late = [pair for pair in PAIRS if pair[0] == "mosaic_gpu"]
    gemm = "experiments.local_gemm.run"
    triton = "experiments.triton.run"
    return (
        Stage(
            "folded",
            tuple(
                _correct(f"W={ranks}", pair, 150, "--ranks", ranks, "--calls", 3)
                for pair in PAIRS
                for ranks in RANKS
            ),
            together=AT_ONCE,
        ),
        Stage(
            "soak",
            tuple(
                _correct("soak", pair, 100, "--ranks", 2, "--calls", 0, "--soak", SOAK)
                for pair in PAIRS
            )
            + tuple(
                _correct(
                    "late", pair, 100,
                    "--ranks", 4, "--calls", 0, "--soak", LATE_SOAK, "--late-us", LATE_US,
                )
                for pair in late
            ),
            together=AT_ONCE,
        ),
        Stage(
            "sanitizer",
            tuple(
                _sanitizer(tool, pair, operator)
                for tool in ("memcheck", "racecheck")
                for operator in (BRING, SEND)
                for pair in PAIRS
                if operator == SEND or _gathers(pair)
            ),
            together=6,
        ),
        Stage(
            "memory",
            tuple(
                Task("/".join(pair), "experiments.hopper.memory", _named(*pair), 90, SHARING)
                for pair in (PAIRS[0], PAIRS[4])
            ),
            together=2,
        ),
        Stage(
            "gradients",
            tuple(
                _correct("gradients", pair, 120, "--ranks", 2, "--calls", 2, "--gradients")
                for pair in PAIRS
                if _gathers(pair)
            ),
            together=AT_ONCE,
        ),
        Stage("machinery", (Task("machinery", "experiments.hopper.machinery", (), 100),)),
        Stage(
            "local_gemm",
            tuple(
                Task(
                    f"shapes {first} to {first + 2}", gemm,
                    ("--named", str(first), str(first + 3), "--scheduled"), 40, SHARING,
                )
                for first in range(0, 12, 3)
            ),
        ),
        Stage(
            "host_stream",
            (Task("host_stream", "experiments.host_stream.run", ("--pause", "0.02"), 100),),
        ),
        Stage("triton_folded", (Task("folded", triton, ("folded",), 120),)),
        Stage("triton_gemm", (Task("gemm", triton, ("gemm", "--seconds", "100"), 150),)),
        Stage("triton_stream", (Task("stream", triton, ("stream",), 80),)),
    )  # fmt: skip


FIRST = ("folded", "soak", "sanitizer", "memory", "gradients")
"""What one command of ten minutes has time for; a second one takes the rest."""
NEEDS_GPU = ("triton_gemm", "triton_stream")
"""Stages of which no part runs without one."""


def tiny(stage: Stage) -> Stage:
    """The stage's first and last task, with tiny problems, without a GPU."""
    more = {
        "local_gemm": ("--rounds", "1", "--block-ms", "0", "--min-calls", "1", "--only", "even"),
        "machinery": ("--rounds", "1", "--calls", "1"),
        "host_stream": ("--rounds", "1"),
        "triton_folded": (),
        "memory": ("--calls", "100"),
    }.get(stage.name, ())
    kept = (*stage.tasks[:1], *stage.tasks[1:][-1:])
    return Stage(stage.name, kept, min(stage.together, 2)).using("--tiny", *more)
