"""Forward-mode derivatives of operators are refused in words; reverse mode goes through."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ops import all_gather_matmul
from syncopate_jax.rewrite.overlap import overlap
from tests.ops import cases

P = jax.P
X, W = jnp.arange(8.0).reshape(4, 2), jnp.arange(4.0).reshape(2, 2)


def sharded(body: Callable[..., Any]) -> Any:
    specs = {"in_specs": (P("t"), P(None, "t")), "out_specs": P(None, "t")}
    return jax.shard_map(body, mesh=cases.ranks_mesh(2), **specs)


FUNCTIONS = {
    "operator": sharded(lambda x, w: all_gather_matmul(x, w, axis_name="t", backend="xla")),
    "overlap": overlap(sharded(lambda x, w: lax.all_gather(x, "t", tiled=True) @ w)),
}
ASKED = {
    "jvp": lambda f: jax.jvp(f, (X, W), (X, W)),
    "linearize": lambda f: jax.linearize(f, X, W)[1](X, W),
    "inside jit": lambda f: jax.jit(lambda: jax.jvp(f, (X, W), (X, W)))(),
    "jacfwd": lambda f: jax.jacfwd(jax.jit(f))(X, W),
    "hessian": lambda f: jax.hessian(lambda x, w: f(x, w).sum())(X, W),
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_forward_mode_is_refused(fn: Any, asked: Callable[[Any], Any]) -> None:
    text = "all_gather with "
    more = r"a forward-mode derivative was asked for .* reverse mode works .*; for forward mode"
    with pytest.raises(UnsupportedError, match=f"{re.escape(text)}.*: {more} write the coll"):
        asked(fn)


def test_reverse_mode_of_any_order_and_batched() -> None:
    fn, plain = FUNCTIONS["operator"], lambda x, w: x @ w

    def derivatives(f: Any) -> Any:
        loss = jax.grad(lambda x, w: (f(x, w) ** 2).sum())
        return jax.jit(lambda: (jax.jacrev(loss)(X, W), jax.vmap(loss)(X[None], W[None])))()

    for found, wanted in zip(derivatives(fn), derivatives(plain), strict=True):
        np.testing.assert_allclose(found, wanted)
