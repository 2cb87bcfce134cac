"""Read this first: a local kernel and a plan go in, one fused operator comes out.

Where new things go, with tests that pass their interface's conformance suite: a plan template in
``plans/``, an importer in ``importers/``, a backend in ``backends/``, an operator in ``ops/``, a
local kernel in ``pallas_kernels/``, a pass in ``passes/`` and ``compile``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from syncopate_jax.backends import triton_backends
from syncopate_jax.backends.buffers import (
    require_bound,
    require_even,
    require_filled,
    require_reached,
)
from syncopate_jax.backends.interface import Backend, Work
from syncopate_jax.check.verify import check
from syncopate_jax.check.verify_schedule import check_schedule
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.arguments import instance, integer
from syncopate_jax.ir.plan import Plan
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.frame import frame_box
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.tiles import fewest_workers
from syncopate_jax.options import ORDERS, Launch, is_order
from syncopate_jax.passes.expand_collectives import expand_collectives
from syncopate_jax.passes.schedule_plan import schedule_plan
from syncopate_jax.passes.split_chunks import split_chunks
from syncopate_jax.registry import backends
from syncopate_jax.runtime import device, mesh
from syncopate_jax.runtime.operator import Operator
from syncopate_jax.tune.order import by_speed


def compile(
    kernel: PallasKernel,
    plan: Plan,
    axis_map: AxisMap | Mapping[str, str | tuple[str, tuple[int, ...]]],
    *,
    axis_name: str | tuple[str, ...],
    backend: str = "auto",
    target: str = "tpu",
    split: int = 1,
    split_axis: int = 0,
    order: str = "natural",
    launch: Launch | None = None,
) -> Operator:
    """Fuse a local kernel with a communication plan (paper section 5.2).

    Args:
      kernel: the local kernel, as if for one device.
      plan: what moves between the ranks along ``axis_name``.
      axis_map: which operand or result of the kernel each plan tensor is: ``{tensor: operand}``;
        each tensor that ranks start with data of, as none is bound by its name alone.
      axis_name: mesh axis, or tuple of mesh axes, of the surrounding ``jax.shard_map``.
      backend: how chunks are moved, or ``auto``: the first that can, on whatever device, in the
        order of ``tune.order``, as no kernel but the operators' own was measured (theirs is another
        ``auto``, see ``options.Options``). That is the unfused ``xla`` where no other can; the
        operator's ``passed_over`` and its repr then say why.
      target: what the kernel is written in.
      split: pieces each chunk is cut into, along ``split_axis`` of its tensor, counted from the
        front.
      order: order of tiles inside a chunk: ``natural``, ``grouped`` or ``snake``.
      launch: what a GPU kernel may use of a device; None: all of it, one rank a device.

    Returns:
      An Operator: call it inside ``jax.shard_map`` with one rank's operands.

    Raises:
      PlanError: the plan or its schedule does not verify; all findings at once.
      InputError: an argument does not fit; UnsupportedError: no backend can do it, with reasons.
    """
    names = mesh.axis_tuple(axis_name, caller="compile")
    if not is_order(order):
        raise InputError(f"compile: order needs one of {', '.join(ORDERS)}, found {order!r}")
    launch = Launch() if launch is None else launch
    instance("compile", "kernel", kernel, PallasKernel)
    instance("compile", "plan", plan, Plan)
    instance("compile", "launch", launch, Launch)
    instance("compile", "backend", backend, str)
    instance("compile", "target", target, str)
    _check_target(target)
    split = integer("compile", "split", split, 1)
    split_axis = integer("compile", "split_axis", split_axis, 0)
    axis_map = AxisMap.of(axis_map)
    check(plan)
    plan = expand_collectives(plan)
    plan = split_chunks(plan, split, split_axis)
    space, accesses = kernel.read(bound_shapes(plan, axis_map, kernel), source=f"plan {plan.name}")
    axis_map.check(plan, accesses)
    _check_results(plan, axis_map, kernel)
    require_bound(plan, axis_map)
    require_reached(plan, axis_map, kernel.results)
    require_filled(plan, axis_map, kernel.results)
    require_even(plan, axis_map, kernel, accesses)
    launch = on_device(launch, target, plan.num_ranks)

    @functools.cache
    def work(workers: int) -> Work:
        """Backends differ in how many executors of tiles a rank has."""
        schedule = schedule_plan(plan, space, accesses, axis_map, workers=workers, intra=order)
        check_schedule(schedule, space, accesses, axis_map)
        return Work(kernel, schedule, space, accesses, axis_map, names, launch)

    reasons: dict[str, str] = {}

    def refused(name: str, reason: str) -> None:
        """Reasons stand behind the backend's name, with which many begin."""
        reasons[name] = reason.removeprefix(f"{name}: ").removeprefix(f"{name} ")

    reads = any(binding.operand in kernel.operands for binding in axis_map.bindings)
    for candidate in by_speed(backends.names(), reads) if backend == "auto" else (backend,):
        found: Backend = backends.get(candidate)
        if absent := triton_backends.missing(found, target):  # before a GPU is asked for
            refused(candidate, absent)
            continue
        try:
            most = found.workers(launch, plan.num_ranks) if target in found.targets else 1
        except InputError as error:  # CTAs of a GPU that is not here
            if backend != "auto":
                raise
            refused(candidate, str(error))
            continue
        chosen = work(fewest_workers(space.num_tiles, max(most, 1)))
        reason = found.unsupported_reason(chosen, target)
        if reason is None:
            mine = {n: why for n, why in reasons.items() if target in backends.get(n).targets}
            return Operator(chosen, found, target, passed_over=mine)
        refused(candidate, reason)
    listed = "\n".join(f"  {candidate}: {reason}" for candidate, reason in reasons.items())
    raise UnsupportedError(
        f"no backend can fuse plan {plan.name} with kernel {kernel.name} for target {target}:\n"
        f"{listed}"
    )


