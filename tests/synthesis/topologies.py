"""Small topologies that are not regular: what synthesis must cope with."""

from __future__ import annotations

import numpy as np

from syncopate_jax.ir.topology import Topology, link_channel

LATENCY, OVERHEAD = 5e-6, 1e-6


def of_links(
    name: str, ranks: int, *channels: dict[tuple[int, int], float], port: float | None = None
) -> Topology:
    """A topology of one-way links {(from, to): bytes/s}, a channel for each dictionary."""
    made = []
    for number, links in enumerate(channels):
        matrix = np.zeros((ranks, ranks))
        np.fill_diagonal(matrix, 2e12)
        for (src, dst), bandwidth in links.items():
            matrix[src, dst] = bandwidth
        made.append(
            link_channel(
                f"c{number}", matrix, latency=LATENCY, overhead=OVERHEAD,
                port_bandwidth=port or float(sum(links.values())),
            )
        )  # fmt: skip
    return Topology(name, ranks, tuple(made), np.array(1e12))


def both_ways(*pairs: tuple[int, int], bandwidth: float = 100e9) -> dict[tuple[int, int], float]:
    """Links in both directions between the pairs."""
    return {ends: bandwidth for s, d in pairs for ends in ((s, d), (d, s))}


def line(ranks: int) -> Topology:
    """Ranks in a row."""
    return of_links("line", ranks, both_ways(*((r, r + 1) for r in range(ranks - 1))))


def star(leaves: int) -> Topology:
    """Rank 0 in the middle."""
    return of_links("star", leaves + 1, both_ways(*((0, leaf + 1) for leaf in range(leaves))))


def one_way_ring(ranks: int) -> Topology:
    return of_links("one_way", ranks, {(r, (r + 1) % ranks): 100e9 for r in range(ranks)})


def mixed(seed: int, ranks: int = 6) -> Topology:
    """A random tree with some more links, each of its own speed, on two channels."""
    rng = np.random.default_rng(seed)
    speeds = (10e9, 50e9, 100e9, 400e9)
    channels: list[dict[tuple[int, int], float]] = [{}, {}]
    for rank in range(1, ranks):
        other = int(rng.integers(rank))
        channels[int(rng.integers(2))] |= both_ways(
            (rank, other), bandwidth=float(rng.choice(speeds))
        )
    for _ in range(ranks // 2):
        src, dst = map(int, rng.choice(ranks, 2, replace=False))
        channels[int(rng.integers(2))][src, dst] = float(rng.choice(speeds))
    return of_links(f"mixed_{seed}", ranks, *(links for links in channels if links))
