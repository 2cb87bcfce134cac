"""Synthesised plans: sound on any topology, near the bound and no worse than templates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from syncopate_jax.check.simulate import simulate
from syncopate_jax.check.verify import verify
from syncopate_jax.errors import InputError
from syncopate_jax.ir import presets
from syncopate_jax.ir.comm import COLLECTIVES
from syncopate_jax.ir.serial import from_json, to_json
from syncopate_jax.ir.topology import Topology
from syncopate_jax.registry import templates
from syncopate_jax.synthesis.synthesize import bound, synthesize
from tests.conformance.template import assert_sound
from tests.synthesis.topologies import line, mixed, of_links, one_way_ring, star

MIB = 1 << 20
TOPOLOGIES = {
    "full": presets.h200_nvlink(5),
    "ring": presets.ring(5),
    "torus": presets.torus(2, 3),
    "nodes": presets.nodes(2, 3),
    "shared nic": presets.nodes(3, 2, 1),
    "line": line(4),
    "star": star(3),
    "one way": one_way_ring(4),
    "one rank": presets.ring(1),
    "pcie": presets.pcie_host(3),
}


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def test_is_sound_on(topology: Topology, kind: str) -> None:
    ranks = topology.num_ranks
    for mode in ("push", "pull"):
        plan = synthesize(kind, topology, (2 * ranks + 1, 3), mode=mode, chunks=2, tries=0)
        assert_sound(plan)
        listed_on = plan.columns.dst_rank if mode == "pull" else plan.columns.src_rank
        assert np.array_equal(plan.columns.rank, listed_on)
        # ``simulate`` refuses an operation without a link.
        least = bound(kind, topology, (2 * ranks + 1, 3), mode=mode).seconds
        assert simulate(plan, topology).makespan >= least * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_is_sound_on_random_links_with_any_sizes(seed: int) -> None:
    topology = mixed(seed)
    sizes = (3, 0, 1, 5, 2, 1)
    for kind in COLLECTIVES:
        shape, extra = (12, 2), {"sizes": sizes}
        if kind == "all_to_all":
            rng = np.random.default_rng(seed)
            extra = {"sizes": rng.integers(0, 3, (6, 6)).tolist()}
        if kind == "broadcast":
            extra = {"root": 4}
        plan = synthesize(
            kind, topology, shape, seed=seed, tries=seed % 2, chunks=1 + seed % 2, **extra
        )
        assert_sound(plan)
        least = bound(kind, topology, shape, **extra).seconds
        assert simulate(plan, topology).makespan >= least * (1 - 1e-9) > 0


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_group_takes_no_others_where_it_is_joined(kind: str) -> None:
    extra: dict[str, Any] = {"group": (6, 2, 5)}
    plan = synthesize(kind, presets.h200_nvlink(8), (6, 4), **extra)
    assert_sound(plan)
    assert {int(r) for r in plan.columns.src_rank} | {int(r) for r in plan.columns.dst_rank} == {
        6,
        2,
        5,
    }


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_group_is_joined_by_relays(kind: str, mode: str) -> None:
    topology = star(4)
    plan = synthesize(kind, topology, (7, 4), group=(1, 3, 2), mode=mode, chunks=2)
    assert_sound(plan)
    assert {goal.rank for goal in plan.goals} == {1, 2, 3}
    assert 0 in plan.columns.src_rank and 4 not in plan.columns.dst_rank
    assert simulate(plan, topology).makespan > 0


def test_an_all_to_all_may_change_the_sharded_dimension() -> None:
    plan = synthesize(
        "all_to_all", line(3), (5, 7), to_dimension=1, sizes=(1, 4, 0), sizes_to=(3, 0, 4)
    )
    assert_sound(plan)
    assert len(plan.tensors) == 1
    assert [goal.box.shape for goal in plan.goals] == [(5, 3), (5, 4)]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("all_to_all", {}), ("broadcast", {"root": np.int64(1)}), ("all_gather", {})],
)
def test_plans_hold_plain_integers(kind: str, arguments: dict[str, Any]) -> None:
    plan = synthesize(kind, presets.nodes(2, 2), (8, 4), **arguments)
    assert "int64" not in repr((plan.initial, plan.goals, plan.origins))
    assert from_json(to_json(plan)) == plan


def test_sums_may_be_maxima_and_need_not_wait_for_tiles() -> None:
    plan = synthesize(
        "all_reduce", presets.ring(3), (6, 2), reduce="max", produced=False, dtype="float32"
    )
    assert_sound(plan)
    assert len(plan.columns.cdep_rank) == 0
    assert plan.tensors[0].dtype == "float32"


def test_names_and_origin_say_what_was_asked() -> None:
    plan = synthesize("all_gather", presets.ring(3), (6, 2), chunks=2, tensor="act", name="mine")
    assert (plan.name, plan.tensors[0].name) == ("mine", "act")
    assert plan.origins == (
        "mine(kind=all_gather, topology=ring_3, dimension=0, mode=push, chunks=2)",
    )


def test_the_same_arguments_give_the_same_plan() -> None:
    made = [synthesize("all_gather", presets.nodes(2, 2), (8, 6), seed=3) for _ in range(2)]
    assert made[0] == made[1]


def test_channels_that_are_asked_for_are_used() -> None:
    topology = presets.h200_nvlink(3)
    plan = synthesize("all_gather", topology, (999, 512), channels=("host",))
    assert plan.channels == ("host",)
    both = synthesize("broadcast", topology, (1 << 20, 512), chunks=64, channels=("nvlink", "host"))
    assert set(both.columns.channel.tolist()) == {0, 1}
    usual = synthesize("broadcast", topology, (1 << 20, 512), chunks=64)
    assert simulate(both, topology).makespan < simulate(usual, topology).makespan


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_empty_data_moves_nothing(kind: str) -> None:
    plan = synthesize(kind, presets.ring(3), (0, 4))
    assert plan.num_ops == 0 and plan.goals == ()
    assert bound(kind, presets.ring(3), (0, 4)).seconds == 0


LARGE = dict.fromkeys(COLLECTIVES, 64 * MIB) | {"all_to_all": 16 * MIB, "broadcast": 4096 * MIB}


def large(kind: str, ranks: int) -> tuple[int, int]:
    rows = 1 << 16 if kind == "broadcast" else 64 * ranks
    return rows, LARGE[kind] // 2 // (rows if kind == "broadcast" else 64)


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("name", ["h200", "ring", "torus:2x4", "nodes:2x4"])
def test_comes_near_the_bound(name: str, kind: str) -> None:
    topology, shape = presets.preset(name, 8), large(kind, 8)
    chunks = 256 if kind == "broadcast" else 8 if name == "nodes:2x4" else None
    plan = synthesize(kind, topology, shape, tries=0, chunks=chunks)
    assert verify(plan) == ()
    ratio = simulate(plan, topology).makespan / bound(kind, topology, shape).seconds
    assert 1 - 1e-9 <= ratio < 1.1


TEMPLATES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "swizzle": ("all_gather_swizzle", "h200", {}),
    "ring": ("all_gather_ring", "ring", {"split": 2}),
    "reduce ring": ("reduce_scatter_ring", "ring", {"split": 2}),
    "direct": ("reduce_scatter_direct", "h200", {}),
    "two shot": ("all_reduce_two_shot", "h200", {}),
    "ring all-reduce": ("all_reduce_two_shot", "ring", {"algorithm": "ring"}),
    "blocks": ("all_to_all_blocks", "h200", {}),
    "chain": ("broadcast", "h200", {"split": 256}),
    **{
        kind: (f"hierarchical_{kind}", "nodes:2x4",
               {"nodes": (4, 4), "outer_channel": "nic", "split": 8})
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_is_no_worse_than_the_template(case: tuple[str, str, dict[str, Any]]) -> None:
    name, preset, arguments = case
    kind = next(kind for kind in COLLECTIVES if kind in name)
    topology, shape = presets.preset(preset, 8), large(kind, 8)
    template = simulate(templates.get(name)(8, shape, **arguments), topology).makespan
    chunks = None if name == "hierarchical_all_reduce" else arguments.get("split")
    plan = synthesize(kind, topology, shape, tries=0, chunks=chunks)
    made = simulate(plan, topology).makespan
    assert made <= template * (1 + 1e-9)


ONE_HOP: list[tuple[str, str, dict[str, Any]]] = [
    ("all_gather", "all_gather_swizzle", {}),
    ("reduce_scatter", "reduce_scatter_direct", {}),
    ("all_to_all", "all_to_all_blocks", {}),
    ("all_to_all", "all_to_all_waves", {"to_dimension": 1}),
]


@pytest.mark.parametrize(("ranks", "rows"), [(3, 17), (3, 8), (5, 7)])
@pytest.mark.parametrize(("kind", "name", "more"), ONE_HOP, ids=[case[1] for case in ONE_HOP])
def test_small_ragged_tensors_take_one_hop(
    kind: str, name: str, more: dict[str, Any], ranks: int, rows: int
) -> None:
    topology = presets.h200_nvlink(ranks)
    template = templates.get(name)(ranks, (rows, 8))
    plan = synthesize(kind, topology, (rows, 8), mode="push", produced=False, **more)
    assert verify(plan) == ()
    assert (plan.tensors, plan.goals) == (template.tensors, template.goals)
    times = (simulate(one, topology).makespan for one in (plan, template))
    assert next(times) <= next(times) * (1 + 1e-9)


def test_a_small_all_reduce_takes_one_hop() -> None:
    plan = synthesize("all_reduce", presets.h200_nvlink(4), (64, 8))
    assert plan.num_ops == 16
    assert plan.columns.src_size().tolist() == [512] * 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("name", ["h200", "torus:8x8", "nodes:2x32", "ring"])
def test_64_ranks_come_near_the_bound(name: str, kind: str) -> None:
    topology, shape = presets.preset(name, 64), large(kind, 64)
    if kind == "broadcast":
        shape = (shape[0], 4 * shape[1])
    plan = synthesize(kind, topology, shape)
    assert verify(plan) == ()
    ratio = simulate(plan, topology).makespan / bound(kind, topology, shape).seconds
    assert 1 - 1e-9 <= ratio < 1.1


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("gather", {}, r"kind 'gather' is not one of all_gather, reduce_scatter, all_reduce"),
    ("all_gather", {"dtype": "float12"}, r"dtype 'float12' is not one of"),
    ("all_gather", {"group": ()}, r"group is empty, needs at least one rank"),
    ("all_gather", {"group": (0, 9)}, r"group has ranks \[9\], topology ring_4 has 4 ranks"),
    ("all_gather", {"group": (0, -1)}, r"group\[1\] must be in 0\.\."),
    ("all_gather", {"group": (1, 1)}, r"group \(1, 1\) lists a rank twice"),
    ("all_gather", {"sizes": (4, 4)}, r"4 ranks need as many shards, found 2"),
    ("all_gather", {"sizes": (4, 4, 4, 4)}, r"shards \(4, 4, 4, 4\) add up to 16, axis 0 .* 8"),
    ("all_gather", {"dimension": 2}, r"axis 2 is not an axis of shape \(8, 4\)"),
    ("all_gather", {"chunks": 0}, r"chunks must be in 1\.\..*, found 0"),
    (
        "all_gather",
        {"chunks": 10**6, "shape": (4 * 10**6, 4)},
        r"chunks 1000000 makes 4000000 pieces of the shards of 4 ranks, at most 1048576 fit; give "
        r"chunks a smaller number",
    ),
    (
        "all_to_all",
        {"chunks": 10**6, "shape": (4, 4 * 10**6), "to_dimension": 1},
        r"chunks 1000000 makes 16000000 pieces",
    ),
    ("all_gather", {"tries": -1}, r"tries must be in 0\.\..*, found -1"),
    ("all_gather", {"mode": "carry"}, r"mode 'carry' is not one of push, pull"),
    ("all_gather", {"channels": ("nic",)}, r"no channel 'nic'; its channels are nvlink"),
    ("all_gather", {"root": 1}, r"root 1 is given, but all_gather has none"),
    ("all_gather", {"to_dimension": 1}, r"are of an all_to_all, not of all_gather"),
    ("broadcast", {"root": 7}, r"root 7 is not one of the group \(0, 1, 2, 3\)"),
    ("broadcast", {"sizes": (8,)}, r"sizes are given, but a broadcast has one tensor"),
    ("reduce_scatter", {"reduce": "mean"}, r"reduce 'mean' is not one of sum, max"),
    ("all_to_all", {"sizes_to": (1, 1, 1, 1)}, r"sizes_to needs to_dimension"),
    ("all_to_all", {"to_dimension": -2}, r"dimension and to_dimension are both 0; leave"),
    ("all_to_all", {"sizes": [[1, 2]]}, r"sizes has rows of \[2\], needs 4 rows of 4, a row a"),
    ("all_to_all", {"sizes": [[-1] * 4] * 4}, r"sizes\[0\]\[0\] must be in 0\.\..*, found -1"),
    ("all_to_all", {"sizes": [[3] * 4] * 4}, r"member at 0 sends 12 in sizes, its extent .* 8"),
]


@pytest.mark.parametrize(("kind", "wrong", "message"), BAD, ids=[message for *_, message in BAD])
def test_refuses(kind: str, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        synthesize(kind, presets.ring(4), **({"shape": (8, 4)} | wrong))


def test_a_topology_is_no_name() -> None:
    with pytest.raises(
        InputError, match="synthesis_broadcast: topology needs a Topology, found 'h"
    ):
        synthesize("broadcast", "h200", (8, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_names_ranks_that_cannot_be_reached(kind: str) -> None:
    cut = of_links("cut", 5, {(0, 1): 1e9, (1, 0): 1e9, (2, 0): 1e9, (3, 4): 1e9, (4, 3): 1e9})
    message = r"on topology cut rank 0 cannot reach ranks 2, 3, 4 \(channels c0\); add links"
    with pytest.raises(InputError, match=message):
        synthesize(kind, cut, (10, 4))


def test_a_broadcast_needs_ways_from_its_root_only() -> None:
    out = of_links("out", 3, {(0, 1): 1e9, (1, 2): 1e9})
    assert_sound(synthesize("broadcast", out, (4, 4)))
    with pytest.raises(InputError, match="rank 1 cannot reach rank 0"):
        synthesize("broadcast", out, (4, 4), root=1)


def test_an_all_reduce_needs_a_channel_for_copies() -> None:
    full = presets.ring(3)
    channel = full.channels[0]
    bare = channel.bandwidth.copy()
    np.fill_diagonal(bare, 0)
    topology = replace(full, channels=(replace(channel, bandwidth=bare),))
    with pytest.raises(InputError, match="no channel of topology ring_3 copies within a rank"):
        synthesize("all_reduce", topology, (6, 4))
