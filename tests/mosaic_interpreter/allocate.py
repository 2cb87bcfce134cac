"""Shared memory, barriers and accumulators of a scope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as jax_core
from jax._src.pallas import core as pallas_core
from jax._src.pallas import primitives
from jax._src.pallas.mosaic_gpu import core as gpu_core

from tests.mosaic_interpreter.evaluate import Evaluator, handles
from tests.mosaic_interpreter.machine import unwritten
from tests.mosaic_interpreter.memory import Barrier, Buffer
from tests.mosaic_interpreter.regions import LAYOUT


@handles(primitives.run_scoped_p)
def run_scoped(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    """Runs a body with new memory, the same for the warpgroups of a CTA if it is collective."""
    wg, params = ev.warpgroup, eqn.params
    visit = wg.scopes[id(eqn)]
    wg.scopes[id(eqn)] += 1
    shared = wg.machine.grid.warpgroup_name in params["collective_axes"]
    key = (id(eqn), visit, None if shared else wg.number)
    if key not in wg.cta.scopes:
        wg.cta.scopes[key] = [
            _allocate(var.aval, transforms, f"{wg.cta.name} {index}#{visit}")
            for index, (var, transforms) in enumerate(
                zip(params["jaxpr"].invars, params["ref_transforms"], strict=True)
            )
        ]
    return ev.run(params["jaxpr"], [*given, *wg.cta.scopes[key]])


def _allocate(aval: Any, transforms: Sequence[Any], name: str) -> Any:
    if isinstance(aval, gpu_core.AbstractRefUnion):
        return _allocate_union(aval, name)
    inner = aval.inner_aval
    if isinstance(inner.dtype, gpu_core.BarrierType | gpu_core.ClusterBarrierType):
        found = np.empty(inner.shape, object)
        for at in np.ndindex(*inner.shape):
            found[at] = Barrier(f"barrier {name}{list(at)}", inner.dtype.num_arrivals)
        return found
    if aval.memory_space == gpu_core.MemorySpace.REGS:
        return Buffer(f"accumulator {name}", np.zeros(inner.shape, inner.dtype), in_gmem=False)
    if aval.memory_space != gpu_core.MemorySpace.SMEM:
        raise NotImplementedError(f"scoped memory in {aval.memory_space}")
    logical = _logical(inner, transforms)
    array = unwritten(logical.shape, logical.dtype)
    return Buffer(f"shared memory {name}", array, in_gmem=False)


def _allocate_union(aval: Any, name: str) -> Buffer:
    """One buffer for all views, which must see the same elements at the same places."""
    members = jax.tree.leaves(
        gpu_core.flatten_ref_union(aval),
        is_leaf=lambda x: isinstance(x, pallas_core.TransformedRef),
    )
    found = {}
    for member in members:
        extract, *rest = member.transforms
        inner = jax_core.ShapedArray(tuple(extract.shape), extract.dtype)
        logical = _logical(inner, rest)
        found[extract.offset, logical.shape, str(logical.dtype)] = logical
        for tiling in (t.tiling for t in rest if isinstance(t, gpu_core.UntilingTransform)):
            if tiling[-1] != logical.shape[-1]:
                raise NotImplementedError(f"union {name}: tiles {tiling} of {logical.shape}")
    if len(found) != 1:
        raise NotImplementedError(f"union {name} has members {sorted(found)}; only equal ones run")
    ((logical),) = found.values()
    return Buffer(f"shared memory {name}", unwritten(logical.shape, logical.dtype), in_gmem=False)


def _logical(inner: Any, transforms: Sequence[Any]) -> Any:
    """The array that a program sees, of memory that is laid out otherwise."""
    for transform in transforms:
        if not isinstance(transform, LAYOUT):
            raise NotImplementedError(f"memory laid out by {transform}")
        inner = transform.transform_type(inner)
    if math.prod(inner.shape) == 0:
        raise NotImplementedError(f"empty scoped memory {inner.shape}")
    return inner
