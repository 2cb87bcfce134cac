"""A chain through all members: over it a broadcast's pieces follow each other without meeting."""

from __future__ import annotations

import numpy as np

from syncopate_jax.synthesis.network import Network

Array = np.ndarray


def chain_links(network: Network, root: int) -> Array | None:
    """The fastest links of a path from ``root`` through every member and no relay, or None.

    Each rank hands on to the one that has fewest ways left, the next one in order if several do;
    It may lead nowhere.
    """
    if network.relays or len(network.members) < 2:
        return None
    fast = np.flatnonzero(network.levels() == 0)
    ways: dict[int, dict[int, int]] = {rank: {} for rank in network.members}
    for link in fast.tolist():
        ways[int(network.src[link])].setdefault(int(network.dst[link]), link)
    left, at, path = set(network.members) - {root}, root, []
    while left:
        ahead = [rank for rank in ways[at] if rank in left]
        if not ahead:
            return None
        here = at

        def order(rank: int, here: int = here) -> tuple[int, int]:
            return len(left & ways[rank].keys()), (rank - here) % network.num_ranks

        at = min(ahead, key=order)
        path.append(ways[here][at])
        left.discard(at)
    return np.array(path, np.int64)
