"""What an operator would cost on a topology, fused and unfused: the simulator's answer."""

from __future__ import annotations

import math
from dataclasses import replace

from syncopate_jax.check.simulate import Comparison, compare, simulate
from syncopate_jax.compiler import bound_shapes
from syncopate_jax.ir.topology import Topology
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.ops.blocked import block
from syncopate_jax.ops.fused import prepare
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options
from syncopate_jax.passes.schedule_plan import schedule_plan
from syncopate_jax.runtime.device import HOPPER_CORES

# A Hopper GEMM's tile; only predictions use it.
GPU_TILE = {"m": 128, "n": 256, "k": 1 << 30}


def predict(
    spec: Contraction,
    lhs: tuple[int, ...],
    rhs: tuple[int, ...],
    topology: Topology,
    options: Options | None = None,
    *,
    dtype: str = "bfloat16",
    workers: int = HOPPER_CORES,
) -> Comparison:
    """Predicted seconds of one operator with local operands of shapes ``lhs`` and ``rhs``.

    The number of ranks is the topology's. Tiles are those of a GPU's matrix kernel; a tile costs
    its share of the topology's compute rate. The unfused time and the bound are those of whole
    chunks, whatever ``options.split``.
    """
    options = options or Options()
    given = block(spec, lhs, rhs, topology.num_ranks)
    layout, kernel, plan = prepare(spec.kind, given, dtype, dtype, options, largest=GPU_TILE)
    axis_map = AxisMap.of({plan.tensors[0].name: layout.place})
    space, accesses = kernel.read(bound_shapes(plan, axis_map, kernel))
    schedule = schedule_plan(plan, space, accesses, axis_map, workers=workers)
    flops = 2.0 * math.prod(layout.extents.values())
    found = compare(schedule, topology, tile_flops=flops / space.num_tiles)
    # Nobody cuts chunks for a program that does not overlap them.
    options = options.using(split=1)
    _, _, whole = prepare(spec.kind, given, dtype, dtype, options, largest=GPU_TILE)
    return replace(found, communication=simulate(whole, topology).makespan)
