"""Moves: dropped candidates, renumbered dependencies, phases, push and pull."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.errors import InputError
from syncopate_jax.ir.moves import join_columns, make_moves, relay
from syncopate_jax.ir.shards import cut_shards


def test_empty_candidates_are_dropped_and_dependencies_renumbered() -> None:
    lo = np.zeros((2, 3, 1), np.int64)
    hi = np.array([[[1], [0], [2]], [[0], [1], [1]]])
    rank = np.arange(2)[:, None]
    # Each candidate waits for the same slot of the other rank; that of slots 0 and 1 is dropped.
    columns = make_moves(
        rank, rank, lo, hi, dep_rank=1 - rank[..., None], dep_slot=np.arange(3)[None, :, None]
    ).columns()
    assert columns.rank.tolist() == [0, 0, 1, 1]
    assert columns.src_hi.ravel().tolist() == [1, 2, 1, 1]
    assert columns.dep_start.tolist() == [0, 0, 1, 1, 2]
    assert (columns.dep_rank.tolist(), columns.dep_index.tolist()) == ([1, 0], [1, 1])


def test_produced_moves_wait_for_their_own_source() -> None:
    lo, hi = np.array([[[0], [4]]]), np.array([[[4], [6]]])
    columns = make_moves(
        np.array([[0]]), np.array([[0]]), lo, hi, dst_lo=lo + 10, src_tensor=1,
        produced=np.array([[False, True]]),
    ).columns()  # fmt: skip
    assert columns.dst_lo.ravel().tolist() == [10, 14]
    assert columns.cdep_start.tolist() == [0, 0, 1]
    assert (columns.cdep_tensor.tolist(), columns.cdep_lo.tolist()) == ([1], [[4]])


@pytest.mark.parametrize(("mode", "listed"), [("push", [0, 1, 2]), ("pull", [1, 2, 0])])
def test_relay_lists_on_the_sender_or_the_receiver(mode: str, listed: list[int]) -> None:
    shards = cut_shards("t", 3, (3,), 0)
    ranks = np.arange(3)[:, None]
    columns = relay("t", mode, shards, (ranks + 1) % 3, ranks).columns()
    by_source = np.argsort(columns.src_rank)
    assert columns.rank[by_source].tolist() == listed
    assert columns.dst_rank[by_source].tolist() == [1, 2, 0]


def test_relay_needs_a_mode() -> None:
    shards = cut_shards("t", 1, (3,), 0)
    with pytest.raises(InputError, match="t: mode 'throw' is not one of push, pull"):
        relay("t", "throw", shards, np.zeros((1, 0), int), np.zeros((1, 0), int))


def test_joined_phases_count_slots_from_the_first() -> None:
    lo, hi = np.zeros((1, 2, 1), np.int64), np.ones((1, 2, 1), np.int64)
    zero = np.zeros((1, 2), np.int64)
    first = make_moves(zero, zero, lo, hi)
    second = make_moves(
        zero, zero, lo, hi, dep_rank=zero[..., None], dep_slot=np.array([[[1], [2]]])
    )
    columns = join_columns([first, second])
    assert columns.dep_start.tolist() == [0, 0, 0, 1, 2]
    assert columns.dep_index.tolist() == [1, 2]


def test_joined_phases_may_differ_in_their_number_of_dependencies() -> None:
    """Two ranks; the second candidate of the first phase is empty on rank 1."""
    rank = np.arange(2)[:, None]
    lo, hi = np.zeros((2, 2, 1), np.int64), np.array([[[1], [1]], [[1], [0]]])
    first = make_moves(rank, rank, lo, hi)
    wide = make_moves(
        rank, rank, lo[:, :1], hi[:, :1], dep_rank=np.array([[[0, 1, 0]]]),
        dep_slot=np.array([[[0, 1, 1]]]),
    )  # fmt: skip
    last = make_moves(
        rank, rank, lo[:, :1], hi[:, :1], dep_rank=rank[..., None], dep_slot=np.array([[[2]]])
    )
    columns = join_columns([first, wide, last])
    assert columns.rank.tolist() == [0] * 4 + [1] * 3
    assert columns.dep_start.tolist() == [0, 0, 0, 2, 3, 3, 5, 6]
    assert columns.dep_rank.tolist() == [0, 0, 0, 0, 0, 1]
    assert columns.dep_index.tolist() == [0, 1, 2, 0, 1, 1]
