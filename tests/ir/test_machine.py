"""Machines that were measured: what their figures give, and files that are none."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from syncopate_jax.errors import FormatError
from syncopate_jax.ir import machine, presets

FOUND = machine.to_dict(machine.h200())


def test_products_take_whole_waves_of_tiles() -> None:
    h200 = machine.h200()
    wave = 4096 * h200.step_seconds + h200.tile_seconds
    assert h200.product(128 * 132, 4096, 256) == wave
    assert h200.product(128 * 264, 4096, 256) == 2 * wave
    assert h200.product(128 * 264 - 1, 4096, 256) == 2 * wave
    narrow = wave / 2 + h200.tile_seconds / 2  # half the work, and as long to begin and to store
    assert h200.tile(128 * 128, 4096) == pytest.approx(narrow)
    # Where wide tiles leave half of the multiprocessors idle, products take narrow ones.
    assert h200.product(128 * 66, 4096, 256) == pytest.approx(narrow)
    assert h200.product(128 * 67, 4096, 256) == wave
    assert h200.product(128 * 133, 4096, 256) == pytest.approx(3 * narrow)
    assert h200.product(100, 4096, 200) == h200.product(128, 4096, 256)  # cut by the edge
    assert h200.flops == pytest.approx(132 * 2 * 128 * 256 / h200.step_seconds)


def test_a_clock_sees_the_slower_of_host_and_device_and_once_the_way_there() -> None:
    h200 = machine.h200()
    assert h200.timed(3e-4, 1e-4, 10) == 3e-4 + h200.block_seconds / 10
    assert h200.timed(1e-4, 2e-4, 1) == 2e-4 + h200.block_seconds
    assert h200.sustained(1.0, 1e12) == 1.0
    assert h200.sustained(1e-6, h200.sustained_flops) == 1.0


def test_an_all_to_all_is_rearranged_too() -> None:
    h200 = machine.h200()
    gather = h200.exchange("all_gather", 1e6, 2e6)
    assert gather == h200.collective("all_gather", 1e6)
    exchanged = h200.collective("all_to_all", 1e6) + 2e6 / h200.rearrange_bandwidth
    assert h200.exchange("all_to_all", 1e6, 2e6) == exchanged
    rates = {"reduce_scatter": h200.collective_bandwidth, "all_reduce": h200.all_reduce_bandwidth}
    for kind, rate in (rates | {"all_to_all": h200.all_to_all_bandwidth}).items():
        assert h200.collective(kind, 1e6) == h200.collective_seconds + 1e6 / rate


def test_its_topology() -> None:
    h200 = machine.h200()
    found = presets.preset("h200_measured", 4)
    channel = found.channel("nvlink")
    assert channel.bandwidth[0, 1] == channel.egress[0] == h200.link_bandwidth
    assert channel.latency[0, 1] == h200.copy_engine_latency
    assert found.flops.tolist() == [h200.flops] * 4
    slow = presets.of_machine(h200, 2, 4 * h200.copy_unit_cta_bandwidth).channel("nvlink")
    assert slow.bandwidth[1, 0] == 4 * h200.copy_unit_cta_bandwidth < slow.ingress[0]
    fast = presets.of_machine(h200, 2, 1e15).channel("nvlink")
    assert fast.bandwidth[1, 0] == h200.link_bandwidth


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    machine.save(machine.h200(), path)
    assert machine.load(path) == machine.h200()
    path.write_text(path.read_text(), encoding="utf-8-sig")  # with a byte-order mark
    assert machine.load(path) == machine.h200()
    for text, message in (("{", "not JSON: "), ("[]", "machine: must be an object, found list")):
        path.write_text(text)
        with pytest.raises(FormatError, match=f"m.json: {message}"):
            machine.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "machine: format is 'x', needs 'syncopate-machine'"),
        ({"version": 2}, "machine: version is 2, needs 1"),
        ({"more": 1}, r"machine: lacks \[\], has unknown \['more'\]"),
        ({"name": ""}, "machine: name must be a non-empty string, found ''"),
        ({"tile_m": 0}, "machine: tile_m must be a positive integer, found 0"),
        ({"tile_n": 1.5}, "machine: tile_n must be a positive integer, found 1.5"),
        ({"link_bandwidth": 0}, "link_bandwidth must be a positive, finite number, found 0"),
        ({"step_seconds": True}, "step_seconds must be a positive, finite number, found True"),
        ({"tile_seconds": float("inf")}, "tile_seconds must be a positive, finite number"),
    ],
)
def test_malformed_machines_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        machine.from_dict(copy.deepcopy(FOUND) | change)


def test_a_figure_that_is_missing_is_named() -> None:
    with pytest.raises(FormatError, match=r"machine: lacks \['call_seconds'\], has unknown \[\]"):
        machine.from_dict({k: v for k, v in FOUND.items() if k != "call_seconds"})
