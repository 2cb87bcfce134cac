"""All-to-alls whose operations carry several blocks."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.simulate import simulate
from syncopate_jax.ir import presets
from syncopate_jax.ir.topology import Topology
from syncopate_jax.synthesis.bundles import bundled_drafts
from syncopate_jax.synthesis.request import make_request
from syncopate_jax.synthesis.synthesize import synthesize
from tests.conformance.template import assert_sound
from tests.synthesis.topologies import line, mixed, one_way_ring, star

TOPOLOGIES = {
    "ring": presets.ring(5),
    "torus": presets.torus(2, 4),
    "line": line(4),
    "star": star(3),
    "one way": one_way_ring(4),
    "mixed": mixed(2),
}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def test_plans_are_sound_and_no_faster_than_the_bound(topology: Topology) -> None:
    ranks = topology.num_ranks
    uneven = np.random.default_rng(ranks).integers(0, 3, (ranks, ranks)).tolist()
    for mode in ("push", "pull"):
        for sizes in (None, uneven):
            shape = (2 * ranks, 3)
            request = make_request("all_to_all", topology, shape, sizes=sizes, mode=mode)
            (one,) = bundled_drafts(request)
            plan = one.builds[0]()
            assert_sound(plan)
            made = simulate(plan, topology).makespan
            assert made >= request.bound().seconds * (1 - 1e-9)


def test_a_group_is_served_by_relays() -> None:
    request = make_request("all_to_all", star(4), (6, 2), group=(1, 3, 2))
    (one,) = bundled_drafts(request)
    assert_sound(one.builds[0]())


def test_blocks_that_go_on_together_are_one_operation() -> None:
    # Of a line of four the first sends three blocks at once, the next sends two of them on.
    request = make_request("all_to_all", line(4), (4, 2))
    (one,) = bundled_drafts(request)
    plan = one.builds[0]()
    c = plan.columns
    sent = (c.src_hi - c.src_lo)[:, 0]
    assert [int(n) for n in sent[(c.src_rank == 0) & (c.dst_rank == 1)]] == [2, 1]
    on = (c.src_rank == 1) & (c.dst_rank == 2)
    assert sorted(int(n) for n in sent[on]) == [1, 1, 1, 1]
    assert np.count_nonzero(c.src_rank != c.dst_rank) == 18


def test_there_is_none_where_all_are_joined() -> None:
    def made(topology: Topology, kind: str = "all_to_all", **arguments: int) -> int:
        request = make_request(kind, topology, (8, 8), **arguments)
        return len(list(bundled_drafts(request)))

    assert made(presets.h200_nvlink(4)) == made(presets.ring(1)) == 0
    assert made(line(4), "all_gather") == made(line(4), to_dimension=1) == 0
    assert made(line(4)) == 1


def test_small_blocks_take_them() -> None:
    topology = presets.ring(16)
    plan = synthesize("all_to_all", topology, (16, 256), tries=0)
    whole = synthesize("all_to_all", topology, (16, 256), tries=0, chunks=1)
    assert plan.num_ops < whole.num_ops
    assert simulate(plan, topology).makespan < 0.8 * simulate(whole, topology).makespan


def test_many_blocks_with_one_hop_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to bundle, however many blocks there are."""
    monkeypatch.setitem(synthesize.__globals__, "_MOST_HOPS", 10)
    assert_sound(synthesize("all_to_all", presets.h200_nvlink(8), (64, 64)))
