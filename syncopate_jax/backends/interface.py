"""What a backend is: it says what it cannot do, and turns a schedule into a traceable function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from syncopate_jax.ir.schedule import Schedule
from syncopate_jax.kernel.access import AnyAccess
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.tiles import TileSpace
from syncopate_jax.options import Launch

Emitted = Callable[..., Sequence[jax.Array]]
"""``emitted(*operands, platform=..., interpret=...)``: one rank's results, in manual mesh axes.

``platform`` is ``cpu``, ``tpu``, ``cuda`` or ``rocm``; on ``cpu`` kernels are interpreted, with the
settings ``interpret``. Of a backend that ``folds``, ``shared=[…]`` asks for the results of all
ranks at once, with a leading rank axis, from operands that have one too unless they are shared.
"""

interpret_settings: ContextVar[Any] = ContextVar("interpret_settings", default=True)
"""Pallas's ``interpret`` on the CPU: True, or settings such as ``pltpu.InterpretParams``."""


def wrong_target(name: str, targets: Sequence[str], target: str) -> str:
    """Says that backend ``name`` has no kernels of ``target``, and what has, on which devices."""
    known = " and ".join(map(repr, targets))
    where = (
        "TPUs and CPUs run it with target='tpu'; on GPUs use 'tma_dedicated' or 'xla'"
        if "tpu" in targets
        else f"GPUs run it with target={targets[0]!r}; on CPUs and TPUs use 'remote_dma' or 'xla'"
    )
    return f"{name} works with target {known}, not {target!r}; {where}"


def wrong_platform(name: str, platform: str) -> str:
    """Says that GPU backend ``name`` has nothing for ``platform``, and which backends have."""
    return (
        f"{name} runs on CUDA GPUs, this program is for {platform}; on CPUs and TPUs use backend "
        f"'remote_dma' or 'xla' (and leave out target)"
    )


def is_wide(dtype: Any) -> bool:
    """Whether numbers of ``dtype`` have more than 32 bits, as ``jax_enable_x64`` allows."""
    bits: int = 8 * jnp.dtype(dtype).itemsize
    return bits > (64 if jnp.issubdtype(dtype, jnp.complexfloating) else 32)


WHOLE_DEVICE = Launch()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Work:
    """One operator to realise.

    Attributes:
      kernel: the local kernel.
      schedule: order, waits and signals; holds the plan.
      space: the kernel's tile space.
      accesses: which box of each operand a tile touches, for results and bound operands.
      axis_map: which operand each plan tensor is.
      axis_names: mesh axes the ranks run along.
      launch: what the kernel may use of a device, and how ranks are laid on it.
      keep: whether what was gathered of each bound operand is returned too, behind the results; to
        be asked of a ``KeepsGathered`` alone.
    """

    kernel: PallasKernel
    schedule: Schedule
    space: TileSpace
    accesses: Mapping[str, AnyAccess]
    axis_map: AxisMap
    axis_names: tuple[str, ...]
    launch: Launch = WHOLE_DEVICE
    keep: bool = False


def once_a_work[*Ts, R](make: Callable[[Work, *Ts], R]) -> Callable[[Work, *Ts], R]:
    """``make``, memoised for as long as the work lives, which its results must not hold.

    A work is laid out when the backend is asked about it and whenever its operator is traced.
    """
    made: WeakKeyDictionary[Work, dict[tuple[*Ts], R]] = WeakKeyDictionary()

    @functools.wraps(make)
    def look_up(work: Work, *args: *Ts) -> R:
        found = made.setdefault(work, {})
        if args not in found:
            found[args] = make(work, *args)
        return found[args]

    return look_up


class Backend(Protocol):
    """A realisation of schedules (paper section 5.2, figure 7)."""

    @property
    def name(self) -> str:
        """What users ask for."""
        ...

    @property
    def targets(self) -> tuple[str, ...]:
        """Kernel languages it works with."""
        ...

    @property
    def folds(self) -> bool:
        """Whether it can run all ranks in one launch on one device."""
        ...

    def workers(self, launch: Launch, ranks: int) -> int:
        """Tile executors of a rank, for which the schedule is made."""
        ...

    def unsupported_reason(self, work: Work, target: str) -> str | None:
        """Why it cannot do ``work``, and what would; None when it can."""
        ...

    def emit(self, work: Work, target: str) -> Emitted:
        """The fused kernel; only called when ``unsupported_reason`` is None."""
        ...


def too_wide(work: Work) -> str | None:
    """Which tensor or result has wider numbers than Pallas's kernels of TPUs and GPUs; or None."""
    dtypes = [(f"tensor {t.name}", t.dtype) for t in work.schedule.plan.tensors]
    results = zip(work.kernel.results, work.kernel.out_shape, strict=True)
    dtypes += [(f"result {name}", str(out.dtype)) for name, out in results]
    for what, dtype in dtypes:
        if is_wide(dtype):
            return narrower(what, dtype)
    return None


def narrower(what: str, dtype: Any) -> str:
    """Says that numbers of ``dtype`` are too wide for a Pallas kernel, and what to do."""
    return (
        f"{what} is {dtype}, and kernels of TPUs and GPUs have numbers of at most 32 bits; cast "
        f"it, or use backend 'xla'"
    )


@runtime_checkable
class KeepsGathered(Protocol):
    """A backend that can return what it gathered (``Work.keep``), which costs it no copy."""

    @property
    def keeps_gathered(self) -> bool:
        """True."""
        ...
