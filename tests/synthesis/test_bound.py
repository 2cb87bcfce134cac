"""The bound: each term by hand, rounds against every way to spread a word, and no plan below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from syncopate_jax.check.simulate import simulate
from syncopate_jax.errors import InputError
from syncopate_jax.ir import presets
from syncopate_jax.ir.comm import COLLECTIVES
from syncopate_jax.ir.topology import Topology
from syncopate_jax.registry import templates
from syncopate_jax.synthesis.bound import Bound, Demand, lower_bound, reaching
from syncopate_jax.synthesis.network import Network, make_network
from syncopate_jax.synthesis.synthesize import bound
from tests.synthesis.topologies import LATENCY, OVERHEAD, line, star

MICRO = 1e-6


def network(topology: Topology) -> Network:
    return make_network("t", topology, range(topology.num_ranks))


def seconds(topology: Topology, kind: str, sizes: object, pull: bool = False) -> dict[str, float]:
    found = lower_bound(network(topology), Demand(kind, np.array(sizes, float)), pull)
    return {name: getattr(found, name) for name in Bound.__slots__}


def test_bound_of_a_line() -> None:
    first, speed = LATENCY + OVERHEAD, 100e9
    found = seconds(line(3), "all_gather", [1e6, 2e6, 4e6])
    # Rank 0 takes in 6 MB over its one link; 14 MB are delivered by three queues; rank 2's 4 MB
    # come to rank 0 by way of rank 1.
    assert found["cut"] == pytest.approx(first + 6e6 / speed)
    assert found["work"] == pytest.approx(first + 14e6 / (3 * speed))
    assert found["path"] == pytest.approx(2 * first + 4e6 / speed)
    back = seconds(line(3), "reduce_scatter", [1e6, 2e6, 4e6])
    assert back["cut"] == found["cut"] and back["path"] == pytest.approx(found["path"])
    assert seconds(line(3), "all_reduce", [1e6] * 3)["work"] == pytest.approx(
        first + 12e6 / (3 * speed)
    )
    blocks = seconds(line(3), "all_to_all", [[0, 1e6, 1e6], [1e6, 0, 1e6], [1e6, 1e6, 0]])
    assert blocks["work"] == pytest.approx(first + 8e6 / (3 * speed))
    assert blocks["cut"] == pytest.approx(first + 2e6 / speed)


def test_bound_of_a_root_that_pushes_to_one_at_a_time() -> None:
    ring = presets.ring(4)
    pushed = seconds(ring, "broadcast", [1e9, 0, 0, 0])
    pulled = seconds(ring, "broadcast", [1e9, 0, 0, 0], pull=True)
    speed = float(ring.channels[0].bandwidth[0, 1])
    assert pushed["issue"] == pytest.approx(13e-6 + 1e9 / speed)
    assert pushed["work"] < pushed["issue"] and pulled["issue"] == pytest.approx(pushed["issue"])


def test_bound_of_clusters_in_an_all_reduce() -> None:
    found = seconds(presets.nodes(4, 2), "all_reduce", [1e9 / 8] * 8)
    # 2 (4 - 1) transfers of 1 GB between nodes, over 8 adapters of 50 GB/s.
    assert found["cut"] == pytest.approx(7e-6 + 6e9 / 400e9)


def test_bound_of_nothing() -> None:
    assert set(seconds(line(3), "all_gather", [0, 0, 0]).values()) == {0.0}


def test_bound_of_a_root_whose_last_bytes_have_far_to_go() -> None:
    found = seconds(line(4), "broadcast", [3e6, 0, 0, 0])
    assert found["path"] == pytest.approx(3 * (LATENCY + OVERHEAD) + 3e6 / 100e9)
    # The middle of a star sends to one at a time, so 4 MB leave it before the last has its share.
    sent = seconds(star(4), "all_to_all", np.eye(5)[[0] * 5] * 0 + np.eye(5)[0][:, None] * 1e6)
    assert sent["issue"] == pytest.approx(LATENCY + OVERHEAD + 4e6 / 100e9)


def ways(others: int, queues: list[tuple[float, float]]) -> Iterator[float]:
    """When the last of ``others`` hears, for every way to tell them one after the other."""

    def go(heard: list[tuple[float, tuple[int, ...]]], left: int) -> Iterator[float]:
        if not left:
            yield max(time for time, _ in heard)
            return
        for teller, (time, sent) in enumerate(heard):
            for queue, (overhead, latency) in enumerate(queues):
                more = tuple(count + (place == queue) for place, count in enumerate(sent))
                told = time + more[queue] * overhead + latency
                now = [*heard, (told, (0,) * len(queues))]
                now[teller] = (time, more)
                yield from go(now, left - 1)

    return go([(0.0, (0,) * len(queues))], others)


@pytest.mark.parametrize("queues", [[(2.0, 11.0)], [(3.0, 1.0)], [(2.0, 11.0), (2.0, 5.0)]])
@pytest.mark.parametrize("others", [1, 2, 3, 4, 5])
def test_no_way_to_spread_a_word_is_faster(others: int, queues: list[tuple[float, float]]) -> None:
    assert reaching(others, queues) == pytest.approx(min(ways(others, queues)))


def test_rounds_of_a_fully_connected_group() -> None:
    # 1 hears at 13 us, then one more every 2 us from the root; the seventh at 25 us.
    topology, size = presets.h200_nvlink(8), 392e9 * MICRO
    found = seconds(topology, "broadcast", [size, *[0] * 7])
    assert found["rounds"] == pytest.approx(26 * MICRO)
    assert seconds(topology, "all_gather", [size] * 8)["rounds"] == pytest.approx(26 * MICRO)
    assert seconds(topology, "reduce_scatter", [size] * 8)["rounds"] == pytest.approx(26 * MICRO)
    assert seconds(topology, "all_reduce", [size] * 8)["rounds"] == pytest.approx(33 * MICRO)
    # Everybody may pull from the root at once, but not from everybody.
    pulled = seconds(topology, "broadcast", [size, *[0] * 7], pull=True)
    assert pulled["rounds"] == pytest.approx(14 * MICRO)
    assert seconds(topology, "all_gather", [size] * 8, pull=True)["rounds"] == pytest.approx(
        26 * MICRO
    )
    # One block to send: it goes to one rank only.
    one = np.zeros((8, 8))
    one[3, 5] = size
    assert seconds(topology, "all_to_all", one)["rounds"] == pytest.approx(14 * MICRO)


PLANS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "all_gather": [
        ("all_gather_swizzle", {}), ("all_gather_ring", {}), ("all_gather_mesh", {}),
        ("hierarchical_all_gather", {}),
    ],
    "reduce_scatter": [
        ("reduce_scatter_direct", {}), ("reduce_scatter_ring", {}),
        ("hierarchical_reduce_scatter", {}),
    ],
    "all_reduce": [
        ("all_reduce_one_shot", {}), ("all_reduce_two_shot", {}),
        ("all_reduce_two_shot", {"algorithm": "ring"}), ("hierarchical_all_reduce", {}),
    ],
    "all_to_all": [("all_to_all_blocks", {}), ("hierarchical_all_to_all", {})],
    "broadcast": [("broadcast", {}), ("broadcast", {"algorithm": "direct"})],
}  # fmt: skip


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("columns", [1, 1 << 10, 1 << 16])
def test_no_template_beats_it(kind: str, columns: int) -> None:
    beaten = 0
    for topology in (presets.h200_nvlink(8), presets.ring(8), presets.torus(2, 4)):
        for mode in ("push", "pull"):
            least = bound(kind, topology, (64, columns), mode=mode).seconds
            for name, arguments in PLANS[kind]:
                for split in (1, 4):
                    plan = templates.get(name)(
                        8, (64, columns), split=split, mode=mode, **arguments
                    )
                    try:
                        made = simulate(plan, topology).makespan
                    except InputError:
                        continue  # it takes links that are not there
                    assert made >= least * (1 - 1e-9), (topology.name, mode, name, split)
                    beaten += 1
    assert beaten >= 8
