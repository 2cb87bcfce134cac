"""Sets and ranges of integers as sorted arrays; by sorting, which hashing loses to when large."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def expand(start: Array, stop: Array) -> Array:
    """The integers of every range ``start[i]:stop[i]``, one range after the other."""
    count = stop - start
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Array = np.arange(total) + np.repeat(start - ends + count, count)
    return numbers


def distinct(keys: Array) -> Array:
    """The distinct keys in ascending order."""
    keys = np.sort(keys)
    found: Array = keys[_fresh(keys)]
    return found


def distinct_rows(rows: Array) -> tuple[Array, Array]:
    """The distinct rows of a matrix in lexicographic order, and for each given row its place."""
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    fresh = np.ones(len(rows), bool)
    fresh[1:] = np.any(ordered[1:] != ordered[:-1], axis=1)
    place = np.empty(len(rows), np.int64)
    place[order] = np.cumsum(fresh) - 1
    return ordered[fresh], place


def is_member(keys: Array, known: Array) -> Array:
    """Whether each key is in ``known``, which is sorted."""
    if not len(known):
        return np.zeros(len(keys), bool)
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    found: Array = known[at] == keys
    return found


def _fresh(ordered: Array) -> Array:
    fresh = np.ones(len(ordered), bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    return fresh
