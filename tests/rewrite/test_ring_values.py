"""Small integers that rings are read from: as the program has them, or not followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.rewrite import graph
from syncopate_jax.rewrite.ring_values import Ints, Reader

RANKS = 4


def followed(function: Callable[[Any], Any]) -> np.ndarray | None:
    """What is known of a function of the rank, one number a rank."""
    jaxpr = jax.make_jaxpr(function)(jnp.int32(0)).jaxpr
    (found,) = Reader("x", RANKS).body(graph.read(jaxpr, inline=True), [Ints(np.arange(RANKS))])
    return found.at if isinstance(found, Ints) else None


@pytest.mark.parametrize(
    "function",
    [
        lambda i: (i + RANKS - 1) % RANKS,
        lambda i: jax.lax.rem(-7 * i, 3) - jax.lax.div(-7 * i, 2),
        lambda i: jnp.where(i > 1, i - 2, i + 5),
        lambda i: (i - 2).astype(jnp.bool_).astype(jnp.int32) + 1,
        lambda i: jnp.clip(~i, -3, -2),
        lambda i: (i > 1) & ~(i == 3),
    ],
)
def test_numbers_are_those_of_the_program(function: Callable[[Any], Any]) -> None:
    wanted = [np.asarray(function(jnp.int32(rank))) for rank in range(RANKS)]
    found = followed(function)
    assert found is not None and found.tolist() == [one.item() for one in wanted]


@pytest.mark.parametrize(
    "function",
    [
        lambda i: (i.astype(jnp.uint32) - 1).astype(jnp.int32),
        lambda i: (i.astype(jnp.int8) * 100).astype(jnp.int32),
        lambda i: i * jnp.int32(2**30),
        lambda i: jax.lax.div(i, i),
    ],
    ids=["unsigned", "narrow", "wraps", "by zero"],
)
def test_numbers_that_wrap_are_not_followed(function: Callable[[Any], Any]) -> None:
    assert followed(function) is None
