"""Gathers in levels: what grids hold, plans that carry several shards, and when they are chosen."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.simulate import simulate
from syncopate_jax.ir import presets
from syncopate_jax.synthesis.levels import Grid, merged_gathers
from syncopate_jax.synthesis.merged import merged_drafts
from syncopate_jax.synthesis.network import make_network
from syncopate_jax.synthesis.request import make_request
from syncopate_jax.synthesis.synthesize import synthesize
from tests.conformance.template import assert_sound
from tests.synthesis.topologies import star

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
TOPOLOGIES = {
    "full": presets.h200_nvlink(6),
    "nodes": presets.nodes(2, 4),
    "shared nic": presets.nodes(2, 4, 2),
    "torus": presets.torus(3, 4),
}


def test_grids_hold_runs_of_shards() -> None:
    grid = Grid((2, 3), (0, 1))
    assert grid.lines(0).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert grid.lines(1).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert grid.runs(0)[0] == 1 and grid.runs(0)[1].tolist() == [[0], [1], [2], [3], [4], [5]]
    assert grid.runs(1)[0] == 2 and grid.runs(1)[1].tolist() == [[0], [0], [2], [2], [4], [4]]
    # The other way round what a rank holds is not consecutive; its own comes first.
    turned = Grid((2, 3), (1, 0)).runs(1)
    assert turned[0] == 1 and turned[1][3].tolist() == [3, 5, 1]


def test_a_square_needs_fewer_operations() -> None:
    topology = presets.h200_nvlink(16)
    net, sizes = make_network("t", topology, range(16)), np.full(16, 1024.0)
    merged = min(merged_gathers(net, sizes, False), key=lambda one: one.seconds(net, sizes, False))
    assert len(merged.link) == 16 * 6
    assert sorted(set(merged.bytes(sizes).tolist())) == [1024.0, 4096.0]
    # Two levels of three pushes, each of 2 us, and two latencies of 11 us.
    assert merged.seconds(net, sizes, False) == pytest.approx(34e-6, rel=0.01)
    back = merged.backwards()
    assert back.link.tolist() == merged.link[::-1].tolist()
    assert len(back.waiter) == len(merged.waiter) and np.all(back.waiter > back.awaited)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_plans_are_sound(name: str, kind: str) -> None:
    topology = TOPOLOGIES[name]
    ranks = topology.num_ranks
    ragged = [(3 * rank) % 4 for rank in range(ranks)]
    tried = 0
    for mode in ("push", "pull"):
        for sizes in (None, ragged):
            shape = (2 * ranks if sizes is None else sum(ragged), 3)
            request = make_request(kind, topology, shape, mode=mode, sizes=sizes)
            for one in merged_drafts(request):
                plan = one.builds[0]()
                assert_sound(plan)
                made = simulate(plan, topology).makespan
                assert made >= request.bound().seconds * (1 - 1e-9)
                tried += 1
    assert tried >= 4


def test_there_are_none_where_they_would_not_do() -> None:
    def made(kind: str, topology: object, **arguments: object) -> int:
        return len(list(merged_drafts(make_request(kind, topology, (12, 4), **arguments))))  # type: ignore[arg-type]

    assert made("all_gather", presets.h200_nvlink(4)) > 0
    assert made("all_gather", presets.h200_nvlink(4), produced=True) == 0
    assert made("all_to_all", presets.h200_nvlink(4)) == 0
    assert made("all_gather", presets.h200_nvlink(5)) == 0
    assert made("all_gather", presets.ring(6)) == 0
    assert made("all_gather", star(4), group=(1, 2, 3, 4)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_small_tensors_take_them(kind: str) -> None:
    topology = presets.h200_nvlink(16)
    plan = synthesize(kind, topology, (64, 1024), tries=0)
    whole = synthesize(kind, topology, (64, 1024), tries=0, chunks=1)
    assert_sound(plan)
    assert plan.num_ops < whole.num_ops
    assert simulate(plan, topology).makespan < 0.95 * simulate(whole, topology).makespan
