"""Hierarchical templates: agents across nodes, ragged nodes, and channels busy side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from syncopate_jax.check.simulate import simulate
from syncopate_jax.check.timing import Timeline
from syncopate_jax.errors import InputError
from syncopate_jax.ir import presets
from syncopate_jax.ir.comm import OpDep
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.text import to_text
from syncopate_jax.plans import hierarchy
from syncopate_jax.plans.all_gather_swizzle import all_gather_swizzle
from syncopate_jax.plans.all_reduce_two_shot import all_reduce_two_shot
from syncopate_jax.plans.all_to_all_blocks import all_to_all_blocks
from syncopate_jax.plans.hierarchical_all_gather import hierarchical_all_gather
from syncopate_jax.plans.hierarchical_all_to_all import hierarchical_all_to_all
from syncopate_jax.plans.hierarchy import make_nodes
from syncopate_jax.plans.reduce_scatter_direct import reduce_scatter_direct
from syncopate_jax.registry import templates
from tests.conformance.template import assert_sound
from tests.golden.compare import golden

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
FLAT = {
    "all_gather": all_gather_swizzle,
    "reduce_scatter": reduce_scatter_direct,
    "all_reduce": all_reduce_two_shot,
    "all_to_all": all_to_all_blocks,
}
MIB = 1 << 20


def make(kind: str, ranks: int, shape: tuple[int, ...], **arguments: Any) -> Plan:
    plan = templates.get(f"hierarchical_{kind}")(ranks, shape, **arguments)
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [(2, 2), (3, 1, 2), (1, 4), (5,), (1, 1, 1)])
def test_nodes_of_any_size(kind: str, nodes: tuple[int, ...]) -> None:
    ranks = sum(nodes)
    node = np.repeat(np.arange(len(nodes)), nodes)
    for mode in ("push", "pull"):
        plan = make(
            kind, ranks, (2 * ranks + 1, 3), nodes=nodes, split=2, mode=mode, outer_channel="nic"
        )
        assert_sound(plan)
        c = plan.columns
        crosses = node[c.src_rank] != node[c.dst_rank]
        assert plan.channels == ("nvlink", "nic")
        assert np.array_equal(c.channel == 1, crosses)


def test_text() -> None:
    text = to_text(hierarchical_all_gather(4, (4, 4), nodes=(2, 2), outer_channel="nic"))
    assert text == golden("plans/hierarchical_all_gather.txt", text)


def test_a_shard_crosses_once_to_every_node_and_goes_on_as_it_comes() -> None:
    plan = hierarchical_all_gather(6, (12, 4), nodes=(2, 2, 2), split=2, outer_channel="nic")
    for rank in range(6):
        crossing = [op for op in plan.ops(rank) if op.channel == "nic"]
        assert len(crossing) == 4
        assert {op.dst_rank % 2 for op in crossing} == {rank % 2}
        for op in plan.ops(rank):
            for dep in op.deps:
                assert isinstance(dep, OpDep)
                brought = plan.op(dep.rank, dep.index)
                assert (brought.channel, brought.dst) == ("nic", op.src)


def test_uneven_nodes_deal_pieces_out() -> None:
    nodes = make_nodes("n", 7, (3, 4))
    agents = [nodes.agent(1, rank, piece, 4) for rank in range(3) for piece in range(4)]
    assert sorted(agents) == [3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6]
    assert [nodes.agent(0, rank, 0, 1) for rank in range(3, 7)] == [0, 1, 2, 0]


def test_places_of_other_nodes_are_met_in_turn() -> None:
    plan = hierarchical_all_to_all(8, (16, 4), nodes=(4, 4), outer_channel="nic")
    firsts = {
        next(op.dst_rank for op in plan.ops(rank) if op.channel == "nic") for rank in range(4)
    }
    assert firsts == {4, 5, 6, 7}


def busy(timeline: Timeline, channel: int) -> float:
    """Seconds for which the busiest rank's queue of a channel is held."""
    c = timeline.plan.columns
    chosen = c.channel == channel
    delay = timeline.topology.channels[channel].latency[c.src_rank, c.dst_rank]
    held = timeline.op_finish - delay - timeline.op_start
    return float(np.bincount(c.rank[chosen], held[chosen]).max())


@pytest.mark.parametrize("kind", KINDS)
def test_channels_are_busy_side_by_side(kind: str) -> None:
    topology = presets.nodes(2, 4)
    plan = make(kind, 8, (512, 64 * MIB // 128), nodes=(4, 4), split=8, outer_channel="nic")
    timeline = simulate(plan, topology)
    nvlink, nic = (busy(timeline, channel) for channel in (0, 1))
    assert max(nvlink, nic) <= timeline.makespan < 1.2 * max(nvlink, nic)
    hidden = (nvlink + nic - timeline.makespan) / min(nvlink, nic)
    assert hidden > 0.8


@pytest.mark.parametrize("kind", KINDS)
def test_beats_the_flat_template_on_two_nodes(kind: str) -> None:
    """Flat, with each transfer on the channel that joins its ends."""
    topology = presets.nodes(2, 4)
    shape = (512, 64 * MIB // 128)
    times = []
    for split in (1, 4):
        flat = FLAT[kind](8, shape, split=split)
        c = flat.columns
        crosses = (c.src_rank < 4) != (c.dst_rank < 4)
        flat = replace(
            flat, columns=replace(c, channel=crosses.astype(int)), channels=("nvlink", "nic")
        )
        times.append(simulate(flat, topology).makespan)
    plan = make(kind, 8, shape, nodes=(4, 4), split=8, outer_channel="nic")
    assert simulate(plan, topology).makespan < 0.7 * min(times)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_refuses_more_hops_than_can_be_built(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "MOST_HOPS", 20)
    make(kind, 2, (8, 4))
    with pytest.raises(InputError, match="4 ranks and 8 pieces a shard make more than 20 operati"):
        make(kind, 4, (32, 4), split=8)


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_nodes_that_do_not_fit(kind: str) -> None:
    with pytest.raises(InputError, match=r"nodes \(2, 3\) have 5 ranks together, needs 4"):
        make(kind, 4, (8, 4), nodes=(2, 3))
    with pytest.raises(InputError, match=r"nodes\[1\] must be in 1\.\..*, found 0"):
        make(kind, 4, (8, 4), nodes=(4, 0))
