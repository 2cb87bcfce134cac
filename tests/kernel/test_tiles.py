"""Tile spaces: counts, indices and what they refuse."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from syncopate_jax.errors import InputError
from syncopate_jax.kernel.tiles import Axis, TileSpace

SPACE = TileSpace((Axis("m", 5, 2), Axis("k", 4, 2, reduction=True), Axis("n", 3, 3)))


def test_counts() -> None:
    assert (SPACE.num_tiles, SPACE.num_steps) == (3, 2)
    assert [axis.count for axis in SPACE.axes] == [3, 2, 1]
    assert [axis.name for axis in SPACE.parallel] == ["m", "n"]
    assert TileSpace(()).num_tiles == TileSpace(()).num_steps == 1
    assert TileSpace((Axis("m", 0, 2),)).num_tiles == 0


def test_indices_are_row_major() -> None:
    index = SPACE.grid_indices()
    assert index["m"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert index["k"].tolist() == [[0, 1]] * 3
    assert not index["n"].any()
    wide = TileSpace((Axis("a", 2, 1), Axis("b", 3, 1)))
    assert wide.coordinates() == tuple(itertools.product(range(2), range(3)))
    stacked = np.stack([wide.grid_indices()[n][:, 0] for n in "ab"], -1)
    assert [tuple(row) for row in stacked.tolist()] == list(wide.coordinates())


@pytest.mark.parametrize("extent,tile", [(-1, 2), (4, 0), (4, -3)])
def test_axes_out_of_range(extent: int, tile: int) -> None:
    text = f"axis m: needs extent >= 0 and tile >= 1, found extent {extent} and tile {tile}"
    with pytest.raises(InputError, match=re.escape(text)):
        Axis("m", extent, tile)


def test_names() -> None:
    with pytest.raises(InputError, match=r"tile space: axis names repeat: \['m', 'm'\]"):
        TileSpace((Axis("m", 4, 2), Axis("m", 4, 2)))
    with pytest.raises(InputError, match="tile space: no axis 'z'; its axes are m, k, n"):
        SPACE.axis("z")
