"""Ready topologies, by name; their figures are starting points that calibration replaces.

A figure marked *measured* was read on the hardware named, *datasheet* is the vendor's, *assumed*
is neither. No preset claims to be the machine at hand: measure it and store the result with
``topology_json.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir import machine
from syncopate_jax.ir.machine import Machine
from syncopate_jax.ir.topology import (
    Channel,
    Topology,
    check_ranks,
    link_channel,
    uniform_channel,
)

# Measured between two H200s, copy engine, one way: 392 GB/s at 512 MiB (357 at 64 MiB). The
# datasheet's 450 GB/s a direction is never reached.
H200_NVLINK_BANDWIDTH = 392e9
# Published for a pair of H100s, copy engine: 398 GB/s at 1 GiB.
H100_NVLINK_BANDWIDTH = 398e9
# Published copy-engine times of 1 to 16 MiB on H100s exceed bytes / bandwidth by 2 us or more.
COPY_OVERHEAD = 2e-6
# Measured between two H200s: 13.5 us for 64 KiB, of which 0.2 us is bandwidth and 2 us overhead.
NVLINK_LATENCY = 11e-6
# Assumed: a store to a peer's memory over NVLink, seen by a spinning reader.
SIGNAL_LATENCY = 1e-6
# Measured on one H200: 67 MB from pinned host memory in 1284 us (PCIe 5.0 x16; datasheet 63 GB/s).
HOST_BANDWIDTH = 52e9
# Assumed: the same start-up as a copy over NVLink.
HOST_LATENCY = 11e-6
# Datasheet memory bandwidth, 4.8 TB/s (H200) and 3.35 TB/s (H100): a copy reads and writes.
H200_LOCAL_BANDWIDTH = 2.4e12
H100_LOCAL_BANDWIDTH = 1.67e12
# Measured on one H200, bf16 matrix products of 4096 and up: 660 to 745 TFLOP/s. The H100 has the
# same multiprocessors.
HOPPER_FLOPS = np.array(700e12)
# Datasheet 400 Gbit/s adapter; latency and overhead assumed.
NIC_BANDWIDTH = 50e9
NIC_LATENCY = 5e-6
NIC_OVERHEAD = 2e-6


def h200_nvlink(num_ranks: int) -> Topology:
    """H200s of one host: ``nvlink`` through switches, ``host`` to each one's host memory."""
    return _hopper("h200_nvlink", num_ranks, H200_NVLINK_BANDWIDTH, H200_LOCAL_BANDWIDTH)


def h200_measured(num_ranks: int) -> Topology:
    """H200s of one host with the rates of a pair that was measured; copies by the copy engine."""
    found = machine.h200()
    return of_machine(found, num_ranks, found.link_bandwidth, latency=found.copy_engine_latency)


def of_machine(
    machine: Machine, num_ranks: int, bandwidth: float, latency: float = SIGNAL_LATENCY
) -> Topology:
    """Ranks like ``machine`` joined through switches, each transfer at most at ``bandwidth``.

    More than were measured are taken to be joined as well as those: each rank's links reach every
    other at their full rate.
    """
    nvlink = uniform_channel(
        "nvlink",
        num_ranks,
        bandwidth=min(bandwidth, machine.link_bandwidth),
        port_bandwidth=machine.link_bandwidth,
        latency=latency,
        local_bandwidth=H200_LOCAL_BANDWIDTH,
    )
    return Topology(
        machine.name,
        num_ranks,
        (nvlink, _host(num_ranks)),
        np.array(machine.flops),
        SIGNAL_LATENCY,
    )


def h100_nvlink(num_ranks: int) -> Topology:
    """H100s of one host: ``nvlink`` through switches, ``host`` to each one's host memory."""
    return _hopper("h100_nvlink", num_ranks, H100_NVLINK_BANDWIDTH, H100_LOCAL_BANDWIDTH)


def pcie_host(num_ranks: int) -> Topology:
    """Devices that reach each other and host memory only over PCIe, channel ``host``."""
    return Topology("pcie_host", num_ranks, (_host(num_ranks),), HOPPER_FLOPS, SIGNAL_LATENCY)


def nodes(num_nodes: int, per_node: int, nics_per_node: int | None = None) -> Topology:
    """Nodes of H200s: ``nvlink`` within a node, ``nic`` between ranks of different nodes.

    ``nics_per_node`` (default one a rank) adapters are shared by the ranks of a node in turn.
    Raises InputError when a count is below 1.
    """
    nics = per_node if nics_per_node is None else nics_per_node
    if min(num_nodes, per_node, nics) < 1:
        raise InputError(
            f"nodes: needs at least 1 node, rank and adapter, "
            f"found {num_nodes}, {per_node} and {nics}"
        )
    ranks = num_nodes * per_node
    check_ranks("nodes", ranks)
    node, place = np.divmod(np.arange(ranks), per_node)
    inside = node[:, None] == node[None, :]
    nvlink = np.where(inside, H200_NVLINK_BANDWIDTH, 0.0)
    np.fill_diagonal(nvlink, H200_LOCAL_BANDWIDTH)
    channels = (
        link_channel(
            "nvlink",
            nvlink,
            latency=NVLINK_LATENCY,
            overhead=COPY_OVERHEAD,
            port_bandwidth=H200_NVLINK_BANDWIDTH,
        ),
        link_channel(
            "nic",
            np.where(inside, 0.0, NIC_BANDWIDTH),
            latency=NIC_LATENCY,
            overhead=NIC_OVERHEAD,
            port_bandwidth=NIC_BANDWIDTH,
            port=node * nics + place % nics,
        ),
        _host(ranks),
    )
    return Topology(f"nodes_{num_nodes}x{per_node}", ranks, channels, HOPPER_FLOPS, NIC_LATENCY)


