"""A part of a topology, as a topology of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.topology import Topology


def subset(topology: Topology, ranks: Sequence[int]) -> Topology:
    """The topology of ``ranks``, numbered by their place in that list; ports stay shared.

    Raises InputError when one is not there or is listed twice.
    """
    chosen = tuple(ranks)
    if chosen == tuple(range(topology.num_ranks)):
        return topology
    wrong = [rank for rank in chosen if not 0 <= rank < topology.num_ranks]
    if wrong or len(set(chosen)) != len(chosen):
        raise InputError(
            f"topology {topology.name}: ranks {list(chosen)} must be different ranks of its "
            f"{topology.num_ranks}"
        )
    among = np.array(chosen, np.int64)
    square = np.ix_(among, among)
    return Topology(
        topology.name,
        len(chosen),
        tuple(
            replace(
                channel,
                bandwidth=channel.bandwidth[square],
                latency=channel.latency[square],
                port=channel.port[among],
            )
            for channel in topology.channels
        ),
        topology.flops[among],
        topology.signal_latency,
    )
