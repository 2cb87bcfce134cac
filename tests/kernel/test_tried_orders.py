"""Bodies that give the same in another order of a reduction, and bodies that do not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.kernel import traced_body, tried_orders
from syncopate_jax.kernel.traced_body import check_body
from syncopate_jax.kernel.tried_orders import AddendError
from syncopate_jax.pallas_kernels import matmul_tpu
from tests.backends import own_kernels
from tests.kernel.reducing import ARRIVAL, COUNT, check, first, kernel, last, later, zero


def running_average(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(y)
    y[...] = y[...] * 0.9 + x[...] * (1 - 0.9)


def nearly_a_sum(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(y)
    y[...] = y[...] * 0.99999 + x[...]


def first_of_equal_maxima(x: Any, y: Any, a: Any, b: Any) -> None:
    first(lambda: a.__setitem__(..., jnp.full_like(a, -jnp.inf)))
    better = x[...] > a[...]
    y[...] = jnp.where(better, pl.program_id(1).astype(jnp.float32), y[...])
    a[...] = jnp.maximum(a[...], x[...])


def weights_of_the_first_step(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(y)
    first(lambda: a.__setitem__(..., jnp.ones_like(a)))
    later(lambda: a.__setitem__(..., jnp.full_like(a, 2)))
    y[...] += x[...] * a[...]


def started_by_data(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(a)
    a[...] = jnp.where(x[0, 0] > 0.5, 0.0, a[...]) + x[...]
    y[...] = a[...]


def the_block_before(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(y)
    zero(a)
    y[...] += x[...] * a[...]
    a[...] = x[...]


def the_last_block_again(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(y)
    a[...] = x[...]
    y[...] += x[...]
    last(lambda: y.__setitem__(..., y[...] + a[...]))


def other_products_than_the_first(x: Any, y: Any, a: Any, b: Any) -> None:
    first(lambda: y.__setitem__(..., x[...]))
    later(lambda: y.__setitem__(..., y[...] + 2 * x[...]))


def adds_the_last(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(a)
    added = a[...] + x[...]
    last(lambda: a.__setitem__(..., added))
    last(lambda: y.__setitem__(..., a[...]))


def by_the_first(x: Any, y: Any, a: Any, b: Any) -> None:
    """Sums what is measured from the first block, as a shifted variance is, and forgets that."""
    zero(y)
    first(lambda: a.__setitem__(..., x[...]))
    y[...] += (x[...] - a[...]) ** 2


@pytest.mark.parametrize(
    "body",
    [
        running_average,
        nearly_a_sum,
        first_of_equal_maxima,
        weights_of_the_first_step,
        started_by_data,
        the_block_before,
        the_last_block_again,
        adds_the_last,
    ],
)
def test_what_depends_on_the_order(body: Callable[..., None]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check(body)
    text = str(caught.value)
    assert text.startswith("kernel reduces: on random blocks (")
    assert " where 4 steps are walked in the grid's order and where they are in the plan's" in text
    assert text.endswith(
        ", so what the body keeps from step to step depends on their order; this plan walks that "
        "reduction in the order of arrival: use backend 'xla', or a plan whose chunks are walked "
        "in the grid's order"
    )


def at_first_where_data_say(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(y)
    y[...] += x[...]

    @pl.when((pl.program_id(1) == 0) & (x[0, 0] > 0))
    def _() -> None:
        y[...] += 100


def where_data_say_at_first(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(y)

    @pl.when(x[0, 0] > 0)
    def _() -> None:
        first(lambda: y.__setitem__(..., y[...] + 100))


def at_first_a_choice_of_data(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(y)

    @first
    def _() -> None:
        pl.when(x[0, 0] > 0)(lambda: y.__setitem__(..., y[...] + 100))


def later_at_a_block(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(y)

    @pl.when((pl.program_id(1) != 0) & (pl.program_id(1) % 4 == 0))
    def _() -> None:
        y[...] += 1


@pytest.mark.parametrize(
    "body",
    [
        other_products_than_the_first,
        by_the_first,
        at_first_where_data_say,
        where_data_say_at_first,
        at_first_a_choice_of_data,
        later_at_a_block,
    ],
)
def test_what_is_done_with_the_first_block_alone(body: Callable[..., None]) -> None:
    text = "what the body does where pl.program_id\\(1\\) is first or last depends on the block"
    with pytest.raises(UnsupportedError, match=text):
        check(body)


def stores_or_adds(x: Any, y: Any, a: Any, b: Any) -> None:
    part = jnp.exp(x[...])
    first(lambda: y.__setitem__(..., part))
    later(lambda: y.__setitem__(..., y[...] + part))


def products(x: Any, y: Any, a: Any, b: Any) -> None:
    first(lambda: a.__setitem__(..., jnp.ones_like(a)))
    a[...] *= x[...]
    last(lambda: y.__setitem__(..., a[...] + 1))


def log_of_sums(x: Any, y: Any, a: Any, b: Any) -> None:
    """The online softmax's way, which rounds another way in another order."""
    first(lambda: a.__setitem__(..., jnp.full_like(a, -jnp.inf)))
    zero(b)
    top = jnp.maximum(a[...], x[...])
    b[...] = b[...] * jnp.exp(a[...] - top) + jnp.exp(x[...] - top)
    a[...] = top
    last(lambda: y.__setitem__(..., a[...] + jnp.log(b[...])))


