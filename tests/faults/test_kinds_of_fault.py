"""Kinds of fault that systems which fuse kernels with communication are known to have had.

Shown here, each on the smallest input that would have it: a consumer slower than its producer, a
rank that enters late, a result read the moment it is made, counters that drift over many calls,
memory that nobody wrote, state that leaks from one call to the next, tile groups that do not
divide the grid, defaults that assume a number of ranks, sizes of one, sizes that are no powers of
two, partial sums rounded at every hop, a collective beside the operator on the same buffer,
shardings that change, results that differ between calls or processes, caches without a bound.
Elsewhere: waits without signals (``tests/backends/test_in_order.py``), unordered memory
(``tests/ops/test_races.py``), meshes, transformations, type checks and gradients summed once too
often (``tests/ops/test_programs.py``, ``test_lowering.py``), arguments (``test_bad_input.py``,
``test_bad_plans.py``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from syncopate_jax import ops
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.ops import all_gather_matmul, fused, matmul_reduce_scatter
from tests import interpret
from tests.backends import own_kernels
from tests.ops import cases, guarded
from tests.ops.cases import BY_NAME, CASES, Case

P = jax.P
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@pytest.mark.parametrize("late", [0, 1])
def test_a_producer_far_ahead_of_its_consumer(late: int) -> None:
    """Four pieces have arrived, and raised their counters, before the late rank's first wait."""
    arrays = cases.operands(1, 8, 4, 4)
    options = {"split": 4, "tiles": {"m": 1}}
    assert guarded.run_once(BY_NAME["gather_x_m"], 2, arrays, "eager", late=late, **options) < 1e-6


def loop(turns: int, backend: str) -> Any:
    """Gather and scatter in turns, each result used at once by an ordinary operation."""

    def body(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        def turn(x: jax.Array, _: None) -> Any:
            hidden = all_gather_matmul(x, up, axis_name="t", backend=backend)
            y = matmul_reduce_scatter(jnp.tanh(hidden), down, axis_name="t", backend=backend)
            return jnp.tanh(y), None

        return lax.scan(turn, x, None, length=turns)[0]

    return jax.shard_map(
        body, mesh=cases.ranks_mesh(2), in_specs=(P("t"), P(None, "t"), P("t")), out_specs=P("t")
    )


@pytest.mark.slow
def test_many_calls_leave_nothing_behind() -> None:
    """Twelve turns: every counter is back at zero each time, and no turn sees another's state."""
    rng = np.random.default_rng(0)
    x, up, down = (jnp.asarray(rng.standard_normal((4, 4)), jnp.float32) for _ in range(3))
    run = jax.jit(loop(12, "remote_dma"))
    y = interpret.run_guarded(run, x, up, down, timeout=30.0)
    again = interpret.run_guarded(run, x, up, down, timeout=30.0)
    np.testing.assert_array_equal(y, again)
    np.testing.assert_allclose(y, jax.jit(loop(12, "xla"))(x, up, down), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_memory_that_nobody_wrote_is_not_read() -> None:
    """Buffers start as NaN; tiles cut by the edge of every rank's block stay clear of it."""
    settings = interpret.params("eager", detect_races=False)
    assert settings.uninitialized_memory == "nan"
    x, w, ct = cases.operands(1, 10, 4, 6)
    for name in ("gather_x_m", "scatter_m"):
        run = guarded.fused(BY_NAME[name], 2, settings, tiles={"m": 4, "n": 4})
        y = np.asarray(run(x, w), np.float64)
        assert cases.error(y, cases.exact(x, w, ct)[0]) < 1e-6


@pytest.mark.parametrize("order", ["grouped", "snake"])
@pytest.mark.parametrize("tiles", [7, 9, 10, 13])
def test_groups_of_tiles_that_do_not_divide_the_grid(tiles: int, order: str) -> None:
    plan = own_kernels.gather_plan(1, t=(2 * tiles, 4))
    kernel = own_kernels.scale(2 * tiles, 4)
    schedule = fuse(kernel, plan, {"t": "x"}, axis_name="t", order=order).work.schedule
    assert sorted(schedule.order[0].tolist()) == list(range(tiles))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", sorted({case.operator.__name__ for case in CASES}))
def test_only_what_is_required(name: str, ranks: int) -> None:
    """No default knows the number of ranks."""
    case = next(c for c in CASES if c.operator is getattr(ops, name))
    x, w, ct = cases.operands(1, 24, 24, 24)
    fn = cases.sharded(case, cases.ranks_mesh(ranks))
    assert jax.eval_shape(fn, x, w).shape == ct.shape


@pytest.mark.parametrize("name", ["gather_x_m", "scatter_m", "to_rows"])
def test_sizes_of_one(name: str) -> None:
    x, w, ct = cases.operands(1, 2, 2, 2)
    fn = jax.jit(cases.sharded(BY_NAME[name], cases.ranks_mesh(2), backend="remote_dma"))
    assert cases.error(np.asarray(fn(x, w)), cases.exact(x, w, ct)[0]) < 1e-6


@each_case
def test_shapes_that_are_no_powers_of_two_or_huge(case: Case) -> None:
    for ranks, n in ((6, 2880), (3, 51 * 1024), (8, 16384)):
        x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 24 * ranks, 96), (96, n)))
        for backend in ("xla", "remote_dma"):
            fn = cases.sharded(case, cases.ranks_mesh(ranks), backend=backend)
            assert jax.eval_shape(fn, x, w).shape == (1, 24 * ranks, n)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["reduce_scatter_direct", "reduce_scatter_ring"])
