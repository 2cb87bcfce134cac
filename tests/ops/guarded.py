"""Fused operators run under the interpreter's guards, in both ways of timing copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from syncopate_jax.backends.interface import interpret_settings
from tests import interpret
from tests.ops import cases
from tests.ops.cases import Case


def fused(case: Case, ranks: int, settings: Any, **options: Any) -> Callable[..., jax.Array]:
    """The fused operator over whole arrays, interpreted with ``settings``."""
    fn = jax.jit(cases.sharded(case, cases.ranks_mesh(ranks), backend="remote_dma", **options))

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        token = interpret_settings.set(settings)
        try:
            return fn(x, w)
        finally:
            interpret_settings.reset(token)

    return run


def run_once(
    case: Case, ranks: int, arrays: Any, mode: str, *, timeout: float = 30.0,
    late: int | None = None, **options: Any,
) -> float:  # fmt: skip
    """Error of the guarded operator's result; raises what the guards find."""
    x, w, ct = arrays
    run = fused(case, ranks, interpret.params(mode), **options)
    y = interpret.run_guarded(run, x, w, timeout=timeout, late=late)
    return cases.error(np.asarray(y, np.float64), cases.exact(x, w, ct)[0])


def what_is_wrong(
    case: Case, ranks: int, arrays: Any, modes: Sequence[str] = interpret.MODES, **options: Any
) -> str:
    """How a broken operator shows, in the first mode in which it does; empty if in none."""
    for mode in modes:
        try:
            error = run_once(case, ranks, arrays, mode, **options)
        except (interpret.DeadlockFound, interpret.RaceFound, interpret.LeftoverCount) as found:
            return f"{type(found).__name__}: {found}"
        if not error < 1e-5:
            return f"error {error}"
    return ""
