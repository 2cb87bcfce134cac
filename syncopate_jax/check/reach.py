"""Does one row happen before another? Answered for many pairs at once.

Most pairs of a sensible plan are joined by a dependency, which a sorted look-up answers. Of the
rest most are a few steps apart: all are walked backwards together. What is left is answered
exactly with bit sets, a bit for each first row, passed along the edges level by level.
"""

from __future__ import annotations

import numpy as np

from syncopate_jax.check.integers import distinct, expand, is_member
from syncopate_jax.check.order import Order, group_edges

Array = np.ndarray

MAX_ROUNDS = 24
MAX_FRONT = 1 << 21
BITS_BYTES = 1 << 26


class Reach:
    """Answers ``before`` for the nodes of one happens-before graph."""

    def __init__(self, order: Order):
        self.depth = order.depth
        self.count = len(order.depth)
        self.start, self.tails = group_edges(order.head, order.tail, self.count)
        self.edges = np.sort(order.tail * self.count + order.head)

    def before(self, first: Array, second: Array) -> Array:
        """[pairs] whether a path leads from ``first`` to ``second``; no node precedes itself."""
        result = np.zeros(len(first), bool)
        if not len(self.edges):
            return result
        open_ = np.flatnonzero(self.depth[first] < self.depth[second])
        joined = is_member(first[open_] * self.count + second[open_], self.edges)
        result[open_[joined]] = True
        open_ = open_[~joined]
        if len(open_):
            keys, inverse = np.unique(
                first[open_] * self.count + second[open_], return_inverse=True
            )
            tails, heads = np.divmod(keys, self.count)
            result[open_] = self._search(tails, heads)[inverse]
        return result

    def _search(self, first: Array, second: Array) -> Array:
        """Walks back from every ``second`` at once, never below its ``first``."""
        found = np.zeros(len(first), bool)
        query, node = np.arange(len(first)), second
        for _ in range(MAX_ROUNDS):
            count = self.start[node + 1] - self.start[node]
            if count.sum() > MAX_FRONT:
                break
            node_next = self.tails[expand(self.start[node], self.start[node + 1])]
            query = np.repeat(query, count)
            found[query[node_next == first[query]]] = True
            kept = ~found[query] & (self.depth[node_next] > self.depth[first[query]])
            keys = distinct(query[kept] * self.count + node_next[kept])
            query, node = np.divmod(keys, self.count)
            if not len(query):
                return found
        left = distinct(query)
        found[left] = self._propagate(first[left], second[left])
        return found

    def _propagate(self, first: Array, second: Array) -> Array:
        """Exact answers by bit sets, as many first nodes at a time as fit in BITS_BYTES."""
        sources, bit = np.unique(first, return_inverse=True)
        heads = np.flatnonzero(self.start[1:] > self.start[:-1])
        heads = heads[np.argsort(self.depth[heads], kind="stable")]
        cuts = np.flatnonzero(np.diff(self.depth[heads])) + 1
        layers = np.split(heads, cuts)
        words = max(1, BITS_BYTES // (8 * self.count))
        result = np.zeros(len(first), bool)
        for base in range(0, len(sources), 64 * words):
            block = sources[base : base + 64 * words]
            bits = self._spread(block, layers)
            mine = np.flatnonzero((bit >= base) & (bit < base + len(block)))
            word, shift = np.divmod(bit[mine] - base, 64)
            hit = (bits[second[mine], word] >> shift.astype(np.uint64)) & np.uint64(1)
            result[mine] = hit.astype(bool)
        return result

    def _spread(self, sources: Array, layers: list[Array]) -> Array:
        width = -(-len(sources) // 64)
        bits = np.zeros((self.count, width), np.uint64)
        word, shift = np.divmod(np.arange(len(sources)), 64)
        own = np.uint64(1) << shift.astype(np.uint64)
        bits[sources, word] = own
        for layer in layers:
            start, stop = self.start[layer], self.start[layer + 1]
            gathered = bits[self.tails[expand(start, stop)]]
            count = stop - start
            bits[layer] |= np.bitwise_or.reduceat(gathered, np.cumsum(count) - count, axis=0)
        return bits
