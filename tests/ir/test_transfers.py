"""Flat lists of transfers: sorting by rank, dependencies renumbered, empty boxes left out."""

from __future__ import annotations

import numpy as np

from syncopate_jax.ir.transfers import join_transfers, make_transfers


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_sorted_by_rank_and_renumbered() -> None:
    lo = np.array([[0], [2], [4]])
    made = make_transfers(
        array(1, 0, 1), array(0, 1, 2), lo, lo + 2,
        waiter=array(2, 1), awaited=array(0, 2), produced=array(0, 1, 0),
    )  # fmt: skip
    c = made.columns()
    assert c.rank.tolist() == [0, 1, 1]
    assert c.src_lo[:, 0].tolist() == [2, 0, 4]
    # What was number 2 is rank 1's second, and waits for rank 1's first.
    assert c.dep_start.tolist() == [0, 1, 1, 2]
    assert list(zip(c.dep_rank.tolist(), c.dep_index.tolist(), strict=True)) == [(1, 1), (1, 0)]
    assert c.cdep_lo.tolist() == [[2]] and c.cdep_rank.tolist() == [0]


def test_empty_boxes_and_what_waits_for_them() -> None:
    lo = np.array([[0], [2], [4]])
    hi = np.array([[0], [4], [6]])
    made = make_transfers(array(0, 0, 0), array(1, 1, 1), lo, hi, waiter=array(1, 2),
                          awaited=array(0, 1))  # fmt: skip
    c = made.columns()
    assert c.n == 2
    assert c.dep_start.tolist() == [0, 0, 1] and c.dep_index.tolist() == [0]


def test_lists_follow_each_other() -> None:
    lo = np.array([[0]])
    one = make_transfers(array(0), array(1), lo, lo + 1)
    two = make_transfers(array(0), array(2), lo, lo + 1, dst_lo=lo + 5, rank=array(2))
    both = join_transfers([one, two, make_transfers(array(0, 0), array(1, 2), np.array([[0], [1]]),
                           np.array([[1], [2]]), waiter=array(1), awaited=array(0))])  # fmt: skip
    assert both.rank.tolist() == [0, 2, 0, 0]
    assert both.dst_lo[:, 0].tolist() == [0, 5, 0, 1]
    assert (both.waiter.tolist(), both.awaited.tolist()) == ([3], [2])