def ring(
    num_ranks: int,
    bandwidth: float = H200_NVLINK_BANDWIDTH / 2,
    latency: float = NVLINK_LATENCY,
    overhead: float = COPY_OVERHEAD,
) -> Topology:
    """Ranks joined to the next and the previous one only, by links of ``bandwidth`` bytes/s.

    The default gives each of a rank's two neighbours half of a Hopper device's links.
    """
    check_ranks("ring", num_ranks)
    here = np.arange(num_ranks)
    joined = np.zeros((num_ranks, num_ranks), bool)
    joined[here, (here + 1) % num_ranks] = joined[(here + 1) % num_ranks, here] = True
    return _grid(f"ring_{num_ranks}", joined, 2, bandwidth, latency, overhead)


def torus(
    rows: int,
    columns: int,
    bandwidth: float = H200_NVLINK_BANDWIDTH / 4,
    latency: float = NVLINK_LATENCY,
    overhead: float = COPY_OVERHEAD,
) -> Topology:
    """Ranks in a grid (row-major) that wraps around, each joined to its four neighbours.

    The default gives each neighbour a quarter of a Hopper device's links. Raises InputError when a
    count is below 1.
    """
    if min(rows, columns) < 1:
        raise InputError(f"torus: needs at least 1 row and column, found {rows} and {columns}")
    ranks = rows * columns
    check_ranks("torus", ranks)
    row, column = np.divmod(np.arange(ranks), columns)
    joined = np.zeros((ranks, ranks), bool)
    for dr, dc in ((0, 1), (0, -1), (1, 0), (-1, 0)):
        peer = (row + dr) % rows * columns + (column + dc) % columns
        joined[np.arange(ranks), peer] = True
    return _grid(f"torus_{rows}x{columns}", joined, 4, bandwidth, latency, overhead)


# The presets that need only a number of ranks, and those that take counts (``nodes:2x8``).
BY_RANKS: dict[str, Callable[[int], Topology]] = {
    "h100": h100_nvlink,
    "h200": h200_nvlink,
    "h200_measured": h200_measured,
    "pcie": pcie_host,
    "ring": ring,
}
BY_COUNTS: dict[str, Callable[..., Topology]] = {"nodes": nodes, "torus": torus}


def preset(text: str, num_ranks: int) -> Topology:
    """The topology written as ``h200``, ``ring``, … or ``nodes:2x8``, ``torus:4x4``.

    Raises InputError when the name is unknown, the counts are malformed, or they do not give
    ``num_ranks`` ranks, or more than a topology may have.
    """
    name, _, counts = text.partition(":")
    if name in BY_RANKS and not counts:
        return BY_RANKS[name](num_ranks)
    if name not in BY_COUNTS:
        known = ", ".join((*sorted(BY_RANKS), *(f"{key}:AxB" for key in sorted(BY_COUNTS))))
        raise InputError(f"no topology preset is called {text!r}; known: {known}")
    found = BY_COUNTS[name](*preset_counts(text))
    if found.num_ranks != num_ranks:
        raise InputError(
            f"topology preset {text!r} has {found.num_ranks} ranks, the plan has {num_ranks}"
        )
    return found


def preset_counts(text: str) -> tuple[int, int]:
    """The two counts in ``nodes:2x8``; raises InputError where there are none."""
    name, _, counts = text.partition(":")
    parts = counts.split("x")
    # No machine has a million ranks, and Python refuses to read numbers of thousands of digits.
    if len(parts) != 2 or not all(part.isdecimal() and len(part) < 7 for part in parts):
        raise InputError(
            f"topology preset {text[:40]!r}: write two counts, as in {name}:2x8, of up to 6 digits"
        )
    return int(parts[0]), int(parts[1])


def _hopper(name: str, num_ranks: int, bandwidth: float, local: float) -> Topology:
    nvlink = uniform_channel(
        "nvlink",
        num_ranks,
        bandwidth=bandwidth,
        latency=NVLINK_LATENCY,
        overhead=COPY_OVERHEAD,
        local_bandwidth=local,
    )
    return Topology(name, num_ranks, (nvlink, _host(num_ranks)), HOPPER_FLOPS, SIGNAL_LATENCY)


def _host(num_ranks: int) -> Channel:
    """Within a rank: from or to its host memory; between ranks: through it. One port for both."""
    return uniform_channel(
        "host",
        num_ranks,
        bandwidth=HOST_BANDWIDTH,
        latency=HOST_LATENCY,
        overhead=COPY_OVERHEAD,
        local_bandwidth=HOST_BANDWIDTH,
        local_ports=True,
    )


def _grid(
    name: str,
    joined: np.ndarray,
    links: int,
    bandwidth: float,
    latency: float,
    overhead: float,
) -> Topology:
    matrix = np.where(joined, bandwidth, 0.0)
    np.fill_diagonal(matrix, H200_LOCAL_BANDWIDTH)
    channel = link_channel(
        "nvlink",
        matrix,
        latency=latency,
        overhead=overhead,
        port_bandwidth=links * bandwidth,
    )
    return Topology(name, len(joined), (channel,), HOPPER_FLOPS, latency)
