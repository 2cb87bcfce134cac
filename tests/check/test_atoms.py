"""The grid of atoms: numbering, cuts that are carried along, and the way back to boxes."""

from __future__ import annotations

import numpy as np

from syncopate_jax.check.atoms import Boxes, Grid


def boxes(*rows: tuple[int, list[int], list[int]]) -> Boxes:
    tensor, lo, hi = zip(*rows, strict=True)
    return Boxes(np.array(tensor), np.array(lo), np.array(hi))


def test_atoms_are_numbered_over_all_tensors() -> None:
    given = boxes((0, [0, 2], [3, 6]), (1, [1, 0], [2, 1]))
    grid = Grid(np.array([[4, 6], [2, 1]]), [given], [])
    assert grid.count == 4 + 2
    owner, atom = grid.atoms(boxes((0, [0, 0], [4, 6]), (1, [1, 0], [2, 1]), (0, [3, 0], [4, 6])))
    assert owner.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert atom.tolist() == [0, 1, 2, 3, 5, 2, 3]


def test_bounds_lead_back() -> None:
    grid = Grid(np.array([[4, 6], [2, 1]]), [boxes((0, [0, 2], [3, 6]))], [])
    found = grid.bounds(np.arange(grid.count))
    assert found.tensor.tolist() == [0, 0, 0, 0, 1]
    assert found.lo.tolist() == [[0, 0], [0, 2], [3, 0], [3, 2], [0, 0]]
    assert found.hi.tolist() == [[3, 2], [3, 6], [4, 2], [4, 6], [2, 1]]
    tensor, lo, hi = grid.hull(np.array([1, 3]))
    assert (tensor, lo.tolist(), hi.tolist()) == (0, [0, 2], [4, 6])


def test_cuts_are_carried_both_ways_until_nothing_is_new() -> None:
    """x[0:4] -> y[2:6] -> z[0:4]; a cut of x and one of z appear in all three."""
    cuts = boxes((0, [1], [4]), (2, [0], [3]))
    links = [
        (boxes((0, [0], [4])), boxes((1, [2], [6]))),
        (boxes((1, [2], [6])), boxes((2, [0], [4]))),
    ]
    grid = Grid(np.array([[4], [8], [4]]), [cuts, *links[0], *links[1]], links)
    found = grid.bounds(np.arange(grid.count))
    starts = [found.lo[found.tensor == t, 0].tolist() for t in range(3)]
    assert starts == [[0, 1, 3], [0, 2, 3, 5, 6], [0, 1, 3]]


def test_tensors_without_dimensions_or_elements() -> None:
    grid = Grid(np.zeros((2, 0), np.int64), [], [])
    assert grid.count == 2
    grid = Grid(np.array([[0], [3], [0]]), [], [])
    assert grid.count == 1
    assert grid.bounds(np.array([0])).tensor.tolist() == [1]
