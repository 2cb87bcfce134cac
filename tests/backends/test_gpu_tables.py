"""Tables of fused GPU kernels: counts of waits, places of tiles, pieces of chunks, the record."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.backends import gpu_colocated, gpu_tables, gpu_watchdog
from syncopate_jax.backends.gpu_copy import Grid
from syncopate_jax.backends.gpu_layout import Layout
from syncopate_jax.backends.gpu_ldst import THREADS, LdstMover
from syncopate_jax.backends.gpu_tma import TmaMover
from syncopate_jax.backends.interface import Work
from syncopate_jax.backends.rank_table import Lists, TableMaker
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.options import Launch
from syncopate_jax.pallas_kernels.contraction_mosaic_gpu import contraction
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig
from syncopate_jax.registry import templates

RANKS, COPIERS = 3, 6
CONFIG = MatmulConfig(tile_m=128, tile_n=128, tile_k=64)
SIZES = {"G": RANKS, "S": RANKS, "m": 200, "k": 128, "n": 256}


def work(template: str, kernel: tuple[str, str, str], operand: str, **options: Any) -> Work:
    local = contraction(*kernel, SIZES, config=CONFIG, dtype="bfloat16", out_dtype="bfloat16")
    plan = templates.get(template)(RANKS, (RANKS, 200, options.pop("columns")), axis=0, **options)
    bound = {plan.tensors[0].name: operand}
    launch = Launch(sms=12)
    found = fuse(
        local, plan, bound, axis_name="t", backend="tma_dedicated", target="mosaic_gpu",
        launch=launch,
    )  # fmt: skip
    return found.work


def gathering(**options: Any) -> Work:
    return work("all_gather_swizzle", ("Gmk", "kn", "Gmn"), "lhs", columns=128, **options)


def scattering(**options: Any) -> Work:
    return work("reduce_scatter_direct", ("mk", "kn", "Smn"), "out", columns=256, **options)


def rows(layout: Layout, lists: Lists, rank: int, point: int) -> list[list[int]]:
    """The rows of a point as the kernel reads them."""
    vector = layout.table[rank]
    lo, hi = (int(vector[lists.start.offset + point + i]) for i in (0, 1))
    width = lists.rows.width
    at = lists.rows.offset
    return [vector[at + i * width : at + (i + 1) * width].tolist() for i in range(lo, hi)]


def test_a_wait_counts_every_warpgroup_that_copies_a_part() -> None:
    made = gathering()
    layout = gpu_tables.lay_out(made, COPIERS)
    waits = [
        row for rank in range(RANKS) for p in range(made.schedule.num_tiles)
        for row in rows(layout, layout.waits, rank, p)
    ]  # fmt: skip
    assert waits
    assert {count for _, count in waits} == {COPIERS}


@pytest.mark.parametrize(
    "lay_out", [lambda made: gpu_tables.lay_out(made, COPIERS), gpu_colocated.lay_out]
)
def test_a_layout_is_made_once_and_goes_with_its_work(lay_out: Callable[[Work], Layout]) -> None:
    made = gathering()
    layout, there = lay_out(made), weakref.ref(made)
    assert lay_out(made) is layout
    del made
    gc.collect()
    assert there() is None and layout.num_slots > 0


def test_channels_share_the_warpgroups_that_copy() -> None:
    made = work("all_gather_double_ring", ("Gmk", "kn", "Gmn"), "lhs", columns=128, split=1)
    layout = gpu_tables.lay_out(made, COPIERS + 1)
    assert layout.channels == len(made.schedule.plan.channels)
    counts = {
        count for rank in range(RANKS) for p in range(made.schedule.num_tiles)
        for _, count in rows(layout, layout.waits, rank, p)
    }  # fmt: skip
    assert counts <= {3, 4, 7}


def test_an_operation_waits_for_all_its_tiles() -> None:
    made = scattering()
    layout = gpu_tables.lay_out(made, COPIERS)
    tiles = 2 * 2  # of a chunk of 200 x 256 in tiles of 128 x 128
    found = [count for op in range(RANKS - 1) for _, count in rows(layout, layout.op_waits, 0, op)]
    assert found == [tiles] * (RANKS - 1)


def test_what_nobody_waits_for_is_waited_for_at_the_end() -> None:
    """The sums of an all-reduce arrive where no tile reads them."""
    sizes = SIZES | {"m": 128}
    local = contraction(
        "mk", "kn", "Smn", sizes, config=CONFIG, dtype="bfloat16", out_dtype="bfloat16"
    )
    plan = templates.get("all_reduce_two_shot")(RANKS, (RANKS, 128, 256), axis=0)
    made = fuse(
        local, plan, {"y": "out"}, axis_name="t", backend="tma_dedicated", target="mosaic_gpu",
        launch=Launch(sms=12),
    ).work  # fmt: skip
    layout = gpu_tables.lay_out(made, COPIERS)
    for rank in range(RANKS):
        waits = rows(layout, layout.exit_waits, rank, 0)
        assert len(waits) == RANKS  # one from every owner, itself too
        assert {count for _, count in waits} == {COPIERS}
        assert all(slot >= made.schedule.num_slots[rank] for slot, _ in waits)


def test_tiles_send_themselves() -> None:
    made = scattering()
    layout = gpu_colocated.lay_out(made)
    assert layout.moves == []
    targets = [
        [
            row[1]
            for p in range(made.schedule.num_tiles)
            for row in rows(layout, layout.stores, r, p)
        ]
        for r in range(RANKS)
    ]
    assert [np.bincount(found, minlength=RANKS).tolist() for found in targets] == [[4] * 3] * 3
    waits = [
        count for p in range(made.schedule.num_tiles)
        for _, count in rows(layout, layout.e_waits, 0, p)
    ]  # fmt: skip
    assert set(waits) == {4}


def test_readers_of_a_peer_are_waited_for() -> None:
    made = gathering()
    layout = gpu_colocated.lay_out(made)
    assert layout.waits.empty
    for rank in range(RANKS):
        ((slot, count),) = rows(layout, layout.exit_waits, rank, 0)
        assert count == (RANKS - 1) * made.schedule.workers
        told = rows(layout, layout.exit_signals, (rank + 1) % RANKS, 0)
        assert [rank, slot] in told


def test_pieces_end_where_the_chunk_ends() -> None:
    grid = Grid.of((1, 200, 96), (1, 2), (64, 64))
    assert grid.counts == (1, 4, 2)
    corners = [[int(at) for at in grid.offsets(jnp.int32(i))] for i in range(grid.count)]
    covered = np.zeros((200, 96), bool)
    for _, row, column in corners:
        covered[row : row + 64, column : column + 64] = True
        assert row + 64 <= 200
        assert column + 64 <= 96
    assert covered.all()


def test_pieces_of_the_copy_unit() -> None:
    layout = gpu_tables.lay_out(gathering(), COPIERS)
    assert TmaMover(rows=32).pieces(layout) == {jnp.dtype("bfloat16"): (32, 128)}


def test_pieces_of_threads_have_whole_accesses() -> None:
    layout = gpu_tables.lay_out(gathering(), COPIERS)
    height, width, vector = LdstMover().pieces(layout)[jnp.dtype("bfloat16")]
    assert vector == 8
    assert width % vector == 0
    assert height * width % (THREADS * vector) == 0
    assert height <= 200
    assert width <= 128


def test_chunks_smaller_than_a_warpgroup_are_refused() -> None:
    tiny = SIZES | {"m": 1, "k": 64}
    local = contraction(
        "Gmk", "kn", "Gmn", tiny, config=CONFIG, dtype="bfloat16", out_dtype="bfloat16"
    )
    plan = templates.get("all_gather_swizzle")(RANKS, (RANKS, 1, 64), axis=0)
    with pytest.raises(UnsupportedError, match="chunks of 1 x 64 elements are fewer than the 128"):
        fuse(
            local, plan, {"x": "lhs"}, axis_name="t", backend="ldst_dedicated",
            target="mosaic_gpu", launch=Launch(sms=12),
        )  # fmt: skip


def test_columns_that_are_all_zero_cost_no_load() -> None:
    maker = TableMaker(2)
    section = maker.section(np.array([[[0, 6], [0, 9]], [[0, 12], [0, 0]]]))
    assert section.multiples == (0, 3)
    assert maker.table.tolist() == [[0, 6, 0, 9], [0, 12, 0, 0]]


def test_the_record_of_the_watchdog_in_words() -> None:
    order = np.array([[5, 7]])
    row = [3, 0, 1, 4, 9, 12]
    text = gpu_watchdog.describe(row, order)
    assert text == (
        "rank 0: tile 7 (position 1, step 4) waited in vain for signal 9 to reach 12, it was 2"
    )
    assert "an operation or the end of the launch" in gpu_watchdog.describe(
        [1, 0, -1, -1, 0, 4], order
    )


def test_a_wait_given_up_is_an_error_of_the_call() -> None:
    record = jnp.array([[0] * 6, [1, 1, 0, -1, 2, 6]], jnp.int32)
    with pytest.raises(Exception, match=re.escape("rank 1: tile 3 (position 0) waited in vain")):
        gpu_watchdog.raise_given_up(record, "p", np.array([[0], [3]]))
