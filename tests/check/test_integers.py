"""Sets and ranges of integers."""

from __future__ import annotations

import numpy as np

from syncopate_jax.check.integers import distinct, distinct_rows, expand, is_member


def test_expand_joins_ranges() -> None:
    assert expand(np.array([3, 7, 0]), np.array([5, 7, 3])).tolist() == [3, 4, 0, 1, 2]
    assert expand(np.zeros(0, int), np.zeros(0, int)).tolist() == []


def test_distinct() -> None:
    assert distinct(np.array([4, 1, 4, 0, 1])).tolist() == [0, 1, 4]
    assert distinct(np.zeros(0, int)).tolist() == []


def test_distinct_rows() -> None:
    rows, place = distinct_rows(np.array([[2, 1], [0, 5], [2, 1], [2, 0]]))
    assert rows.tolist() == [[0, 5], [2, 0], [2, 1]]
    assert place.tolist() == [2, 0, 2, 1]
    assert distinct_rows(np.zeros((0, 3), int))[0].shape == (0, 3)


def test_is_member() -> None:
    known = np.array([1, 5, 9])
    assert is_member(np.array([0, 1, 6, 9, 12]), known).tolist() == [0, 1, 0, 1, 0]
    assert is_member(np.array([3]), known[:0]).tolist() == [False]
