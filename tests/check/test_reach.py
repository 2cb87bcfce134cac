"""Happens-before queries against a plain search, in each of the ways they are answered."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check import reach
from syncopate_jax.check.order import Order, find_levels


def random_order(seed: int, count: int, edges: int) -> Order:
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(0, count, (edges, 2)), axis=1)
    tail, head = ends[ends[:, 0] < ends[:, 1]].T
    level = find_levels(count, tail, head)
    nodes = np.arange(count)
    return Order(level, nodes, level, tail, head, nodes)


def closure(order: Order) -> np.ndarray:
    """[nodes, nodes] whether a path leads from one node to another."""
    reachable = np.zeros((len(order.depth), len(order.depth)), bool)
    for node in range(len(order.depth)):
        for tail in order.tail[order.head == node]:
            reachable[:, node] |= reachable[:, tail]
            reachable[tail, node] = True
    return reachable


@pytest.mark.parametrize("edges", [0, 10, 60, 200])
@pytest.mark.parametrize("way", ["walk", "bits", "narrow bits"])
def test_against_a_plain_search(edges: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "walk":
        monkeypatch.setattr(reach, "MAX_ROUNDS", 0)
    if way == "narrow bits":
        monkeypatch.setattr(reach, "BITS_BYTES", 1)
    count = 90
    order = random_order(edges, count, edges)
    first, second = np.divmod(np.arange(count * count), count)
    answers = reach.Reach(order).before(first, second).reshape(count, count)
    assert np.array_equal(answers, closure(order))


def test_a_wide_front_is_left_to_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "MAX_FRONT", 3)
    order = random_order(1, 40, 120)
    first, second = np.divmod(np.arange(1600), 40)
    answers = reach.Reach(order).before(first, second).reshape(40, 40)
    assert np.array_equal(answers, closure(order))


def test_a_long_chain() -> None:
    count = 300
    nodes = np.arange(count)
    order = Order(nodes, nodes, nodes, nodes[:-1], nodes[1:], nodes)
    found = reach.Reach(order).before(np.array([0, 299, 7, 5]), np.array([299, 0, 7, 290]))
    assert found.tolist() == [True, False, False, True]
