import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from syncopate_jax.pallas_kernels import tile_loop_mosaic_gpu as tile_loop

ORDERS = [((8, 8), 2, "m"), ((8, 8), 2, "n"), ((7, 5), 3, "m"), ((7, 5), 16, "n"), ((1, 4), 8, "m")]


@pytest.mark.parametrize(("shape", "group", "minor"), ORDERS)
def test_natural_order_has_each_tile_once_and_its_table_is_the_order(shape, group, minor):
    order = tile_loop.NaturalOrder(shape, group, minor)
    decode = jax.jit(order.decode)
    decoded = np.stack([np.stack(decode(jnp.int32(p))) for p in range(order.size)])
    assert {tuple(row[:2]) for row in decoded} == set(np.ndindex(shape))
    np.testing.assert_array_equal(order.table(), decoded)


def test_natural_order_snakes():
    table = tile_loop.NaturalOrder((4, 3), group=2, minor="m").table()
    assert [tuple(map(int, row[:2])) for row in table] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2),
        (2, 2), (3, 2), (2, 1), (3, 1), (2, 0), (3, 0),
    ]  # fmt: skip


def test_table_of_a_chunk_is_shifted_and_labelled():
    table = tile_loop.NaturalOrder((2, 2)).table(chunk=3, m_offset=6, n_offset=1)
    assert table.dtype == np.int32
    assert table[:, 0].min() == 6 and table[:, 1].min() == 1
    assert set(table[:, 2]) == {3}


@pytest.mark.parametrize("workers", [1, 3, 40])
@pytest.mark.parametrize("scheduled", [False, True])
def test_workers_share_the_tiles(workers, scheduled):
    natural = tile_loop.NaturalOrder((5, 7), group=2)
    order = natural
    if scheduled:
        order = tile_loop.ScheduledOrder(jnp.asarray(natural.table()[::-1]), natural.size)

    @jax.jit
    def tiles_of(worker):
        loop = tile_loop.TileLoop(order, worker, workers)
        start = jnp.zeros((5, 7), jnp.int32)
        return loop.run(lambda tile, found: found.at[tile.m, tile.n].add(1), start)

    seen = sum(np.asarray(tiles_of(jnp.int32(worker))) for worker in range(workers))
    np.testing.assert_array_equal(seen, 1)


def test_steps_count_up_and_chunks_come_from_the_table():
    rows = jnp.asarray([[0, 0, 4], [0, 1, 5], [1, 0, 6]], jnp.int32)
    loop = tile_loop.TileLoop(tile_loop.ScheduledOrder(rows, 3), jnp.int32(0), 2)

    def log(tile, found):
        return lax.dynamic_update_slice(found, tile.chunk[None], (tile.step,))

    np.testing.assert_array_equal(loop.run(log, jnp.zeros((2,), jnp.int32)), [4, 6])
