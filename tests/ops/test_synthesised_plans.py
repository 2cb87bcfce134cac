"""Operators run plans that were made for a topology."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import InputError
from syncopate_jax.ir import presets
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ops import all_gather_matmul, matmul_reduce_scatter
from syncopate_jax.registry import templates
from syncopate_jax.synthesis.synthesize import synthesize
from tests.backends import own_kernels

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


@pytest.mark.parametrize(
    ("plan", "backend"),
    [
        (synthesize("all_reduce", presets.h200_nvlink(4), (64, 16), dtype="float32"), "xla"),
        (templates.get("collective")(4, (64, 16), kind="all_reduce", dtype="float32"), "xla"),
        (synthesize("all_reduce", presets.ring(4), (64, 16), dtype="float32"), "remote_dma"),
        (
            synthesize("all_reduce", presets.h200_nvlink(4), (1024, 1024), dtype="float32"),
            "remote_dma",
        ),
        (templates.get("all_reduce_two_shot")(4, (64, 16), dtype="float32"), "remote_dma"),
    ],
)
def test_which_all_reduces_can_be_fused(plan: Plan, backend: str) -> None:
    """As ``docs/synthesis.md`` says; ``auto`` takes xla for the others."""
    rows, columns = plan.tensors[0].shape
    kernel = own_kernels.product(rows, 8, columns, rows // 8, has_addend=True)
    operator = fuse(kernel, plan, {"y": "out"}, axis_name="tp")
    assert operator.backend.name == backend
    reasons = operator.passed_over.get("remote_dma", "")
    assert ("reduces into data that no tile writes" in reasons) == (backend == "xla")


@pytest.mark.parametrize("backend", ["auto", "xla", "remote_dma"])
def test_a_plan_of_another_shape_is_refused_by_all(backend: str) -> None:
    plan = synthesize("all_gather", presets.ring(4), (64, 128), dtype="float32")
    mesh = jax.make_mesh((4,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:4])

    def gathered(x: jax.Array, w: jax.Array) -> jax.Array:
        return all_gather_matmul(x, w, axis_name="tp", plan=plan, backend=backend)

    run = jax.shard_map(gathered, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"))
    words = r"its shape is \(64, 128\), this all_gather needs \(4, 1, 16, 128\)"
    with pytest.raises(InputError, match=words):
        jax.eval_shape(run, np.ones((64, 128), np.float32), np.ones((128, 8), np.float32))
