"""What a rank's vector leaves out: entries that are the same everywhere."""

from __future__ import annotations

import numpy as np

from syncopate_jax.backends.rank_table import TableMaker


class Unread:
    """A table that nobody may read."""

    def __getitem__(self, at: object) -> int:
        raise AssertionError(f"read {at}")


def test_constant_columns_are_not_read() -> None:
    maker = TableMaker(2)
    rows = np.array([[[7, 1], [7, 2]], [[7, 3], [7, 4]]])
    section = maker.section(rows)
    assert section.constants == (7, None)
    assert section.get(Unread(), 1, 0) == 7


def test_rows_that_pad_do_not_count() -> None:
    maker = TableMaker(2)
    lists = maker.lists([[[[5, 9]], [[5, 9]]], [[[5, 9]], []]], 2)
    assert lists.rows.constants == (5, 9)
    assert (lists.each, lists.most) == (None, 1)


def test_bounds_of_points_alike_are_not_read() -> None:
    maker = TableMaker(1)
    lists = maker.lists([[[[1], [2]], [[3], [4]]]], 1)
    assert lists.each == 2
    assert lists.bounds(Unread(), 1) == (2, 4)
    assert maker.table[0, lists.rows.offset :].tolist() == [1, 2, 3, 4]


def test_a_section_without_rows() -> None:
    assert TableMaker(1).section(np.zeros((1, 0, 2), np.int64)).constants == (0, 0)