def test_errors_of_sums_do_not_grow_with_the_ranks(plan: str) -> None:
    found = {}
    for ranks in (2, 8):
        x, w, ct = cases.operands(1, 16, 64, 16, "bfloat16")
        fn = cases.sharded(BY_NAME["scatter_m"], cases.ranks_mesh(ranks), backend="remote_dma",
                           plan=plan)  # fmt: skip
        y = np.asarray(jax.jit(fn)(x, w), np.float64)
        found[ranks] = cases.error(y, cases.exact(x, w, ct)[0])
    assert found[8] < 2 * found[2] < 2 * 2.0**-8


def test_a_permutation_of_the_same_buffer_beside_the_operator() -> None:
    x, w, _ = cases.operands(1, 4, 4, 4)

    def body(backend: str) -> Any:
        def run(x: jax.Array, w: jax.Array) -> Any:
            ring = [(0, 1), (1, 0)]
            before = lax.ppermute(x, "t", ring)
            y = all_gather_matmul(x, w, axis_name="t", backend=backend)
            return y, before + lax.ppermute(x, "t", ring)

        return jax.shard_map(
            run, mesh=cases.ranks_mesh(2), in_specs=(P(None, "t"), P(None, "t")),
            out_specs=(P(None, None, "t"), P(None, "t")),
        )  # fmt: skip

    found, wanted = (jax.jit(body(b))(x, w) for b in ("remote_dma", "xla"))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@each_case
def test_results_are_sharded_as_the_specs_say(case: Case) -> None:
    x, w, _ = cases.operands(1, 4, 4, 4)
    mesh = cases.ranks_mesh(2)
    wanted = jax.NamedSharding(mesh, cases.spec(case.out, 3, "t"))
    fn = jax.jit(cases.sharded(case, mesh))
    assert fn(x, w).sharding.is_equivalent_to(wanted, 3)
    replicated = jax.NamedSharding(mesh, P())
    constrained = jax.jit(lambda x, w: lax.with_sharding_constraint(fn(x, w), replicated))
    assert constrained(x, w).sharding.is_equivalent_to(replicated, 3)


@pytest.mark.slow
def test_ten_calls_give_the_same_bits() -> None:
    """With sums over three ranks, whose order must not depend on who comes first."""
    x, w, _ = cases.operands(1, 6, 6, 6)
    fn = jax.jit(cases.sharded(BY_NAME["scatter_m"], cases.ranks_mesh(3), backend="remote_dma"))
    first = np.asarray(fn(x, w))
    assert all(np.array_equal(first, fn(x, w)) for _ in range(9))


_PRINT_TABLE = """
import zlib
from tests.backends import own_kernels
from syncopate_jax.backends import dma_tables
from syncopate_jax.compiler import compile as fuse
plan = own_kernels.gather_and_scatter_plan(3, (12, 3), (12, 6))
kernel = own_kernels.product(12, 3, 6, 2, has_addend=True)
work = fuse(kernel, plan, {"x": "x", "y": "out"}, axis_name="t").work
layout = dma_tables.lay_out(work)
print(zlib.crc32(layout.table.tobytes()), layout.leave_together)
"""


@pytest.mark.slow
def test_two_processes_make_the_same_program() -> None:
    def table(seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-W", "ignore", "-c", _PRINT_TABLE]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    first = table("1")
    assert len(first.split()) == 2 and table("2") == first


def test_caches_have_a_bound() -> None:
    size = fused.remembered.cache_info().maxsize
    assert size is not None and size <= 4096
