"""Scratch in which a tile finds what another left, and scratch in which it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.traced_body import check_body


def check(body: Callable[..., None]) -> None:
    """Tiles along grid axes 0 and 1, a reduction along 2, two scratch arrays."""
    block = pl.BlockSpec((1, 1), lambda i, j, k: (i, j))
    kernel = PallasKernel(
        body,
        grid=(3, 5, 2),
        operands=("x",),
        results=("y",),
        in_specs=block,
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((3, 5), jnp.float32),
        scratch_shapes=[pltpu.VMEM((1, 1), jnp.float32)] * 2,
        name="sums",
    )
    check_body(kernel, {}, {"x": "float32"}, [(0, 1)], None)


def under_a_tiles_number(x: Any, y: Any, acc: Any, _: Any) -> None:
    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    acc[...] += x[...]
    y[...] = acc[...]


def by_where(x: Any, y: Any, acc: Any, _: Any) -> None:
    acc[...] = jnp.where(pl.program_id(1) % 4 == 0, 0.0, acc[...]) + x[...]

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        y[...] = jnp.exp(acc[...])


def never_started(x: Any, y: Any, acc: Any, total: Any) -> None:
    total[...] = x[...]
    acc[...] += total[...]
    y[...] = acc[...]


def under_a_condition_on_data(x: Any, y: Any, acc: Any, _: Any) -> None:
    @pl.when(x[0, 0] > 0)
    def _() -> None:
        acc[...] = x[...]

    y[...] = acc[...]


def in_a_loop_as_long_as_a_number_says(x: Any, y: Any, acc: Any, _: Any) -> None:
    @pl.loop(0, 1 - jnp.minimum(pl.program_id(1) + pl.program_id(2), 1))
    def _(_: Any) -> None:
        acc[...] = jnp.zeros_like(acc)

    acc[...] += x[...]
    y[...] = acc[...]


@pytest.mark.parametrize("body", [under_a_tiles_number, by_where, never_started])
def test_state_of_another_tile(body: Callable[..., None]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check(body)
    at = (0, 0, 0) if body is never_started else (1, 2, 0 if body is under_a_tiles_number else 1)
    assert str(caught.value) == (
        f"kernel sums: the tile at grid point {at} makes its result of what an earlier tile left "
        f"in scratch, but tiles are computed in the order in which chunks arrive; start the "
        f"scratch at the first step of every tile, or use backend 'xla'"
    )


@pytest.mark.parametrize("body", [under_a_condition_on_data, in_a_loop_as_long_as_a_number_says])
def test_state_of_another_tile_that_only_a_trial_sees(body: Callable[..., None]) -> None:
    with pytest.raises(UnsupportedError, match=r"sums: a tile \(y\[0, 0\] is .* left in scratch"):
        check(body)


def started_at_the_first_step(x: Any, y: Any, acc: Any, _: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    acc[...] += x[...]
    y[...] = acc[...]


def started_by_where(x: Any, y: Any, acc: Any, _: Any) -> None:
    acc[...] = jnp.where(pl.program_id(2) == 0, 0.0, acc[...]) + x[...]
    y[...] = acc[...]


def masked_by_zero(x: Any, y: Any, acc: Any, _: Any) -> None:
    acc[...] = acc[...] * (pl.program_id(2) != 0).astype(jnp.float32) + x[...]
    y[...] = acc[...]


def the_step_before(x: Any, y: Any, now: Any, before: Any) -> None:
    """At the first step stale scratch is moved, and nobody uses it."""
    before[...] = now[...]
    now[...] = x[...]

    @pl.when(pl.program_id(2) > 0)
    def _() -> None:
        y[...] = before[...] + now[...]


@pytest.mark.parametrize(
    "body",
    [
        started_at_the_first_step,
        started_by_where,
        masked_by_zero,
        the_step_before,
    ],
)
def test_tiles_that_stand_alone(body: Callable[..., None]) -> None:
    check(body)


def stores_into_its_operand(x: Any, y: Any, acc: Any, _: Any) -> None:
    x[...] = x[...] + 1
    y[...] = x[...]


def adds_to_its_operand_in_a_loop(x: Any, y: Any, acc: Any, _: Any) -> None:
    def step(i: jax.Array, carry: int) -> int:
        @pl.when(x[i, 0] > 0)
        def _() -> None:
            x[i, 0] += 1

        return carry

    jax.lax.fori_loop(0, x.shape[0], step, 0)
    y[...] = x[...]


@pytest.mark.parametrize("body", [stores_into_its_operand, adds_to_its_operand_in_a_loop])
def test_operands_stay_as_they_came(body: Callable[..., None]) -> None:
    with pytest.raises(UnsupportedError, match="the body stores into its operand x, which other"):
        check(body)


@pytest.mark.parametrize("factor", [jnp.ones((1, 1)), np.ones((1, 1), np.float32)])
def test_arrays_from_around_a_body_are_refused(factor: Any) -> None:
    def body(x: Any, y: Any, acc: Any, _: Any) -> None:
        y[...] = x[...] * factor

    with pytest.raises(UnsupportedError, match=r"uses arrays from around it \(float32\[1,1\]\)"):
        check(body)


def test_numbers_from_around_a_body_are_taken() -> None:
    factors = 2, 0.5, np.float32(3)

    def body(x: Any, y: Any, acc: Any, _: Any) -> None:
        y[...] = x[...] * factors[0] * factors[1] * factors[2]

    check(body)


def on_grid(body: Callable[..., None], grid: tuple[int, int], tiles: int) -> PallasKernel:
    """Sums rows of x along the grid's axis that is not ``tiles``, of 2 elements a tile."""
    columns = pl.BlockSpec((1, 2), lambda *at: (0, at[tiles]))
    return PallasKernel(
        body,
        grid=grid,
        operands=("x",),
        results=("y",),
        in_specs=pl.BlockSpec((1, 2), lambda *at: (at[1 - tiles], at[tiles])),
        out_specs=columns,
        out_shape=jax.ShapeDtypeStruct((1, 2 * grid[tiles]), jnp.float32),
        scratch_shapes=[pltpu.VMEM((1, 2), jnp.float32)],
        name="sums",
    )


