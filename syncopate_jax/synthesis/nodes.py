"""The nodes of a topology, as its links tell them: what templates over nodes need to know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncopate_jax.synthesis.network import Network


@dataclass(frozen=True, slots=True)
class Nodes:
    """Ranks of each node, in order, and the channels within nodes and between them."""

    sizes: tuple[int, ...]
    inner: str
    outer: str


def nodes_of(network: Network) -> Nodes | None:
    """The nodes, if fastest links join consecutive ranks to several, else None.

    Every two ranks of a node must be joined by one of the channel ``inner``, and every two of
    different nodes by one of ``outer``.
    """
    if not len(network.src):
        return None
    label = network.clusters(0)
    heads, sizes = np.unique(label, return_counts=True)
    if len(heads) < 2 or not np.array_equal(label, np.repeat(heads, sizes)):
        return None
    together = label[:, None] == label[None, :]
    others = together & ~np.eye(len(label), dtype=bool)
    inner, outer = (
        next(
            (
                name
                for name in network.channels
                if np.all(network.topology.channel(name).bandwidth[ranks] > 0)
            ),
            None,
        )
        for ranks in (others, ~together)
    )
    if inner is None or outer is None:
        return None
    return Nodes(tuple(sizes.tolist()), inner, outer)
