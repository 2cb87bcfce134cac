"""Folded ranks: all ranks of a program on one device, as rows of arrays.

What is a device of a mesh under ``jax.shard_map`` is a row under ``fold``. A fused operator then
runs all ranks in one launch, which share the device's multiprocessors: the same kernel, schedule
and signals as on several devices, so an 8-rank kernel can be debugged on one card::

    y = fold(lambda x, w: all_gather_matmul(x, w, axis_name="x", target="mosaic_gpu"), "x")(xs, ws)

An operator of ``compile`` for a GPU is compiled for it: ``launch=Launch(folded=True)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def fold(
    fn: Callable[..., Any], axis_name: str, *, in_axes: Any = 0, out_axes: Any = 0
) -> Callable[..., Any]:
    """``fn``, written for one rank, over arrays with a leading rank axis.

    Args:
      fn: as for ``jax.shard_map``; may use collectives and operators over ``axis_name``.
      axis_name: the axis that the ranks run along; not the name of an axis of a mesh in use.
      in_axes, out_axes: as for ``jax.vmap``; None for an argument that all ranks share.

    Differentiate inside, ``fold(jax.grad(fn), …)``: JAX does not bind the axis in the backward pass
    of a function that was mapped before it was differentiated.

    Returns:
      A function of the stacked arguments that gives stacked results.
    """
    return jax.vmap(fn, in_axes=in_axes, out_axes=out_axes, axis_name=axis_name)
