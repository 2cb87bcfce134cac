"""What a rank's vector leaves out: entries that are the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.backends.rank_table import MOST_AHEAD, TableMaker, as_int32
from syncopate_jax.errors import UnsupportedError


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


POINTS = [[[[1, 5], [2, 5]], [], [[3, 5]]], [[], [[4, 5]], [[6, 5]]]]


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_read_ahead_are_the_point_s(rank: int) -> None:
    maker = TableMaker(2)
    plain = maker.lists(POINTS, 2)
    lists = maker.shortened(plain)
    table = maker.table[rank]
    assert lists.counts is not None
    for point, wanted in enumerate(POINTS[rank]):
        known = lists.ahead(table, point)
        assert known is not None and known.count == len(wanted)
        rows = [[get(column) for column in range(2)] for get in known.rows]
        assert rows[: len(wanted)] == wanted


def test_all_of_a_point_is_read_at_once() -> None:
    maker = TableMaker(2)
    lists = maker.shortened(maker.lists(POINTS, 2))

    class Seen(dict[int, int]):
        def __getitem__(self, at: int) -> int:
            assert isinstance(at, int)  # known without the table
            self.setdefault(at, 0)
            return 0

    seen = Seen()
    lists.ahead(seen, 2)
    assert len(seen) == 1 + 2  # how many there are, and the column that differs of two rows


def test_points_alike_need_no_copy() -> None:
    maker = TableMaker(1)
    lists = maker.lists([[[[1], [2]], [[3], [4]]]], 1)
    known = maker.shortened(lists).ahead(maker.table[0], 1)
    assert known is not None and known.count is None
    assert [get(0) for get in known.rows] == [3, 4]


def test_long_lists_are_not_read_ahead() -> None:
    maker = TableMaker(1)
    lists = maker.shortened(maker.lists([[[[n] for n in range(MOST_AHEAD + 1)], []]], 1))
    assert lists.ahead(Unread(), 0) is None


@pytest.mark.parametrize("entry", [2**31, -(2**31) - 1, 2**32 + 5])
def test_entries_past_32_bits_are_refused(entry: int) -> None:
    rows = np.array([[[0], [entry]]])
    with pytest.raises(UnsupportedError, match=rf"entries are of 32 bits, and .* is {entry}: use"):
        TableMaker(1).section(rows)
    edge = np.array([2**31 - 1, -(2**31)])
    assert as_int32(edge).dtype == np.int32 and as_int32(edge).tolist() == edge.tolist()
