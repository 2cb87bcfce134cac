"""Chunks of a streamed operand: they cover it, and their sizes end the product soon."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncopate_jax.errors import InputError
from syncopate_jax.ops.stream_chunks import STEP, Pace, Rates, chunk_bounds

H200 = Pace(bands=64, across=56, workers=128, band=19.3, tile=42.3, gap=4.2)  # microseconds


def listed(pace: Pace, bounds: Sequence[int]) -> float:
    """When the last tile is done if workers take tiles in order, each once its chunk is there."""
    free, last = [0.0] * pace.workers, 0.0
    for chunk, (lo, hi) in enumerate(itertools.pairwise(bounds), 1):
        arrived = hi * pace.band + chunk * pace.gap
        for _ in range((hi - lo) * pace.across):
            done = max(heapq.heappop(free), arrived) + pace.tile
            heapq.heappush(free, done)
            last = max(last, done)
    return last


def faster(by: float) -> Pace:
    return Pace(64, 56, 128, 19.3, 42.3 / by, 4.2)


def test_chunks_cover_the_tiles() -> None:
    assert chunk_bounds(10, 4) == [0, 2, 5, 7, 10]
    assert chunk_bounds(3, 16) == [0, 1, 2, 3]


def test_sizes_fall_where_the_copy_takes_longer_and_grow_where_the_product_does() -> None:
    assert np.diff(faster(2.0).bounds()).tolist() == [35, 16, 8, 3, 2]
    assert np.diff(faster(0.5).bounds()).tolist() == [3, 4, 8, 13, 26, 10]
    last = np.diff(H200.bounds())[-1]
    assert last * H200.across <= H200.workers  # the tail is one turn of tiles


def test_one_chunk_where_a_second_would_only_wait() -> None:
    assert Pace(bands=2, across=1, workers=1, band=1.0, tile=1.0, gap=2.0).bounds() == [0, 2]


@given(st.data())
def test_bounds_are_chunks_of_a_turn_that_end_where_the_pace_says(data: st.DataObject) -> None:
    bands, across, workers = (data.draw(st.integers(1, most)) for most in (60, 40, 132))
    band, tile, gap = (data.draw(st.floats(0.1, most)) for most in (50, 50, 5))
    pace = Pace(bands, across, workers, band, tile, gap)
    bounds = pace.bounds()
    sizes = np.diff(bounds)
    assert (bounds[0], bounds[-1]) == (0, bands)
    assert sizes.min() >= min(max(workers // across, 1), bands)
    assert pace.end(bounds) <= listed(pace, bounds) + 1e-6
    for chunks in range(1, 20):  # no equal chunks of a turn or more are much better
        equal = chunk_bounds(bands, chunks)
        if np.diff(equal).min() >= workers / across:
            assert pace.end(bounds) <= 1.1 * pace.end(equal)


def test_they_end_sooner_than_equal_ones_when_workers_take_tiles_in_order() -> None:
    for by in (0.8, 0.9, 1.0, 1.1, 1.3):
        pace = faster(by)
        equal = min(listed(pace, chunk_bounds(64, chunks)) for chunks in range(1, 65))
        assert listed(pace, pace.bounds()) < STEP * equal
    found = listed(H200, H200.bounds()) / (H200.bands * H200.band)
    assert found == pytest.approx(1.09, abs=0.01)  # equal ones: 1.13


def test_the_pace_of_a_shape() -> None:
    rates = Rates(link=50e9, product=1e12, gap=3e-6)
    pace = Pace.of(rates, (64, 28), (128, 512), side=0, depth=4096, itemsize=2, sms=132, cluster=2)
    assert (pace.bands, pace.across, pace.workers) == (64, 28, 64)
    assert pace.band == pytest.approx(128 * 4096 * 2 / 50e9)
    assert pace.tile == pytest.approx(2 * 128 * 512 * 4096 / 2e12)
    wide = Pace.of(rates, (64, 28), (128, 256), side=1, depth=4096, itemsize=4, sms=4)
    assert (wide.bands, wide.across, wide.workers) == (28, 64, 4)
    assert wide.tile == pytest.approx(2 * 128 * 256 * 4096 / 0.5e12)


def test_rates_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match=r"Rates: link must be finite and >= 1\.0, found 0"):
        Rates(link=0)
    with pytest.raises(InputError, match=r"Rates: gap must be finite and >= 0\.0, found '1'"):
        Rates(gap="1")  # type: ignore[arg-type]


def test_what_has_come_is_multiplied_together() -> None:
    def runs(pace: Pace, of: int, most: int) -> list[int]:
        return np.diff(pace.taken([*range(0, pace.bands, of), pace.bands], most)).tolist()

    assert runs(faster(2.0), 2, 16) == [2] * 32  # the copy takes longer
    assert runs(faster(0.5), 2, 16) == [2, 2, 2, 4, 6, 10, 16, 16, 6]
    assert runs(replace(faster(0.5), gap=0.0), 2, 16) == [2, 2, 2, 4, 8, 16, 16, 14]
    assert runs(replace(faster(1.0), band=1e-9, gap=0.0), 8, 16) == [8, 16, 16, 16, 8]
    assert runs(H200, 3, 2) == [3] * 21 + [1]


@given(st.data())
def test_runs_are_whole_chunks(data: st.DataObject) -> None:
    bands, across, workers = (data.draw(st.integers(1, most)) for most in (60, 40, 132))
    band, tile = (data.draw(st.floats(0.1, 50)) for _ in range(2))
    most = data.draw(st.integers(1, 20))
    chunks = [0, *sorted(data.draw(st.sets(st.integers(1, bands))) | {bands})]
    bounds = Pace(bands, across, workers, band, tile, 0.0).taken(chunks, most)
    assert (bounds[0], bounds[-1]) == (0, bands)
    assert set(bounds) <= set(chunks)
    assert all(
        hi - lo <= most or hi == min(c for c in chunks if c > lo)
        for lo, hi in itertools.pairwise(bounds)
    )
