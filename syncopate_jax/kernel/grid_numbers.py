"""A body on a grid whose numbers are handed to it: what it gets from ``pl.program_id``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core as jax_core  # extend_axis_env_nd: read at 0.11.2 and 0.12.0.1
from jax._src.pallas import core as pallas_core  # grid_env: likewise
from jax.experimental import pallas as pl


def run_at(numbers: Sequence[Any], grid: Sequence[int], body: Callable[..., None]) -> None:
    """Runs ``body()`` at the grid point ``numbers``, as ``pl.program_id`` gives them.

    Jitted functions that it calls are traced anew, as those of another run have its numbers inside;
    an axis that is this run's alone tells JAX so.
    """
    axes = [pallas_core.GridAxis(i, n) for i, n in zip(numbers, grid, strict=True)]
    with pallas_core.grid_env(axes), jax_core.extend_axis_env_nd([(object(), 1)]):
        body()


def asked_outside(body: Callable[..., None], grid: Sequence[int]) -> Callable[..., None]:
    """``body``, with ``pl.program_id`` asked before all else.

    Pallas's interpreter knows no such number inside a ``pl.when`` or a loop.
    """

    def outside(*refs: jax.Ref) -> None:
        numbers = [pl.program_id(axis) for axis in range(len(grid))]
        run_at(numbers, grid, lambda: body(*refs))

    return outside
