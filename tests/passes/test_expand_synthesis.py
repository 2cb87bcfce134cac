"""Expanding collectives by synthesis: every kind, over links that need relays, beside others."""

from __future__ import annotations

from typing import Any

import pytest

from syncopate_jax.errors import InputError
from syncopate_jax.ir import presets
from syncopate_jax.ir.comm import COLLECTIVES
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.text import from_text
from syncopate_jax.ir.topology import Topology, link_channel
from syncopate_jax.passes.expand_collectives import expand_collectives
from syncopate_jax.plans.collective import collective
from syncopate_jax.synthesis.subset import subset
from tests.conformance.template import assert_sound


def ends(plan: Plan) -> set[tuple[int, int]]:
    """Between which ranks the plan's operations travel."""
    pairs = zip(plan.columns.src_rank.tolist(), plan.columns.dst_rank.tolist(), strict=True)
    return {(s, d) for s, d in pairs if s != d}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in COLLECTIVES),
    ("all_to_all", {"concat_axis": 1}),
]


@pytest.mark.parametrize(("kind", "extra"), CASES)
@pytest.mark.parametrize("produced", [False, True])
def test_does_what_the_collective_did(kind: str, extra: dict[str, Any], produced: bool) -> None:
    whole = collective(5, (11, 7), kind=kind, produced=produced, **extra)
    topology = presets.ring(5)
    plan = expand_collectives(whole, how="synthesis", topology=topology)
    assert_sound(plan)
    joined = topology.channels[0].bandwidth > 0
    assert ends(plan) and all(joined[s, d] for s, d in ends(plan))
    assert plan.goals == whole.goals


def test_groups_use_their_own_links_and_channels() -> None:
    whole = collective(8, (8, 4), groups=((0, 1, 4, 5), (2, 3, 6, 7)))
    plan = expand_collectives(whole, "synthesis", topology=presets.nodes(2, 4))
    assert_sound(plan)
    assert {s in (0, 1, 4, 5) for s, _ in ends(plan)} == {True, False}
    assert all((s in (0, 1, 4, 5)) == (d in (0, 1, 4, 5)) for s, d in ends(plan))
    for rank in range(8):
        for op in plan.ops(rank):
            crosses = (op.src_rank < 4) != (op.dst_rank < 4)
            assert op.channel == ("nic" if crosses else "nvlink")


def test_each_kind_has_its_own_choice() -> None:
    whole = collective(4, (8, 4), kind="all_to_all")
    assert expand_collectives(whole, choose={"all_to_all": "direct"}).has_collectives()
    chosen = {"all_to_all": ("synthesis", {"chunks": 2, "mode": "pull"})}
    plan = expand_collectives(whole, choose=chosen, topology=presets.h200_nvlink(4))
    assert_sound(plan)
    assert "chunks=2" in plan.origins[0] and "mode=pull" in plan.origins[0]
    assert not expand_collectives(whole, "synthesis", {"all_to_all": "all_to_all_blocks"},
                                  presets.ring(4)).has_collectives()  # fmt: skip


def test_a_collective_that_stays_is_waited_for() -> None:
    whole = collective(3, (6, 4), split=2, produced=True)
    assert expand_collectives(whole, choose={"all_gather": "direct"}).num_ops == whole.num_ops
    assert_sound(expand_collectives(whole, choose={"all_gather": "direct"}))


def test_an_all_reduce_in_place_is_not_added_up_in_one_shot() -> None:
    parts = "".join(f"r{r}.0 all_reduce y[0:4] -> y[0:4] over 0:3 sum\n" for r in range(3))
    ends = "".join(f"initial r{r} y[0:4]\ngoal r{r} y[0:4] over 0:3\n" for r in range(3))
    whole = from_text(f"plan hand ranks 3\ntensor y [4] float32 per_rank\n{ends}{parts}")
    assert_sound(expand_collectives(whole, "synthesis", topology=presets.h200_nvlink(3)))


def test_refuses_what_has_no_topology_or_another() -> None:
    whole = collective(4, (8, 4))
    with pytest.raises(InputError, match=r"all_gather over \(0, 1, 2, 3\) needs a topology"):
        expand_collectives(whole, how="synthesis")
    with pytest.raises(InputError, match=r"topology ring_5 has 5 ranks, the plan has 4"):
        expand_collectives(whole, how="synthesis", topology=presets.ring(5))
    with pytest.raises(InputError, match=r"how 'magic' is not one of template, direct, synthesis"):
        expand_collectives(whole, how="magic")


def test_names_the_ranks_of_a_group_that_its_links_do_not_join() -> None:
    bandwidth = [[9, 1, 0], [1, 9, 0], [0, 0, 9]]
    split = Topology("split", 3, (link_channel("nvlink", bandwidth, latency=0, port_bandwidth=9),))
    with pytest.raises(InputError, match="rank 0 cannot reach rank 2"):
        expand_collectives(collective(3, (6, 4)), how="synthesis", topology=split)


def test_a_subset_keeps_links_and_ports() -> None:
    part = subset(presets.nodes(2, 4, 2), (5, 1, 4))
    nic = part.channel("nic")
    assert part.num_ranks == 3
    assert nic.bandwidth.tolist() == [[0, 50e9, 0], [50e9, 0, 50e9], [0, 50e9, 0]]
    assert nic.port.tolist() == [3, 1, 2]
    with pytest.raises(InputError, match=r"ranks \[1, 9\] must be different ranks of its 8"):
        subset(presets.nodes(2, 4), (1, 9))
