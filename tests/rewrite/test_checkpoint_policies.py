"""What ``jax.checkpoint`` may save of operators, as README and ``docs/overlap.md`` say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import checkpoint_policies as policies
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from syncopate_jax.ops import all_gather_matmul
from syncopate_jax.rewrite.overlap import overlap
from tests.rewrite.compare import loss_of, mesh_of

Product = Callable[[jax.Array, jax.Array], jax.Array]
ARGS = (jnp.ones((8, 6)), jnp.ones((6, 4)), jnp.ones((4, 6)))


def operator(x: jax.Array, w: jax.Array) -> jax.Array:
    return all_gather_matmul(x, w, axis_name="t")


def written_out(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.all_gather(x, "t", tiled=True) @ w


def layer(product: Product, policy: Callable[..., Any] | None) -> Any:
    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(checkpoint_name(product(x, w), "h")) @ v

    specs = (P("t"), P(None, "t"), P("t"))
    saved = body if policy is None else jax.checkpoint(body, policy=policy)
    fn = jax.shard_map(saved, mesh=mesh_of(2), in_specs=specs, out_specs=P("t"))
    return fn if product is operator else overlap(fn)


def gathers_and_dots(fn: Any) -> tuple[int, int]:
    """Of the value and the gradients; the gradient of ``w`` gathers ``x`` once more."""
    text = jax.jit(jax.value_and_grad(loss_of(fn), (0, 1, 2))).lower(*ARGS).as_text()
    return tuple(len(re.findall(rf"stablehlo\.{x}", text)) for x in ("all_gather", "dot_general"))


@pytest.mark.parametrize("product", [operator, written_out])
def test_what_policies_save(product: Product) -> None:
    without = gathers_and_dots(layer(product, None))
    again = (without[0] + 1, without[1] + 1)
    assert without == (2, 6)
    assert gathers_and_dots(layer(product, policies.dots_saveable)) == again
    assert gathers_and_dots(layer(product, policies.dots_with_no_batch_dims_saveable)) == again
    assert gathers_and_dots(layer(product, policies.save_only_these_names("h"))) == without
