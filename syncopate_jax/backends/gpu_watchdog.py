"""The development watchdog's report: a wait that was given up becomes an error of the call."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from syncopate_jax.errors import DeadlockError


def raise_given_up(record: jax.Array, plan: str, order: np.ndarray) -> None:
    """Raises DeadlockError, once the program has run, if the kernel gave up a wait.

    Args:
      record: int32, a row of ``gpu_signals.RECORD`` a rank.
      plan: its name.
      order: [ranks, tiles] linear tile by position.
    """

    def check(found: Any) -> None:
        rows = [row for row in np.asarray(found).tolist() if row[0]]
        if rows:
            raise DeadlockError(f"plan {plan}: " + "; ".join(describe(row, order) for row in rows))

    jax.debug.callback(check, record)


def describe(row: list[int], order: np.ndarray) -> str:
    """One row of the record in words."""
    found, rank, position, step, slot, expected = row
    if position < 0:
        who = "an operation or the end of the launch"
    else:
        who = f"tile {order[rank, position]} (position {position}"
        who += f", step {step})" if step >= 0 else ")"
    return (
        f"rank {rank}: {who} waited in vain for signal {slot} to reach {expected}, "
        f"it was {found - 1}"
    )