def the_lowest_of_equal_maxima(x: Any, y: Any, a: Any, b: Any) -> None:
    k = pl.program_id(1).astype(jnp.float32)
    first(lambda: a.__setitem__(..., jnp.full_like(a, -jnp.inf)))
    first(lambda: b.__setitem__(..., jnp.full_like(b, jnp.inf)))
    equal = jnp.where(x[...] == a[...], jnp.minimum(k, b[...]), b[...])
    b[...] = jnp.where(x[...] > a[...], k, equal)
    a[...] = jnp.maximum(a[...], x[...])
    y[...] = b[...]


def the_two_largest(x: Any, y: Any, a: Any, b: Any) -> None:
    """``sort`` is left to JAX."""
    first(lambda: a.__setitem__(..., jnp.full_like(a, -jnp.inf)))
    first(lambda: b.__setitem__(..., jnp.full_like(b, -jnp.inf)))
    three = jnp.sort(jnp.stack([a[...], b[...], x[...]]), axis=0)
    a[...], b[...] = three[2], three[1]
    last(lambda: y.__setitem__(..., a[...] - b[...]))


def of_positive_blocks(x: Any, y: Any, a: Any, b: Any) -> None:
    zero(y)

    @pl.when(x[0, 0] > 0)
    def _() -> None:
        y[...] += lax.erf(jnp.sqrt(jnp.abs(x[...])))


def conditions(x: Any, y: Any, a: Any, b: Any) -> None:
    """A logarithm of what is not positive is no number: such blocks tell nothing."""
    zero(y)
    y[...] = jnp.where(y[...] > 3, y[...], y[...]) + jnp.log(x[...])


RIGHT = [
    stores_or_adds,
    products,
    log_of_sums,
    the_lowest_of_equal_maxima,
    the_two_largest,
    of_positive_blocks,
    conditions,
]


@pytest.mark.parametrize("body", RIGHT)
def test_what_does_not_depend_on_the_order(body: Callable[..., None]) -> None:
    check(body)


def test_types_that_round_much() -> None:
    """In bfloat16 the order shows in the result, as it does in any sum."""
    check(stores_or_adds, "bfloat16")
    with pytest.raises(UnsupportedError, match="depends on their order"):
        check(running_average, "bfloat16")


