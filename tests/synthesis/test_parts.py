"""The steps of synthesis one by one: network, matching, paths, times and pace."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.simulate import simulate
from syncopate_jax.errors import InputError
from syncopate_jax.ir import presets
from syncopate_jax.ir.comm import COLLECTIVES
from syncopate_jax.ir.topology import Topology
from syncopate_jax.synthesis.dispatch import Blocks, choose_paths, deliver
from syncopate_jax.synthesis.draft import draft
from syncopate_jax.synthesis.known import known_plans
from syncopate_jax.synthesis.listing import Transfer, list_times
from syncopate_jax.synthesis.matching import Style, spread
from syncopate_jax.synthesis.network import Network, make_network
from syncopate_jax.synthesis.nodes import Nodes, nodes_of
from syncopate_jax.synthesis.pacing import Scheduled, pace
from syncopate_jax.synthesis.request import make_request
from tests.synthesis.topologies import LATENCY, OVERHEAD, both_ways, line, mixed, of_links, star


def network(topology: Topology, group: tuple[int, ...] | None = None) -> Network:
    return make_network("t", topology, group or range(topology.num_ranks))


def test_host_is_left_alone_unless_it_alone_joins() -> None:
    assert network(presets.h200_nvlink(3)).channels == ("nvlink",)
    assert network(presets.nodes(2, 2)).channels == ("nvlink", "nic")
    assert network(presets.pcie_host(3)).channels == ("host",)


def test_relays_are_as_few_as_join_the_group() -> None:
    found = network(line(6), (1, 4))
    assert (found.members, found.relays) == ((1, 4), (2, 3))
    assert set(found.src.tolist()) == {1, 2, 3, 4}
    assert network(star(4), (0, 2)).relays == ()


def test_levels_and_clusters_follow_speed() -> None:
    found = network(presets.nodes(2, 3))
    assert set(found.levels()[found.channel == 0]) == {0}
    assert set(found.levels()[found.channel == 1]) == {1}
    assert found.clusters(0).tolist() == [0, 0, 0, 3, 3, 3]
    assert found.clusters(1).tolist() == [0] * 6


def test_reversed_links_lead_back() -> None:
    found = network(of_links("one", 3, {(0, 1): 1e9, (1, 2): 2e9, (2, 0): 3e9})).reversed()
    links = list(zip(found.src.tolist(), found.dst.tolist(), found.bandwidth, strict=True))
    assert links == [(1, 0, 1e9), (2, 1, 2e9), (0, 2, 3e9)]


def test_a_fully_connected_gather_is_the_rotation() -> None:
    net = network(presets.h200_nvlink(4))
    sends = spread(net, range(4), [1 << 20] * 4, Style())
    first = sends.start == 0
    pairs = zip(net.src[sends.link[first]], net.dst[sends.link[first]], strict=True)
    assert {(int(s), int(d)) for s, d in pairs} == {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert np.all(sends.parent == -1)


def test_slow_links_bring_what_their_cluster_lacks_first() -> None:
    net = network(presets.nodes(2, 4))
    sends = spread(net, range(8), [1 << 26] * 8, Style(deadline=0.0))
    slow = net.channel[sends.link] == 1
    brought = list(zip(net.dst[sends.link[slow]] // 4, sends.chunk[slow], strict=True))
    assert len(brought) == len(set(brought)) == 8
    free = spread(net, range(8), [1 << 26] * 8, Style())
    assert np.count_nonzero(net.channel[free.link] == 1) > 8


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("seed", [None, 1])
def test_the_clock_agrees_with_the_simulator(kind: str, seed: int | None) -> None:
    topologies = (presets.h200_nvlink(5), presets.torus(2, 3), presets.nodes(2, 3, 2), mixed(4))
    for topology in topologies:
        shape = (topology.num_ranks * 8, 1 << 18)
        one = draft(make_request(kind, topology, shape), 2, Style(seed))
        made = simulate(one.builds[0](), topology).makespan
        # An all-reduce and an exchange along one axis also copy within ranks.
        copies = kind in ("all_reduce", "all_to_all")
        assert made == pytest.approx(one.seconds, rel=0.1 if copies else 1e-6)


def test_opposite_blocks_of_a_ring_go_both_ways() -> None:
    net = network(presets.ring(4))
    src = np.arange(4)
    paths = choose_paths(net, Blocks(src, (src + 2) % 4, np.full(4, 1e6)))
    assert {len(path) for path in paths} == {2}
    load = np.bincount([int(net.src[link]) for path in paths for link in path])
    assert load.tolist() == [2, 2, 2, 2]


def test_ranks_of_a_node_begin_with_different_peers_over_slow_links() -> None:
    net = network(presets.nodes(2, 40))
    src, dst = (side.reshape(-1) for side in np.meshgrid(np.arange(40), np.arange(40, 80)))
    sends = deliver(net, Blocks(src, dst, np.full(1600, 1e6)))
    # Every adapter is busy all the time: 40 blocks of 2 + 20 us, and a latency of 5.
    assert sends.seconds == pytest.approx(40 * 22e-6 + 5e-6)


def test_what_is_held_back_waits_for_a_landing() -> None:
    # Ranks 1 and 2 both send to 0, whose port takes one at a time.
    topology = of_links("in", 3, both_ways((0, 1), (0, 2)), port=100e9)
    net = network(topology)
    links = [int(np.flatnonzero((net.src == s) & (net.dst == 0))[0]) for s in (1, 2)]
    none = np.zeros(0, np.int64)
    todo = Transfer(np.array(links), np.full(2, 1e6), none, none, [(0,), (1,)])
    start, landed = list_times(net, todo, pull=False)
    flow = OVERHEAD + 1e6 / 100e9
    assert start.tolist() == pytest.approx([0.0, flow + LATENCY])
    scheduled = Scheduled(
        np.array([1, 2]), net.egress[links], net.ingress[links], start, start + flow, landed,
        none, none,
    )  # fmt: skip
    waiter, awaited = pace(scheduled)
    assert (waiter.tolist(), awaited.tolist()) == ([1], [0])


def test_nodes_are_read_from_links() -> None:
    assert nodes_of(network(presets.nodes(2, 3))) == Nodes((3, 3), "nvlink", "nic")
    assert nodes_of(network(presets.h200_nvlink(4))) is None
    assert nodes_of(network(presets.ring(1))) is None
    # Slow links that do not join all: no agent could reach every other node.
    bridge = of_links(
        "bridge", 6, both_ways((0, 1), (2, 3), (4, 5)),
        both_ways((0, 2), (2, 4), (1, 3), (3, 5), bandwidth=10e9),
    )  # fmt: skip
    assert nodes_of(network(bridge)) is None
    uneven = of_links("uneven", 4, both_ways((0, 2), (1, 3)), both_ways((0, 1), bandwidth=10e9))
    assert nodes_of(network(uneven)) is None


def test_templates_that_a_topology_carries_are_attempts() -> None:
    def names(topology: Topology, kind: str = "all_gather", **arguments: object) -> set[str]:
        request = make_request(kind, topology, (24, 4), **arguments)  # type: ignore[arg-type]
        return {plan.origins[0].partition("(")[0] for plan in known_plans(request)}

    assert names(presets.ring(6)) == {"all_gather_ring"}
    assert names(presets.torus(2, 2)) == {"all_gather_double_ring"}
    assert names(presets.h200_nvlink(4), "all_reduce", mode="pull") == {"all_reduce_two_shot"}
    assert names(presets.ring(4), "all_to_all") == set()
    assert names(presets.nodes(2, 2)) == {"hierarchical_all_gather"}
    assert names(presets.nodes(2, 2), "all_reduce") == {"hierarchical_all_reduce"}
    assert (
        names(presets.ring(6), group=(0, 1, 2)) == names(presets.nodes(2, 2), "broadcast") == set()
    )


def test_unknown_channels_are_refused() -> None:
    with pytest.raises(InputError, match=r"no channel 'fast'; its channels are nvlink"):
        make_network("t", presets.ring(3), range(3), ("fast",))
