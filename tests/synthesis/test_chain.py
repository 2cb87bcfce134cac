"""Broadcasts along chains: one way and both ways round."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.simulate import simulate
from syncopate_jax.ir import presets
from syncopate_jax.ir.topology import Topology
from syncopate_jax.synthesis.chain import Chains, best_pieces, find_chains, send_along
from syncopate_jax.synthesis.draft import chained
from syncopate_jax.synthesis.network import make_network
from syncopate_jax.synthesis.request import make_request
from tests.conformance.template import assert_sound
from tests.synthesis.topologies import LATENCY, OVERHEAD, line, of_links, one_way_ring, star

SPEED = 100e9


def two_way(ranks: int) -> Topology:
    """A ring with a channel each way."""
    there = {(r, (r + 1) % ranks): SPEED for r in range(ranks)}
    back = {(r, (r - 1) % ranks): SPEED for r in range(ranks)}
    return of_links("two_way", ranks, there, back, port=SPEED)


def chains(topology: Topology, root: int = 0, pull: bool = False) -> Chains | None:
    return find_chains(make_network("t", topology, range(topology.num_ranks)), root, pull)


def test_a_chain_visits_every_member_once() -> None:
    found = chains(presets.torus(2, 4), 3)
    assert found is not None and len(found.ways) == 1
    net, links = found.network, found.ways[0]
    visited = [3, *net.dst[links].tolist()]
    assert sorted(visited) == list(range(8))
    assert net.src[links].tolist() == visited[:-1]
    assert chains(star(3)) is None
    assert find_chains(make_network("t", line(4), (0, 3)), 0, False) is None


def test_a_second_chain_leads_back_over_other_queues() -> None:
    for pull in (False, True):
        found = chains(two_way(5), 1, pull)
        assert found is not None and len(found.ways) == 2
        there, back = (found.network.dst[links].tolist() for links in found.ways)
        assert there == back[::-1] and sorted(there) == [0, 2, 3, 4]
    single = chains(presets.ring(5), 1)  # one queue a rank
    assert single is not None and len(single.ways) == 1
    assert len(chains(one_way_ring(4)).ways) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("pieces", [1, 2, 9])
def test_plans_along_chains_are_sound_and_as_fast_as_they_say(mode: str, pieces: int) -> None:
    for topology in (two_way(7), two_way(4), presets.ring(6), line(3)):
        request = make_request("broadcast", topology, (pieces * 512, 4096), root=0, mode=mode)
        found = find_chains(request.network, 0, request.pull)
        assert found is not None
        one = chained(request, pieces, found)
        plan = one.builds[0]()
        made = simulate(plan, topology).makespan
        assert made == pytest.approx(one.seconds, rel=1e-6)
        assert made >= request.bound().seconds * (1 - 1e-9)
        assert one.transfers == pieces * (topology.num_ranks - 1)
        small = make_request("broadcast", topology, (pieces, 2), root=0, mode=mode)
        assert_sound(chained(small, pieces, found).builds[0]())


def test_the_last_pieces_meet() -> None:
    found = chains(two_way(64))
    assert found is not None
    single = Chains(found.network, found.ways[:1])
    sizes = [1e6] * 300
    both = send_along(found, sizes).seconds
    hold = OVERHEAD + 1e6 / SPEED
    assert send_along(single, sizes).seconds == pytest.approx(
        299 * hold + 63 * (hold + LATENCY), rel=1e-6
    )
    # Half of the pieces leave each way, which takes 150; meeting saves half of the 63 hops.
    assert both < 150 * hold + 63 * (hold + LATENCY) - 20 * hold
    assert both > 150 * hold


def test_the_number_of_pieces_is_the_best() -> None:
    for topology in (presets.ring(8), two_way(8)):
        found = chains(topology)
        assert found is not None
        size = 1e9
        best = best_pieces(found, size, 1 << 20)
        least = send_along(found, [size / best] * best).seconds
        for other in (best // 3, best * 3):
            assert send_along(found, [size / other] * other).seconds > least
        assert best_pieces(found, size, 5) == 5
        assert best_pieces(found, 1.0, 1 << 20) == 1
    free = of_links("free", 2, {(0, 1): SPEED})
    network = make_network("t", free, range(2), roots=(0,))
    no_overhead = Chains(network.only(np.array([0])), (np.array([0]),))
    network.overhead[:] = 0.0
    assert best_pieces(Chains(network, no_overhead.ways), 1e9, 77) == 77
