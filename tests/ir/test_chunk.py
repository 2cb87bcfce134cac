"""Boxes and chunks: algebra against sets of points, and their messages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncopate_jax.errors import InputError
from syncopate_jax.ir.chunk import Box, Chunk, split_points


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    lo = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    return Box(lo, (lo[0] + draw(st.integers(0, 4)), lo[1] + draw(st.integers(0, 4))))


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(range, box.lo, box.hi)))


@given(a=boxes(), b=boxes())
def test_algebra_is_that_of_points(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert points(a) & points(b) == (points(common) if common else set())
    assert a.contains(b) == (points(b) <= points(a))
    assert a.size == len(points(a))
    array = np.zeros((9, 9))
    array[a.slices] = 1
    assert {tuple(map(int, p)) for p in np.argwhere(array)} == points(a)


@given(box=boxes(), parts=st.integers(1, 6), axis=st.integers(0, 1))
def test_split_tiles_the_box(box: Box, parts: int, axis: int) -> None:
    pieces = box.split(axis, parts)
    assert len(pieces) == parts
    assert set().union(*map(points, pieces)) == points(box)
    sizes = [piece.shape[axis] for piece in pieces]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(box=boxes())
def test_text_reads_back(box: Box) -> None:
    assert Box.parse(str(box)) == box
    assert str(Chunk("x", box)) == f"x{box}"


def test_small_cases() -> None:
    box = Box((1, 2), (3, 4))
    assert (box.ndim, box.shape) == (2, (2, 2))
    assert box.shift((1, -2)) == Box((2, 0), (4, 2))
    assert box.with_axis(0, 0, 9) == Box((0, 2), (9, 4))
    assert Box.full(()).size == 1
    assert Box.parse("[]") == Box((), ())
    assert Box.parse(" [ 0:4 , 8:16 ] ") == Box((0, 8), (4, 16))
    assert split_points(5, 3) == (0, 2, 4, 5)


def test_messages() -> None:
    with pytest.raises(InputError, match="box: lo has 1 dimensions, hi has 2"):
        Box((0,), (1, 2))
    with pytest.raises(InputError, match=r"needs 0 <= lo <= hi, found lo=\(2,\) hi=\(1,\)"):
        Box((2,), (1,))
    with pytest.raises(InputError, match=r"box: '\[1-2\]' is not of the form \[lo:hi,…\]"):
        Box.parse("[1-2]")
    with pytest.raises(InputError, match="cannot cut an extent of 5 into 0 parts"):
        split_points(5, 0)
