"""The passes that turn a plan into a schedule, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.report import Report
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.schedule import Schedule, describe
from syncopate_jax.kernel.access import AnyAccess
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.tiles import TileSpace
from syncopate_jax.passes.assign_signals import assign_signals
from syncopate_jax.passes.build_depgraph import DepGraph, build_depgraph
from syncopate_jax.passes.order_tiles import NEVER, TileOrder, order_tiles
from syncopate_jax.passes.place_waits import TileWaits, place_waits


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """What each pass made, in order."""

    graph: DepGraph
    order: TileOrder
    waits: TileWaits
    schedule: Schedule


def schedule_plan(
    plan: Plan,
    space: TileSpace,
    accesses: Mapping[str, AnyAccess],
    axis_map: AxisMap,
    *,
    workers: int = 1,
    intra: str = "natural",
    group: int = 8,
    inter: str = "arrival",
) -> Schedule:
    """The schedule of a plan and the tiles that read or write what it moves (paper section 5.2).

    Args:
      plan: transfers only, verified.
      accesses: how tiles touch each operand that ``axis_map`` binds.
      workers: tile executors a rank.
      intra, group, inter: the order of tiles, as in ``order_tiles``.

    Raises:
      UnsupportedError: the plan has collectives.
      InputError: an argument is out of range, or the axis map does not fit.
      PlanError: plan and tiles do not go together; all findings at once.
    """
    return schedule_stages(
        plan,
        space,
        accesses,
        axis_map,
        workers=workers,
        intra=intra,
        group=group,
        inter=inter,
    ).schedule


def schedule_stages(
    plan: Plan,
    space: TileSpace,
    accesses: Mapping[str, AnyAccess],
    axis_map: AxisMap,
    *,
    workers: int = 1,
    intra: str = "natural",
    group: int = 8,
    inter: str = "arrival",
    minimal: bool = True,
) -> Stages:
    """As ``schedule_plan``, with what each pass made; ``minimal`` as in ``place_waits``."""
    graph = build_depgraph(plan, space, accesses, axis_map)
    order = order_tiles(graph, intra=intra, group=group, inter=inter)
    waits = place_waits(graph, order, workers=workers, minimal=minimal)
    return Stages(graph, order, waits, assign_signals(graph, order, waits))


def dump(stages: Stages, rank: int) -> str:
    """What each pass made for ``rank``, as text."""
    graph, order, waits = stages.graph, stages.order, stages.waits
    c, name, tiles = graph.plan.columns, Report(graph.plan).name, graph.space.num_tiles
    lines = ["build_depgraph"]
    for op, chosen, steps in zip(graph.need_op, graph.need_tiles, graph.need_steps, strict=True):
        if c.dst_rank[op] == rank:
            at = np.flatnonzero(graph.step_sets[steps]).tolist()
            found = graph.tile_sets.row(chosen).tolist()
            lines.append(f"  tiles {found} need {name(int(op))} at steps {at}")
    for op in np.flatnonzero(graph.lands & (c.dst_rank == rank)).tolist():
        found = (graph.addend_tile[graph.addend_op == op] - rank * tiles).tolist()
        lines.append(f"  tiles {found} add {name(op)}")
    for op, event in zip(graph.event_op.tolist(), graph.event.tolist(), strict=True):
        if c.rank[op] == rank:
            of, first = np.divmod(graph.events.row(event), tiles)
            lines.append(f"  {name(op)} waits for tiles {first.tolist()} of rank {of[0]}")
    for op, dep in zip(graph.after_op.tolist(), graph.after_dep.tolist(), strict=True):
        if c.rank[op] == rank:
            lines.append(f"  {name(op)} waits for {name(dep)}")
    lines += ["order_tiles", f"  steps {order.k_order[rank].tolist()}"]
    for tile in order.order[rank].tolist():
        due = order.due[rank, tile]
        until = "never" if due == NEVER else due
        lines.append(f"  tile {tile} ready {order.ready[rank, tile]} due {until}")
    lines.append("place_waits")
    for at, place, op in zip(waits.at, waits.place, waits.op, strict=True):
        if at // tiles == rank:
            step = "epilogue" if place == graph.space.num_steps else f"step position {place}"
            lines.append(f"  position {at % tiles}, {step}: {name(int(op))}")
    return "\n".join([*lines, "assign_signals", describe(stages.schedule, rank)]) + "\n"
