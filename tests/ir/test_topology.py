"""Topologies: what they accept, what the presets hold, and that JSON keeps every figure."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.ir import presets, topology_json
from syncopate_jax.ir.topology import (
    Channel,
    Topology,
    link_channel,
    uniform_channel,
)

READY = [
    presets.h200_nvlink(1),
    presets.h200_nvlink(8),
    presets.h200_measured(4),
    presets.h100_nvlink(4),
    presets.pcie_host(2),
    presets.ring(5),
    presets.ring(1),
    presets.torus(3, 4),
    presets.nodes(2, 4),
    presets.nodes(3, 4, nics_per_node=2),
]


@pytest.mark.parametrize("topology", READY, ids=lambda t: f"{t.name}-{t.num_ranks}")
def test_json_keeps_every_figure(topology: Topology, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    topology_json.save(topology, path)
    assert topology_json.load(path) == topology
    assert topology_json.to_dict(topology_json.load(path)) == topology_json.to_dict(topology)


def test_json_of_a_uniform_topology_is_short() -> None:
    assert len(json.dumps(topology_json.to_dict(presets.h200_nvlink(1024)))) < 1000


def test_uneven_figures_survive_json() -> None:
    rng = np.random.default_rng(0)
    channel = Channel(
        "nvlink",
        rng.random((3, 3)),
        rng.random((3, 3)),
        np.array([1, 0, 1]),
        rng.random(2),
        rng.random(2),
        overhead=0.5,
        local_ports=True,
    )
    uneven = Topology("uneven", 3, (channel,), rng.random(3), 0.25)
    again = topology_json.from_dict(json.loads(json.dumps(topology_json.to_dict(uneven))))
    assert again == uneven and len({again, uneven}) == 1
    assert again != presets.ring(3)
    assert uneven != replace(uneven, flops=uneven.flops * 2)
    assert uneven != replace(uneven, channels=(replace(channel, overhead=0.25),))
    assert uneven != 3 and channel != 3


def test_presets_join_whom_they_should() -> None:
    nodes = presets.nodes(2, 4)
    assert nodes.joining(0, 3) == ("nvlink", "host")
    assert nodes.joining(0, 4) == ("nic", "host")
    assert presets.torus(3, 4).joining(0, 4) == ("nvlink",)
    assert presets.torus(3, 4).joining(0, 5) == ()
    assert np.count_nonzero(presets.ring(6).channel("nvlink").bandwidth[0]) == 3
    assert presets.nodes(2, 4, 2).channel("nic").port.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_h200_figures_give_the_measured_times() -> None:
    """The copies the constants were read from come out within 5%."""
    channel = presets.h200_nvlink(2).channel("nvlink")
    for size, seconds in [(64 << 10, 13.5e-6), (64 << 20, 188e-6), (512 << 20, 1370e-6)]:
        predicted = channel.overhead + size / channel.bandwidth[0, 1] + channel.latency[0, 1]
        assert predicted == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    ("text", "ranks", "name"),
    [
        ("h100", 8, "h100_nvlink"),
        ("h200", 2, "h200_nvlink"),
        ("h200_measured", 4, "H200s, measured"),
        ("pcie", 2, "pcie_host"),
        ("ring", 4, "ring_4"),
        ("nodes:2x4", 8, "nodes_2x4"),
        ("torus:2x3", 6, "torus_2x3"),
    ],
)
def test_presets_by_name(text: str, ranks: int, name: str) -> None:
    found = presets.preset(text, ranks)
    assert (found.name, found.num_ranks) == (name, ranks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "b300",
            "no topology preset is called 'b300'; known: h100, h200, h200_measured, pcie, ring, "
            "nodes:AxB, torus",
        ),
        ("h200:2x2", "no topology preset is called 'h200:2x2'"),
        ("nodes", "topology preset 'nodes': write two counts, as in nodes:2x8, of up to 6"),
        ("torus:2x-3", "write two counts, as in torus:2x8, of up to 6"),
        ("nodes:1x" + 5000 * "9", "write two counts, as in nodes:2x8, of up to 6"),
        ("torus:999999x64", "torus: number of ranks must be at most 4096, found 63999936"),
        ("torus:2x2", "topology preset 'torus:2x2' has 4 ranks, the plan has 8"),
        ("torus:0x8", "torus: needs at least 1 row and column, found 0 and 8"),
        ("nodes:0x8", "nodes: needs at least 1 node, rank and adapter, found 0, 8 and 8"),
    ],
)
def test_bad_preset_names(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        presets.preset(text, 8)


def test_topology_checks_its_figures() -> None:
    good = uniform_channel("nvlink", 2, bandwidth=1, latency=0)
    for make, message in [
        (lambda: Topology("t", 0, ()), "topology t: needs at least 1 rank, found 0"),
        (lambda: Topology("t", 3, (), np.ones(2)), r"flops has shape \(2,\), needs \(3,\)"),
        (lambda: Topology("t", 1, (), -1.0), "topology t: flops must be finite and not negative"),
        (
            lambda: Topology("t", 1, (), 1.0, -2.0),
            "signal_latency must be finite and not negative, found -2.0",
        ),
        (lambda: Topology("t", 2, (good, good)), r"channel names repeat: \['nvlink', 'nvlink'\]"),
        (lambda: Topology("t", 3, (good,)), "channel nvlink joins 2 ranks, needs 3"),
        (
            lambda: Topology("t", 2, (good,)).channel("nic"),
            "topology t: no channel 'nic'; its channels are nvlink",
        ),
        (lambda: Topology("t", 2, ()).channel("nic"), "its channels are none"),
    ]:
        with pytest.raises(InputError, match=message):
            make()


def test_channel_checks_its_figures() -> None:
    def make(**changes: Any) -> Channel:
        figures: dict[str, Any] = {
            "bandwidth": np.ones((2, 2)),
            "latency": np.zeros((2, 2)),
            "port": [0, 1],
            "egress": [1, 1],
            "ingress": [1, 1],
        }
        return Channel("c", **(figures | changes))

    for changes, message in [
        ({"bandwidth": np.ones(3)}, r"channel c: bandwidth has shape \(3,\), needs \(3, 3\)"),
        ({"latency": np.ones((2, 3))}, r"latency has shape \(2, 3\), needs \(2, 2\)"),
        ({"ingress": [1]}, r"ingress has shape \(1,\), needs \(2,\)"),
        ({"latency": np.full((2, 2), np.nan)}, "latency must be finite and not negative"),
        ({"overhead": -1.0}, "overhead must be finite and not negative, found -1.0"),
        ({"port": [0, 2]}, "port must name ports 0 to 1, found 0 to 2"),
        ({"egress": [1, 0]}, "a port in use has capacity 0; leave links out with bandwidth 0"),
    ]:
        with pytest.raises(InputError, match=message):
            make(**changes)
    with pytest.raises(ValueError, match="read-only"):
        make().bandwidth[0, 0] = 2


def test_link_channel_broadcasts_port_capacity() -> None:
    found = link_channel("c", np.ones((2, 2)), latency=1, port_bandwidth=[3, 4])
    assert found.egress.tolist() == [3, 4]
    assert found.latency.tolist() == [[0, 1], [1, 0]]


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda top: top.pop(key)


def put(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda top: top.update({key: value})


def put_channel(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda top: top["channels"][0].update({key: value})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop("flops"), r"topology: lacks \['flops'\], has unknown \[\]"),
        (put("colour", 1), r"topology: lacks \[\], has unknown \['colour'\]"),
        (put("format", "x"), "format is 'x', needs 'syncopate-topology'"),
        (put("version", 2), "version is 2, this release reads 1"),
        (put("name", ""), "topology: name must be a non-empty string, found ''"),
        (put("num_ranks", 0), "num_ranks must be an integer from 1 to 4096, found 0"),
        (put("num_ranks", True), "num_ranks must be an integer from 1 to 4096, found True"),
        (put("num_ranks", 10**9), "num_ranks must be an integer from 1 to 4096"),
        (put("flops", "fast"), "flops must be a number, found 'fast'"),
        (put("flops", [1.0]), "topology: flops has 1 entries, needs 2"),
        (put("flops", [1.0, None]), r"flops\[1\] must be a number, found None"),
        (put("flops", 10**400), "flops must be finite and not negative, found 1000"),
        (put("signal_latency", -1), "signal_latency must be finite and not negative, found -1"),
        (put("channels", {}), "topology: channels must be a list"),
        (put("channels", [3]), r"channels\[0\]: must be an object, found int"),
        (put_channel("name", 3), r"channels\[0\]: name must be a non-empty string, found 3"),
        (put_channel("local_ports", 1), "local_ports must be true or false"),
        (put_channel("port", [0]), "port must be a list of 2 port numbers"),
        (put_channel("port", [0, -1]), "port must be a list of 2 port numbers"),
        (put_channel("port", [0, 10**12]), "port must be a list of 2 port numbers"),
        (put_channel("bandwidth", 3), "bandwidth must be pair and self, or 2 rows of 2 numbers"),
        (put_channel("bandwidth", [[1, 2], 3]), r"bandwidth\[1\] must be a list of 2 numbers"),
        (put_channel("bandwidth", [[1, 2], [3]]), r"bandwidth\[1\] has 1 entries, needs 2"),
        (put_channel("bandwidth", {"pair": 1}), r"bandwidth: lacks \['self'\]"),
        (put_channel("latency", {"pair": 1, "self": float("nan")}), "latency.self must be finite"),
        (put_channel("egress", 0), "a port in use has capacity 0"),
    ],
)
def test_malformed_json_is_named(spoil: Callable[[dict[str, Any]], None], message: str) -> None:
    top = copy.deepcopy(topology_json.to_dict(presets.h200_nvlink(2)))
    spoil(top)
    with pytest.raises(FormatError, match=message):
        topology_json.from_dict(top)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: presets.nodes(1000, 8), "nodes: number of ranks must be at most 4096, found 8000"),
        (lambda: presets.torus(10**9, 10**9), "torus: number of ranks must be in 1..2147483647"),
        (lambda: presets.ring(10**30), "ring: number of ranks must be in 1..2147483647, found 10"),
        (lambda: presets.ring(2.5), "ring: number of ranks must be an integer, found 2.5"),
        (lambda: presets.h200_nvlink(5000), "channel nvlink: number of ranks must be at most 4096"),
        (lambda: presets.pcie_host(0), "channel host: number of ranks must be in 1.."),
    ],
)
def test_topologies_that_fill_memory(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_byte_order_mark_is_no_part_of_a_topology(tmp_path: Path) -> None:
    topology, path = presets.ring(3), tmp_path / "t.json"
    path.write_text(json.dumps(topology_json.to_dict(topology)), encoding="utf-8-sig")
    assert topology_json.load(path) == topology


def test_files_that_are_not_topologies(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for text, message in [
        ("{", "t.json: not JSON: "),
        ("[" * 100000, "t.json: not JSON: "),
        ("[]", "t.json: topology: must be an object, found list"),
    ]:
        path.write_text(text)
        with pytest.raises(FormatError, match=message):
            topology_json.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match=r"t\.json: not JSON: "):
        topology_json.load(path)
