"""Shards: sizes, pieces, and what does not add up (the messages are in the conformance suite)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import axis_of, integer, one_of, origin_text
from syncopate_jax.ir.chunk import Box, split_points
from syncopate_jax.ir.shards import check_listed, cut_boxes, cut_shards


def test_shards_are_as_equal_as_can_be() -> None:
    shards = cut_shards("t", 3, (7, 2), -2)
    assert shards.axis == 0
    assert shards.sizes == (3, 2, 2)
    assert shards.boxes() == [Box((0, 0), (3, 2)), Box((3, 0), (5, 2)), Box((5, 0), (7, 2))]
    assert [shards.box(rank) for rank in range(3)] == shards.boxes()
    assert shards.full == Box((0, 0), (7, 2))
    assert (shards.num_ranks, shards.num_pieces) == (3, 1)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    other=st.integers(0, 4),
    split=st.integers(1, 12),
    split_axis=st.sampled_from([None, 0, 1]),
)
def test_pieces_tile_their_shards(
    sizes: list[int], other: int, split: int, split_axis: int | None
) -> None:
    shards = cut_shards("t", len(sizes), (sum(sizes), other), 0, sizes, split, split_axis)
    for rank, box in enumerate(shards.boxes()):
        along = split_axis or 0
        bounds = zip(shards.lo[rank, :, along], shards.hi[rank, :, along], strict=True)
        cuts = split_points(box.shape[along], split)
        start = box.lo[along]
        expected = [(start + a, start + b) for a, b in itertools.pairwise(cuts) if a < b]
        assert [(int(a), int(b)) for a, b in bounds if a < b] == expected


def test_no_more_pieces_than_the_largest_extent() -> None:
    lo, hi = cut_boxes(np.array([[0], [3]]), np.array([[3], [5]]), 0, 10**9)
    assert lo.tolist() == [[[0], [1], [2]], [[3], [4], [5]]]
    assert hi.tolist() == [[[1], [2], [3]], [[4], [5], [5]]]


def test_arguments_name_what_is_wrong() -> None:
    assert integer("t", "n", np.int64(3), 1) == 3
    with pytest.raises(InputError, match="t: n must be an integer, found '3'"):
        integer("t", "n", "3", 1)
    with pytest.raises(InputError, match=r"t: n must be in 1\.\.2147483647, found 2147483648"):
        integer("t", "n", 2**31, 1)
    with pytest.raises(InputError, match=r"t: axis 0 is not an axis of shape \(\), which has 0"):
        axis_of("t", "axis", 0, ())
    with pytest.raises(InputError, match="t: kind 'c' is not one of a, b"):
        one_of("t", "kind", "c", ("a", "b"))


def test_more_pieces_than_fit() -> None:
    message = "t: split 16385 makes 1048640 pieces of the shards of 64 ranks, at most 1048576 fit"
    with pytest.raises(InputError, match=message):
        cut_shards("t", 64, (2**30, 4), 0, None, 2**14 + 1)
    assert cut_shards("t", 64, (2**10, 4), 0, None, 10**9).num_pieces == 16


def test_more_operations_than_fit() -> None:
    with pytest.raises(InputError, match="t: the plan would list 16777217 goals, at most 16777216"):
        check_listed("t", 2**24 + 1, "goals")
    check_listed("t", 2**24)
    with pytest.raises(InputError, match="t: the plan would list 33554432 operations, at most 16"):
        cut_shards("t", 4096, (4096,), 0, hops=8192)


def test_origin_leaves_out_none_and_shortens_long_tuples() -> None:
    assert origin_text("f", a=1, b=None, c=(1, 2)) == "f(a=1, c=(1, 2))"
    assert origin_text("f", a=tuple(range(20))) == "f(a=(0, 1, 2, … 20 in all))"
