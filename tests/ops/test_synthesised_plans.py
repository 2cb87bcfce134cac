"""Operators run plans that were made for a topology."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from syncopate_jax.ir import presets
from syncopate_jax.ops import all_gather_matmul, matmul_reduce_scatter
from syncopate_jax.synthesis.synthesize import synthesize

# As the operators lay out 64 x 128 that four ranks share: by rank, batch, rows, columns.
SHAPE = (4, 1, 16, 128)


@pytest.mark.slow
def test_a_ring_is_used_as_it_is() -> None:
    topology = presets.ring(4)
    mesh = jax.make_mesh((4,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(0), (64, 128))
    w = jax.random.normal(jax.random.key(1), (128, 128))
    gather = synthesize("all_gather", topology, SHAPE, dtype="float32", chunks=1)
    scatter = synthesize("reduce_scatter", topology, SHAPE, dtype="float32", chunks=1)
    for plan in (gather, scatter):
        assert np.all((plan.columns.src_rank - plan.columns.dst_rank) % 4 % 2 == 1)

    def gathered(x: jax.Array, w: jax.Array) -> jax.Array:
        return all_gather_matmul(x, w, axis_name="tp", plan=gather, backend="remote_dma")

    def scattered(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul_reduce_scatter(x, w, axis_name="tp", plan=scatter, backend="remote_dma")

    rows, columns = P("tp"), P(None, "tp")
    for function, specs, out in ((gathered, (rows, columns), columns),
                                 (scattered, (columns, rows), rows)):  # fmt: skip
        y = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))(x, w)
        np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)
