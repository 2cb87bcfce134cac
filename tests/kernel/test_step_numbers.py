"""What a body may ask of the number of a step that is walked in another order."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.traced_body import check_body, trace_body

COUNT = 4
ARRIVAL = (2, 0, 3, 1)


def kernel(body: Callable[..., None]) -> PallasKernel:
    """Sums blocks of one number along grid axis 1; ``s`` is the same at every step."""
    return PallasKernel(
        body,
        grid=(2, COUNT),
        operands=("x", "s"),
        results=("y",),
        in_specs=[
            pl.BlockSpec((1, 1), lambda i, k: (i, k)),
            pl.BlockSpec((1, 1), lambda i, k: (i, 0)),
        ],
        out_specs=pl.BlockSpec((1, 1), lambda i, k: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((2, 1), jnp.float32),
        scratch_shapes=pltpu.VMEM((1, 1), jnp.float32),
        name="sums",
    )


def walked(body: Callable[..., None], x: np.ndarray) -> jax.Array:
    """The kernel's result, with the steps of each tile walked in the order of ARRIVAL."""
    local = kernel(body)

    def step(order: Any, x_ref: Any, *refs: Any) -> None:
        tile, visit = pl.program_id(0), pl.program_id(1)
        traced = trace_body(local, [x_ref, *refs], (1,), {})
        traced([tile, order[visit]], [tile, visit])

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=local.grid,
        in_specs=[
            pl.BlockSpec((1, 1), lambda i, v, order: (i, order[v])),
            pl.BlockSpec((1, 1), lambda i, v, order: (i, 0)),
        ],
        out_specs=pl.BlockSpec((1, 1), lambda i, v, order: (i, 0)),
        scratch_shapes=local.scratch_shapes,
    )
    call = pl.pallas_call(step, grid_spec=spec, out_shape=local.out_shape[0], interpret=True)
    return call(jnp.array(ARRIVAL), x, jnp.full((2, 1), 3.0))


def weighed(x: Any, s: Any, y: Any, acc: Any) -> None:
    k = pl.program_id(1)

    @pl.when(k == 0)
    def _() -> None:
        acc[...] = s[...]

    acc[...] += x[...] * (k + 10 * pl.program_id(0)).astype(jnp.float32)

    @pl.when(k == pl.num_programs(1) - 1)
    def _() -> None:
        y[...] = acc[...]


def nested(x: Any, s: Any, y: Any, acc: Any) -> None:
    """All conditions on visits inside another, and one block picked out."""

    @pl.when(pl.program_id(0) >= 0)
    def _() -> None:
        @pl.when(pl.program_id(1) < 1)
        def _() -> None:
            acc[...] = s[...]

    k = pl.program_id(1)

    @pl.when((k == 1) | (k == 2))
    def _() -> None:
        acc[...] += x[...] * k

    acc[...] += x[...] * jnp.where(pl.program_id(1) == 3, 3.0, 0.0)
    acc[...] += lax.fori_loop(0, 2, lambda i, total: total + 5 * x[...] * k, jnp.zeros((1, 1)))

    @pl.when(jnp.logical_not(pl.program_id(1) != pl.num_programs(1) - 1))
    def _() -> None:
        y[...] = acc[...]


@pytest.mark.parametrize(
    ("body", "weights"),
    [(weighed, [[0, 1, 2, 3], [10, 11, 12, 13]]), (nested, [[0, 11, 22, 33], [0, 11, 22, 33]])],
)
def test_results_are_those_of_the_natural_order(
    body: Callable[..., None], weights: list[list[int]]
) -> None:
    x = np.arange(1, 9, dtype="f").reshape(2, COUNT)
    wanted = 3 + (x * weights).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(walked(body, x), wanted)


def refusal(body: Callable[..., None]) -> str:
    dtypes = {"x": "float32", "s": "float32"}
    check_body(kernel(body), {}, dtypes, [range(COUNT)], None)  # in the grid's order all is well
    with pytest.raises(UnsupportedError) as caught:
        check_body(kernel(body), {}, dtypes, [ARRIVAL], None)
    return str(caught.value)


