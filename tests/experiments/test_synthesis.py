"""The synthesis experiment: its topologies, a row of results and the table made of rows."""

from __future__ import annotations

from experiments.synthesis import run
from syncopate_jax.check.simulate import simulate
from syncopate_jax.plans.all_gather_ring import all_gather_ring


def test_a_channel_each_way_has_every_link_once() -> None:
    for ranks, ring_channels, torus_channels in ((4, 2, 2), (8, 2, 3), (16, 2, 4)):
        found = run.topologies(ranks)
        for name, channels in (("ring", ring_channels), ("torus", torus_channels)):
            plain, split = found[name], found[f"{name}, a channel each way"]
            assert len(split.channels) == channels
            links = sum((channel.bandwidth > 0).astype(int) for channel in split.channels)
            for s in range(ranks):
                for d in range(ranks):
                    if s != d:
                        assert links[s, d] == (plain.channels[0].bandwidth[s, d] > 0)


def test_rows_and_table() -> None:
    ring = run.topologies(4)["ring"]
    row = run.measure("all_gather", "ring", ring, "small")
    assert 1 <= row["ratio"] < 1.1
    assert row["template"].startswith("all_gather_ring split ")
    shape = run.shape_of("all_gather", 4, row["bytes"])
    assert row["template_us"] <= simulate(all_gather_ring(4, shape), ring).makespan * 1e6 + 0.01
    assert f"| ring | {row['ratio']:.3f} (" in run.table([row], "small")
    exchange = run.measure("all_to_all", "ring", ring, "small")
    assert (exchange["template"], exchange["template_us"]) == ("none", None)
