"""What an operator costs on a machine that was measured, by backend: its real schedule, simulated.

Beside ``prediction.py``, which asks what any kernel could do on a topology, this takes the tiles,
the order, the workers and the operations of the kernel that would run, and from the machine what
the simulator leaves out: that waves of tiles are whole, that CTAs which communicate do not compute,
how fast those copy and when they are told of a tile, that tiles send themselves, and what a call
costs beside its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from syncopate_jax.backends.by_target import ByTarget
from syncopate_jax.backends.gpu_colocated import Colocated
from syncopate_jax.backends.gpu_dedicated import Dedicated
from syncopate_jax.backends.interface import Backend
from syncopate_jax.check.engine import transfer_bytes
from syncopate_jax.check.simulate import simulate
from syncopate_jax.check.tile_stores import tile_stores
from syncopate_jax.check.timing import Timeline
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir import presets
from syncopate_jax.ir.machine import Machine
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.topology import Topology
from syncopate_jax.ops import fused
from syncopate_jax.ops.blocked import block
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options
from syncopate_jax.pallas_kernels.contraction_mosaic_gpu import ContractionLoop
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_beside import Beside
from syncopate_jax.runtime.operator import Operator


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted seconds of one call on the device, of the slowest rank.

    Attributes:
      fused: the fused operator, with what its call costs beside the kernel.
      product: XLA's product alone. exchange: XLA's collective alone.
      timeline: of the kernel.
    """

    fused: float
    product: float
    exchange: float
    timeline: Timeline

    @property
    def unfused(self) -> float:
        """XLA's collective and product, one after the other."""
        return self.product + self.exchange

    @property
    def speedup(self) -> float:
        """Unfused over fused."""
        return self.unfused / self.fused


def predict_call(
    machine: Machine,
    spec: Contraction,
    lhs: tuple[int, ...],
    rhs: tuple[int, ...],
    ranks: int,
    options: Options,
    *,
    dtype: str = "bfloat16",
    lag: float | None = None,
) -> Predicted:
    """Predicted times of ``spec`` with local operands of shapes ``lhs`` and ``rhs``.

    Args:
      options: the backend, its split and CTAs; the target is ``mosaic_gpu``.
      lag: in place of ``signal_lag``, for kernels that are not today's.

    Raises UnsupportedError when the backend cannot do it, or nothing is known of its speed.
    """
    launch = options.launched.using(sms=machine.multiprocessors)
    options = options.using(target="mosaic_gpu", launch=launch)
    operator, layout = fused.build(
        spec.kind, block(spec, lhs, rhs, ranks), dtype, dtype, ("ranks",), options
    )
    schedule = operator.work.schedule
    topology, call = _realised(machine, operator)
    if isinstance(_backend(operator), Colocated):
        work = operator.work
        schedule = tile_stores(schedule, work.space, work.accesses, work.axis_map)
    one = fused.problem(spec, ranks, lhs, rhs)
    seconds = machine.tile(_tile_elements(operator), one.k)
    told = signal_lag(operator)
    told = lag if told and lag is not None else told
    timeline = simulate(schedule.plan, topology, schedule, tile_seconds=seconds, signal_lag=told)
    # What a collective moves, whatever plan the fused operator follows.
    usual = fused.prepare(spec.kind, layout, dtype, dtype, Options(), target="mosaic_gpu")[2]
    return Predicted(
        fused=timeline.makespan + call,
        product=machine.product(one.m, one.k, one.n),
        exchange=_exchange(machine, spec.kind, usual),
        timeline=timeline,
    )


def _realised(machine: Machine, operator: Operator) -> tuple[Topology, float]:
    """How fast the operator's backend moves data, and what its call costs beside the kernel."""
    backend, ranks = _backend(operator), operator.work.schedule.plan.num_ranks
    at: Callable[..., Topology] = presets.of_machine
    if backend.name == "copy_engine":
        latency = machine.copy_engine_latency
        return at(machine, ranks, machine.link_bandwidth, latency), 0.0
    if isinstance(backend, Dedicated):
        ctas = backend.communicating(operator.work.launch)
        if backend.mover.copied:
            one, most = machine.copy_unit_cta_bandwidth, machine.copy_unit_bandwidth
        else:
            one, most = machine.load_store_cta_bandwidth, machine.load_store_bandwidth
        return at(machine, ranks, min(ctas * one, most)), machine.call_seconds
    if isinstance(backend, Colocated) and not backend.direct:
        # The queue of a rank stands for all its CTAs; each pushes its own tile at its own rate.
        itemsize = operator.work.schedule.plan.tensors[0].itemsize
        push = _tile_elements(operator) * itemsize / machine.copy_unit_cta_bandwidth
        latency = presets.SIGNAL_LATENCY + push
        return at(machine, ranks, machine.copy_unit_bandwidth, latency), machine.call_seconds
    raise UnsupportedError(
        f"predict: nothing was measured on {machine.name} of how fast {backend.name} moves data; "
        f"use copy_engine, tma_dedicated, ldst_dedicated or tma_colocated"
    )


def _backend(operator: Operator) -> Backend:
    """The realisation for Mosaic GPU, where there are several."""
    found = operator.backend
    return found.realisations[operator.target] if isinstance(found, ByTarget) else found


def _tile_elements(operator: Operator) -> int:
    """Elements of the result in one of the operator's tiles, those at an edge aside."""
    work = operator.work
    lo, hi = work.accesses[work.kernel.results[0]].boxes(work.space)
    return int(np.prod(hi[:, 0] - lo[:, 0], axis=1).max())


def signal_lag(operator: Operator) -> float:
    """Share of a tile that a CTA computes before it tells those that communicate of the last.

    Tiles that send themselves have left by then.
    """
    kernel = operator.work.kernel
    body, dtype = kernel.loop_body, kernel.out_shape[0].dtype
    if not (isinstance(body, ContractionLoop) and isinstance(_backend(operator), Dedicated)):
        return 0.0
    steps = math.prod(kernel.grid[axis] for axis in kernel.reduction_axes)
    if not body.config.overlaps(dtype, steps):
        return 0.0
    beside = Beside(steps, body.config.stages, body.config.stores(dtype), True, signals=True)
    return beside.signal_step / steps


def _exchange(machine: Machine, kind: str, plan: Plan) -> float:
    """Seconds of XLA's collective, by the most that a rank receives from others in ``plan``."""
    c, ranks = plan.columns, plan.num_ranks
    away = c.src_rank != c.dst_rank
    found = np.bincount(c.dst_rank[away], transfer_bytes(plan)[away], ranks)
    received = float(found.max(initial=0.0))
    return machine.exchange(kind, received, received * ranks / max(ranks - 1, 1))
