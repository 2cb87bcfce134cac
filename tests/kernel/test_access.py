"""Which box a tile touches."""

from __future__ import annotations

import re

import numpy as np
import pytest

from syncopate_jax.errors import InputError
from syncopate_jax.kernel.access import Access, BoxAccess
from syncopate_jax.kernel.tiles import Axis, TileSpace

SPACE = TileSpace((Axis("m", 5, 2), Axis("k", 4, 2, reduction=True)))


def test_boxes_are_cut_by_the_edge() -> None:
    lo, hi = Access("x", (5, 4, 7), ("m", "k", None)).boxes(SPACE)
    assert lo.shape == hi.shape == (3, 2, 3)
    assert lo[2, 1].tolist() == [4, 2, 0] and hi[2, 1].tolist() == [5, 4, 7]


def test_a_smaller_operand_than_the_axis() -> None:
    lo, hi = Access("x", (3,), ("m",)).boxes(SPACE)
    assert (hi - lo)[:, 0, 0].tolist() == [2, 1, 0]


def test_lengths_that_differ() -> None:
    with pytest.raises(
        InputError, match=re.escape("access to x: shape (5, 4) and dims ('m',) differ in length")
    ):
        Access("x", (5, 4), ("m",))


def test_boxes_of_another_space() -> None:
    right = np.zeros((3, 2, 1), np.int64)
    assert BoxAccess("x", (5,), right, right).boxes(SPACE)[0] is right
    wrong = np.zeros((4, 2, 1), np.int64)
    text = "access to x: boxes have shapes (3, 2, 1) and (4, 2, 1), the tile space needs (3, 2, 1)"
    with pytest.raises(InputError, match=re.escape(text)):
        BoxAccess("x", (5,), right, wrong).boxes(SPACE)
