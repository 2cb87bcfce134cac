"""Backends in which some CTAs of the launch only communicate (paper section 5.2)."""

from __future__ import annotations

from dataclasses import dataclass

from syncopate_jax.backends import gpu_kernel, gpu_tables
from syncopate_jax.backends.gpu_copy import Mover
from syncopate_jax.backends.gpu_kernel import FusedKernel
from syncopate_jax.backends.gpu_layout import Layout
from syncopate_jax.backends.interface import Emitted, Work, too_wide, wrong_target
from syncopate_jax.errors import SyncopateError
from syncopate_jax.options import Launch

COMMUNICATING = 4


@dataclass(frozen=True, slots=True)
class Dedicated:
    """``Launch.communicating`` CTAs of a rank copy; the others compute.

    Attributes:
      mover: how they copy.
    """

    name: str
    mover: Mover
    targets: tuple[str, ...] = ("mosaic_gpu",)
    folds: bool = True

    def communicating(self, launch: Launch) -> int:
        """CTAs of a rank that only communicate."""
        return COMMUNICATING if launch.communicating is None else launch.communicating

    def workers(self, launch: Launch, ranks: int) -> int:
        """CTAs of a rank that compute."""
        return launch.ctas(ranks) - self.communicating(launch)

    def unsupported_reason(self, work: Work, target: str) -> str | None:
        """Why the work cannot be done here; None when it can."""
        if target not in self.targets:
            return wrong_target(self.name, self.targets, target)
        if reason := too_wide(work):
            return f"{self.name}: {reason}"
        count = self.communicating(work.launch)
        workers = self.workers(work.launch, work.schedule.plan.num_ranks)
        if count < 1 or workers < 1:
            return (
                f"{self.name} needs at least 1 CTA of a rank to communicate and 1 to compute, "
                f"found {count} and {workers}; see Launch(sms, communicating)"
            )
        try:
            layout = self._layout(work)
            self.mover.pieces(layout)
        except SyncopateError as error:
            return str(error)
        warpgroups = work.kernel.loop_body.warpgroups
        if layout.channels > count * warpgroups:
            return (
                f"{self.name}: plan {work.schedule.plan.name} has {layout.channels} channels, each "
                f"of which needs a warpgroup that copies, and a CTA that communicates has "
                f"{warpgroups}: give Launch(communicating={-(-layout.channels // warpgroups)})"
            )
        return None

    def _layout(self, work: Work) -> Layout:
        copiers = self.communicating(work.launch) * work.kernel.loop_body.warpgroups
        return gpu_tables.lay_out(work, copiers)

    def emit(self, work: Work, target: str) -> Emitted:
        """The fused kernel of one rank, or of all if they are folded."""
        kernel = FusedKernel(
            work, self._layout(work), work.launch, self.mover, self.communicating(work.launch)
        )
        return gpu_kernel.emitted(self.name, kernel)
