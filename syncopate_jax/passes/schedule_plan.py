"""The passes that turn a plan into a schedule, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.schedule import Schedule
from syncopate_jax.kernel.access import AnyAccess
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.tiles import TileSpace
from syncopate_jax.passes.assign_signals import assign_signals
from syncopate_jax.passes.build_depgraph import DepGraph, build_depgraph
from syncopate_jax.passes.order_tiles import TileOrder, order_tiles
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
    options = {"workers": workers, "intra": intra, "group": group, "inter": inter}
    return schedule_stages(plan, space, accesses, axis_map, **options).schedule


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
