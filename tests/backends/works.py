"""A gathering and a reducing kernel over two ranks, scheduled."""

from __future__ import annotations

from typing import Any

from syncopate_jax.backends.interface import Work
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.plans.all_gather_swizzle import all_gather_swizzle
from tests.backends import own_kernels


def gathering(**options: Any) -> Work:
    plan = all_gather_swizzle(2, (8, 4), dtype="float32", **options)
    return fuse(own_kernels.scale(8, 4), plan, {"x": "x"}, axis_name="t", backend="xla").work


def reducing(tile: int = 2, reduce: str = "sum", has_addend: bool = True) -> Work:
    plan = own_kernels.gather_and_scatter_plan(2, (8, 3), (8, 6), reduce)
    kernel = own_kernels.product(8, 3, 6, tile, has_addend=has_addend)
    return fuse(kernel, plan, {"x": "x", "y": "out"}, axis_name="t", backend="xla").work