def stores_or_adds(x: Any, s: Any, y: Any, acc: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        y[...] = x[...]

    @pl.when(pl.program_id(1) > 0)
    def _() -> None:
        y[...] += x[...]


def passes_a_block(x: Any, s: Any, y: Any, acc: Any) -> None:
    part = 2 * x[...]

    @pl.when(pl.program_id(1) == COUNT - 1)
    def _() -> None:
        y[...] = part


def passes_its_number(x: Any, s: Any, y: Any, acc: Any) -> None:
    k = pl.program_id(1)

    @pl.when(k == 0)
    def _() -> None:
        y[...] = s[...] * k


@pytest.mark.parametrize("body", [passes_a_block, passes_its_number])
def test_a_first_step_that_depends_on_its_block(body: Callable[..., None]) -> None:
    assert refusal(body) == (
        "kernel sums: what the body does where pl.program_id(1) is first or last depends on the "
        "block of that step, but this plan walks that reduction in the order of arrival, so the "
        "first step is not block 0: only start and finish under this condition, and use the "
        "step's block at every step alike; or use backend 'xla'"
    )


def test_one_value_that_is_asked_both() -> None:
    def body(x: Any, s: Any, y: Any, acc: Any) -> None:
        first = pl.program_id(1) == 0

        @pl.when(first)
        def _() -> None:
            y[...] = s[...]

        y[...] += jnp.where(first, 2.0, 1.0) * x[...]

    assert re.match(
        re.escape(
            "kernel sums: one value that the body makes of pl.program_id(1) both decides what is "
            "done at the first or last step and is used as the block's number"
        ),
        refusal(body),
    )


def start(first: Callable[[], Any]) -> Callable[..., None]:
    """A sum that starts under a condition of its own, and finishes at every step."""

    def body(x: Any, s: Any, y: Any, acc: Any) -> None:
        @pl.when(first())
        def _() -> None:
            acc[...] = jnp.zeros((1, 1))

        acc[...] += x[...]
        y[...] = acc[...]

    return body


def finish(x: Any, s: Any, y: Any, acc: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        acc[...] = s[...]

    acc[...] += x[...]

    @pl.when(pl.program_id(1) * 2 == 2 * COUNT - 2)
    def _() -> None:
        y[...] = acc[...]


@pytest.mark.parametrize(
    "body",
    [
        start(lambda: pl.program_id(1) + 1 == 1),
        start(lambda: pl.program_id(1) % COUNT == 0),
        start(lambda: pl.program_id(1) * 2 == 0),
        finish,
    ],
)
def test_starts_and_ends_under_other_conditions(body: Callable[..., None]) -> None:
    assert "stores a start or a result that does not go on from what was there" in refusal(body)


def reset(x: Any, s: Any, y: Any, acc: Any) -> None:
    y[...] = jnp.where(pl.program_id(1) == 0, 0.0, y[...]) + x[...]


def scaled(x: Any, s: Any, y: Any, acc: Any) -> None:
    y[...] = y[...] * (pl.program_id(1) > 0).astype(jnp.float32) + x[...]


@pytest.mark.parametrize("body", [reset, scaled])
def test_what_is_kept_is_chosen_by_the_number(body: Callable[..., None]) -> None:
    assert "is chosen or scaled by whether pl.program_id(1) is first or last" in refusal(body)


def test_the_last_block_wins() -> None:
    def body(x: Any, s: Any, y: Any, acc: Any) -> None:
        y[...] = 2 * x[...]

    assert "so the last block is what counts" in refusal(body)


def test_a_block_is_copied_at_the_first_step() -> None:
    def body(x: Any, s: Any, y: Any, acc: Any) -> None:
        pl.when(pl.program_id(1) == 0)(lambda: pltpu.sync_copy(x, y))

    assert "depends on the block of that step" in refusal(body)


def chosen_value(x: Any, s: Any, y: Any, acc: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        y[...] = s[...]

    y[...] += x[...] * lax.cond(pl.program_id(1) == 0, lambda: 1.0, lambda: 2.0)


def scoped(x: Any, s: Any, y: Any, acc: Any) -> None:
    def inner(held: Any) -> None:
        held[...] = x[...] * 2

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            y[...] = s[...]

        y[...] += held[...]

    pl.run_scoped(inner, pltpu.VMEM((1, 1), jnp.float32))


def skipping(x: Any, s: Any, y: Any, acc: Any) -> None:
    """As a causal mask skips blocks."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        y[...] = s[...]

    @pl.when(pl.program_id(1) <= pl.program_id(0) + 1)
    def _() -> None:
        y[...] += x[...]


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        (chosen_value, [[1, 2, 2, 2]] * 2),
        (skipping, [[1, 1, 0, 0], [1, 1, 1, 0]]),
    ],
)
def test_a_block_has_its_own_weight(body: Callable[..., None], weights: list[list[int]]) -> None:
    x = np.arange(1, 9, dtype="f").reshape(2, COUNT)
    wanted = 3 + (x * weights).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(walked(body, x), wanted)


def test_one_condition_inside_a_scope_is_asked_once() -> None:
    check_body(kernel(scoped), {}, {"x": "float32", "s": "float32"}, [ARRIVAL], None)


def test_an_inner_sum_of_two_reductions_that_are_mixed() -> None:
    def body(x: Any, y: Any, part: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            part[...] = jnp.zeros((1, 1))

        part[...] += x[...]

        @pl.when((pl.program_id(0) == 1) & (pl.program_id(1) == 1))
        def _() -> None:
            y[...] = part[...]

    two = PallasKernel(
        body,
        grid=(2, 2),
        operands=("x",),
        results=("y",),
        in_specs=[pl.BlockSpec((1, 1), lambda a, b: (a, b))],
        out_specs=pl.BlockSpec((1, 1), lambda a, b: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((1, 1), jnp.float32),
        scratch_shapes=pltpu.VMEM((1, 1), jnp.float32),
        name="nested",
    )
    check_body(two, {}, {"x": "float32"}, [(1, 0, 3, 2)], None)  # the outer axis in its order
    text = r"where pl\.program_id\(1\) is first or last whatever pl\.program_id\(0\) is"
    with pytest.raises(UnsupportedError, match=text):
        check_body(two, {}, {"x": "float32"}, [(3, 0, 1, 2)], None)