def _check_target(target: str) -> None:
    """Raises InputError for a target that no backend runs."""
    known = backends.get("xla").targets
    others = (name for name in backends.names() if target in backends.get(name).targets)
    if target not in known and not any(others):
        raise InputError(f"compile: target {target!r} is not one of {', '.join(known)}")


def on_device(launch: Launch, target: str, ranks: int) -> Launch:
    """``launch`` with the device's number of multiprocessors filled in.

    Raises InputError where it asks for more: CTAs that wait for each other must all be resident.
    """
    if target in ("mosaic_gpu", "triton"):
        has = device.core_count()
        if launch.sms is None:
            launch = launch.using(sms=has)
        elif has is not None and launch.sms > has:
            raise InputError(
                f"launch: sms = {launch.sms}, but the device has {has} multiprocessors, and CTAs "
                f"that wait for each other need one each: give at most {has}, or None for all"
            )
    return triton_backends.usual(launch, ranks) if target == "triton" else launch


def bound_shapes(plan: Plan, axis_map: AxisMap, kernel: PallasKernel) -> dict[str, tuple[int, ...]]:
    """Shapes of the bound operands as tiles see them: around each rank's goals.

    Raises InputError when a binding does not name each dimension of its tensor once, or names what
    is no operand or result of the kernel.
    """
    shapes = {}
    for binding in axis_map.bindings:
        if binding.operand in kernel.results:
            continue
        if binding.operand not in kernel.operands:
            raise InputError(
                f"axis map: tensor {binding.tensor} is bound to operand {binding.operand!r}; "
                f"kernel {kernel.name} has operands {', '.join(kernel.operands) or 'none'} and "
                f"results {', '.join(kernel.results)}"
            )
        shape = plan.tensor(binding.tensor).shape
        dims = axis_map.dims(binding, len(shape))
        if sorted(dims) != list(range(len(shape))):
            raise InputError(
                f"axis map: dims {dims} of tensor {binding.tensor} {shape} must name each of its "
                f"{len(shape)} dimensions once"
            )
        lo, hi = frame_box(plan, binding.tensor, write=False)
        extents = (hi - lo).max(axis=0)
        shapes[binding.operand] = tuple(int(extents[dims.index(d)]) for d in range(len(dims)))
    return shapes


def _check_results(plan: Plan, axis_map: AxisMap, kernel: PallasKernel) -> None:
    """Raises InputError unless tiles make each bound result: of its dtype, and all that ranks hold.

    Operands are checked when the operator is called.
    """
    outs = dict(zip(kernel.results, kernel.out_shape, strict=True))
    for binding in axis_map.bindings:
        if binding.operand not in outs:
            continue
        tensor, out = plan.tensor(binding.tensor), outs[binding.operand]
        result = f"result {binding.operand} of kernel {kernel.name}"
        if str(out.dtype) != tensor.dtype:
            raise InputError(
                f"plan {plan.name}: tensor {tensor.name} is {tensor.dtype}, but {result} is "
                f"{out.dtype}; make the plan with dtype={str(out.dtype)!r}"
            )
        for region in plan.initial:
            if region.tensor == tensor.name and region.box.size and not region.produced:
                raise InputError(
                    f"plan {plan.name}: rank {region.rank} starts with {tensor.name}{region.box}, "
                    f"but the axis map binds {tensor.name} to {result}, which could not hold it; "
                    f"bind it to an operand, or use a plan in which tiles produce {tensor.name}"
                )
        dims = axis_map.dims(binding, len(tensor.shape))
        lo, hi = frame_box(plan, tensor.name, write=True)
        extents = (hi - lo).max(axis=0)
        made = tuple(int(extents[dims.index(d)]) for d in range(len(dims)))
        shape = tuple(out.shape)
        if made != shape and not (0 in made and 0 in shape):
            raise InputError(
                f"plan {plan.name}: of tensor {tensor.name} {tensor.shape} the tiles of a rank "
                f"produce {made if any(made) else 'nothing'}, but {result} is {shape}; make the "
                f"plan such that the tiles of a rank produce {shape}, or bind another tensor"
            )