def sums_along(axis: int) -> Callable[..., None]:
    def body(x: Any, y: Any, acc: Any) -> None:
        @pl.when(pl.program_id(axis) == 0)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)

        acc[...] += x[...]

        @pl.when(pl.program_id(axis) == pl.num_programs(axis) - 1)
        def _() -> None:
            y[...] = acc[...]

    return body


def test_steps_of_other_tiles_between() -> None:
    """The grid's own order adds up several tiles then, and a fused kernel would not."""
    orders = [range(3)]
    check_body(on_grid(sums_along(1), (4, 3), 0), {}, {"x": "float32"}, orders, None)
    check_body(on_grid(sums_along(0), (3, 1), 1), {}, {"x": "float32"}, orders, None)
    with pytest.raises(UnsupportedError, match="put the axes that are reduced last in the grid"):
        check_body(on_grid(sums_along(0), (3, 4), 1), {}, {"x": "float32"}, orders, None)

    def by_data(x: Any, y: Any, acc: Any) -> None:  # only a trial tells
        @pl.when(x[0, 0] > -1e9)
        def _() -> None:
            acc[...] = acc[...] * jnp.where(pl.program_id(0) == 0, 0, 1) + x[...]

        y[...] = acc[...]

    with pytest.raises(UnsupportedError, match="put the axes that are reduced last in the grid"):
        check_body(on_grid(by_data, (3, 4), 1), {}, {"x": "float32"}, orders, None)


@pytest.mark.parametrize("count", [4, 9, 40, 41])
@pytest.mark.parametrize("read", ["told", "tried"])
def test_tiles_that_take_turns(count: int, read: str) -> None:
    def body(x: Any, y: Any, left: Any) -> None:
        odd = pl.program_id(0) % 2 == 1

        @pl.when(odd if read == "told" else odd & (x[0, 0] > -1e9))
        def _() -> None:
            y[...] = x[...] + left[...]

        @pl.when(~odd)
        def _() -> None:
            left[...] = x[...]
            y[...] = x[...]

    kernel = on_grid(body, (count, 1), 0)
    with pytest.raises(UnsupportedError, match="makes its result of what an earlier tile left"):
        check_body(kernel, {}, {"x": "float32"}, [range(1)], None)
