"""The backends of target ``triton``: one rewritten kernel each, with or without a copy engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from syncopate_jax.backends import triton_call
from syncopate_jax.backends.interface import Backend, Emitted, Work, once_a_work
from syncopate_jax.backends.triton_colocated import ColocatedTritonMaker
from syncopate_jax.backends.triton_kernel import FusedTriton
from syncopate_jax.backends.triton_layout import Laid, TritonMaker
from syncopate_jax.errors import SyncopateError
from syncopate_jax.native import build
from syncopate_jax.options import Launch

TARGET = "triton"
Maker = Callable[[Work, int], TritonMaker]
MOST_COMMUNICATING = 8
"""Programs of a rank; of 2, 4, 8 and 16 the fastest on an H200 whose ranks have 66 each."""


def usual(launch: Launch, ranks: int) -> Launch:
    """``launch`` with the number of communicating programs: an eighth of a rank's, up to 8."""
    if launch.communicating is not None or launch.sms is None:
        return launch
    return launch.using(communicating=max(1, min(MOST_COMMUNICATING, launch.ctas(ranks) // 8)))


def missing(backend: Backend, target: str) -> str | None:
    """What must be installed for a backend's kernels of ``target``; None if nothing."""
    written = target == TARGET and target in backend.targets and backend.name != "xla"
    return triton_call.missing() if written else None


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """A launch in which programs compute, communicate or both.

    Attributes:
      maker: makes the scheme.
      dedicated: whether some programs only communicate.
    """

    name: str
    maker: Maker
    dedicated: bool
    targets: tuple[str, ...] = (TARGET,)
    folds: bool = True

    def communicating(self, launch: Launch) -> int:
        """Programs of a rank that only communicate."""
        return (launch.communicating or 0) if self.dedicated else 0

    def workers(self, launch: Launch, ranks: int) -> int:
        """Programs of a rank that compute, one a multiprocessor."""
        return launch.ctas(ranks) - self.communicating(launch)

    def unsupported_reason(self, work: Work, target: str) -> str | None:
        """Why the work cannot be done here; None when it can."""
        count, launch = self.communicating(work.launch), work.launch
        workers = self.workers(launch, work.schedule.plan.num_ranks)
        if workers < 1 or (self.dedicated and count < 1):
            return (
                f"{self.name} needs at least 1 program of a rank to compute"
                f"{' and 1 to communicate' if self.dedicated else ''}, found {workers}"
                f"{f' and {count}' if self.dedicated else ''}; see Launch(sms, communicating)"
            )
        for name in ("watchdog_us", "late_us"):
            if getattr(launch, name):
                return f"{self.name} has no {name} in Triton kernels; use launch.{name}=0"
        try:
            lay_out(work, self.maker, count)
        except SyncopateError as error:
            return str(error)
        return self._cannot_launch(work)

    def _cannot_launch(self, work: Work) -> str | None:
        """What a mesh lacks."""
        if work.launch.folded:
            return None
        if jax.process_count() > 1:
            return (
                f"{self.name} exchanges addresses between the devices of one process, this "
                f"program has {jax.process_count()}; use target 'mosaic_gpu' or backend 'xla'"
            )
        return build.missing()

    def emit(self, work: Work, target: str) -> Emitted:
        """The fused kernel of one rank, or of all if they are folded."""
        count = self.communicating(work.launch)
        return FusedTriton(self.name, work, lay_out(work, self.maker, count)).emit()


@once_a_work
def lay_out(work: Work, maker: Maker, programs: int) -> Laid:
    """Scheme, table and buffers of a launch."""
    return maker(work, programs).lay_out(programs)


DEDICATED = TritonBackend("ldst_dedicated", TritonMaker, dedicated=True)
COLOCATED = TritonBackend("ldst_colocated", ColocatedTritonMaker, dedicated=False)
