"""A kernel that reduces two blocks of four, and what its bodies are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.traced_body import check_body

COUNT = 4
ARRIVAL = (2, 3, 0, 1)


def kernel(body: Callable[..., None], dtype: str = "float32", count: int = COUNT) -> PallasKernel:
    """Reduces blocks of x along grid axis 1, with two blocks of scratch."""
    block = pl.BlockSpec((2, 2), lambda i, k: (i, 0))
    return PallasKernel(
        body,
        grid=(2, count),
        operands=("x",),
        results=("y",),
        in_specs=pl.BlockSpec((2, 2), lambda i, k: (i, k)),
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((4, 2), dtype),
        scratch_shapes=[pltpu.VMEM((2, 2), dtype)] * 2,
        name="reduces",
    )


def check(body: Callable[..., None], dtype: str = "float32") -> None:
    check_body(kernel(body, dtype), {}, {"x": dtype}, [ARRIVAL, range(COUNT)], None)


def first(function: Callable[[], None]) -> None:
    pl.when(pl.program_id(1) == 0)(function)


def later(function: Callable[[], None]) -> None:
    pl.when(pl.program_id(1) > 0)(function)


def last(function: Callable[[], None]) -> None:
    pl.when(pl.program_id(1) == pl.num_programs(1) - 1)(function)


def zero(ref: Any) -> None:
    first(lambda: ref.__setitem__(..., jnp.zeros_like(ref)))