def test_what_cannot_be_tried() -> None:
    def noisy(x: Any, y: Any, a: Any, b: Any) -> None:
        zero(y)
        y[...] = jnp.maximum(y[...], x[...]) * 1.0
        a[...] = pltpu.prng_random_bits((2, 2)).astype(jnp.float32)

    def nowhere(x: Any, y: Any, a: Any, b: Any) -> None:
        zero(y)
        y[...] = y[...] * 0.5 + jnp.sqrt(-1 - x[...] ** 2)

    for body, why in (
        (noisy, "it uses prng_random_bits"),
        (nowhere, "it gives hardly any numbers"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            check(body)
        assert str(caught.value).startswith(
            f"kernel reduces: whether its body gives the same in another order of the reduction "
            f"cannot be told, as {why}"
        )


def test_integers_and_truths() -> None:
    def first_is(x: Any, y: Any, a: Any, b: Any) -> None:
        first(lambda: a.__setitem__(..., jnp.full_like(a, -1)))
        a[...] = jnp.where(a[...] == -1, pl.program_id(1), a[...])
        last(lambda: y.__setitem__(..., a[...]))

    def odd(x: Any, y: Any, a: Any, b: Any) -> None:
        zero(a)
        a[...] ^= x[...]
        last(lambda: y.__setitem__(..., a[...]))

    check(odd, "int32")
    check(odd, "bool")
    with pytest.raises(UnsupportedError, match=r"y\[0, 0\] is 0 and 2 where"):
        check(first_is, "int32")

    def negative_ends(x: Any, y: Any, a: Any, b: Any) -> None:
        zero(a)
        a[...] = jnp.where(x[...] < -4, 0, a[...]) + x[...]
        last(lambda: y.__setitem__(..., a[...]))

    with pytest.raises(UnsupportedError, match=r"is -?\d+ and -?\d+ where"):
        check(negative_ends, "int32")

    def kept_truth(x: Any, y: Any, a: Any, b: Any) -> None:
        first(lambda: a.__setitem__(..., jnp.ones_like(a)))
        a[...] = jnp.where(x[...], a[...], jnp.logical_not(x[...]) & (pl.program_id(1) > 1))
        last(lambda: y.__setitem__(..., a[...]))

    with pytest.raises(UnsupportedError, match=r"is (True and False|False and True) where"):
        check(kept_truth, "bool")


def test_a_mask_that_leaves_some_elements_no_number() -> None:
    """Those tell nothing, the others do; where only the plan's order gives none, it is refused."""

    def masked(x: Any, y: Any, a: Any, b: Any, lost: float) -> None:
        first(lambda: a.__setitem__(..., jnp.full_like(a, -jnp.inf)))
        zero(b)
        score = jnp.where(x[...] > 0, x[...], lost)
        top = jnp.maximum(a[...], score)
        b[...] = b[...] * jnp.exp(a[...] - top) + jnp.exp(score - top)
        a[...] = top
        last(lambda: y.__setitem__(..., a[...] + jnp.log(b[...])))

    check(functools.partial(masked, lost=-1e30))
    with pytest.raises(UnsupportedError, match="nan where"):
        check(functools.partial(masked, lost=-jnp.inf))


def test_blocks_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    check(stores_or_adds)
    monkeypatch.setattr(tried_orders, "MOST_WORK", 1e5)
    monkeypatch.setattr(tried_orders, "EASY", 1e4)
    with pytest.raises(UnsupportedError, match="too much to compute on blocks of these sizes"):
        check(running_average)
    with pytest.raises(UnsupportedError, match="is first or last depends on the block"):
        check(stores_or_adds)


@pytest.mark.parametrize("body", [running_average, log_of_sums])
def test_a_long_reduction_is_tried_on_some_steps(body: Callable[..., None]) -> None:
    count = 1000
    orders = [[(k + start) % count for k in range(count)] for start in (0, 250, 998)]
    long = functools.partial(check_body, kernel(body, count=count), {}, {"x": "float32"}, orders)
    if body is log_of_sums:
        long(None)
    else:
        with pytest.raises(UnsupportedError, match=r"where \d+ steps are walked"):
            long(None)


def test_steps_and_tiles_are_tried_whose_numbers_stand_in_the_program() -> None:
    def at_a_step(x: Any, y: Any, a: Any, b: Any) -> None:
        zero(y)
        y[...] = jnp.where(pl.program_id(1) == 417, 0.0, y[...]) + x[...]

    count = 1000
    order = [(k + 250) % count for k in range(count)]
    with pytest.raises(UnsupportedError, match=r"where \d+ steps are walked"):
        check_body(kernel(at_a_step, count=count), {}, {"x": "float32"}, [order], None)

    def in_a_tile(x: Any, y: Any, a: Any, b: Any) -> None:
        zero(y)
        y[...] = y[...] * jnp.where(pl.program_id(0) == 3, 0.5, 1.0) + x[...]

    many = dataclasses.replace(
        kernel(in_a_tile), grid=(50, COUNT), out_shape=jax.ShapeDtypeStruct((100, 2), "float32")
    )
    with pytest.raises(UnsupportedError, match="depends on their order"):
        check_body(many, {}, {"x": "float32"}, [ARRIVAL], None)


def test_what_is_made_of_the_addend() -> None:
    def body(rule: Callable[[Any, Any], Any]) -> Callable[..., None]:
        def run(x: Any, y: Any, a: Any, b: Any, addend: Any = None) -> None:
            zero(a)
            a[...] += x[...]
            last(lambda: y.__setitem__(..., rule(a[...], addend())))

        return run

    def check_rule(rule: Callable[[Any, Any], Any]) -> None:
        check_body(kernel(body(rule)), {}, {"x": "float32"}, [ARRIVAL], (2, 2))

    check_rule(lambda tile, addend: addend + tile)
    for rule, text in (
        (lambda tile, addend: tile, "none of its results changes with what it gets from addend"),
        (lambda tile, addend: tile - addend, r"y changes by \S+ where addend\(\) grows by"),
        (lambda tile, addend: tile + 2 * addend, r"y changes by"),
        (lambda tile, addend: jnp.maximum(tile + addend, 0), r"y changes by"),
    ):
        with pytest.raises(AddendError, match=text):
            check_rule(rule)


def test_sums_are_seen_without_being_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """So blocks of any size may be summed."""

    def tried(*_: Any) -> None:
        raise AssertionError("tried")

    monkeypatch.setattr(traced_body, "check_orders", tried)

    def sums(x: Any, y: Any, a: Any, b: Any) -> None:
        zero(a)
        first(lambda: b.__setitem__(..., jnp.full_like(b, -jnp.inf)))
        a[...] = (a[...] - jnp.exp(x[...])).astype(jnp.float32)

        @pl.when(x[0, 0] > 0)
        def _() -> None:
            a[0, 0] += 1.0

        b[...] = jnp.maximum(x[...] * pl.program_id(1), b[...])
        last(lambda: y.__setitem__(..., a[...] / b[...]))

    check(sums)
    sizes, tiles = {"m": 512, "G": 3, "k": 1024, "n": 512}, {"m": 512, "k": 512, "n": 512}
    product = matmul_tpu.matmul(
        "mGk", "Gkn", "mn", sizes, tiles=tiles, dtype="bfloat16", out_dtype="bfloat16"
    )
    dtypes = dict.fromkeys(product.operands, "bfloat16")
    check_body(product, {}, dtypes, [(4, 5, 0, 1, 2, 3)], (512, 512))
    for body in (running_average, first_of_equal_maxima, the_last_block_again, products):
        with pytest.raises(AssertionError, match="tried"):
            check(body)


def test_attention_is_tried() -> None:
    attention = own_kernels.attention(4, 12, 4, 2, 2)
    dtypes = dict.fromkeys(attention.operands, "float32")
    check_body(attention, {}, dtypes, [(2, 3, 4, 5, 0, 1), (4, 5, 0, 1, 2, 3)], None)
