"""Operators traced on small arrays, and the words of what refuses them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from syncopate_jax.errors import InputError
from tests.ops import cases

BACKENDS = ("xla", "remote_dma")
X, W = jnp.ones((4, 8)), jnp.ones((8, 6))


def local(
    operator: Callable[..., jax.Array], *arrays: Any, ranks: int = 2, **options: Any
) -> jax.Array:
    """Traces the operator on arrays that every rank has whole."""
    mesh = cases.ranks_mesh(ranks)
    options = {"axis_name": "t"} | options
    fn = jax.shard_map(
        lambda: operator(*arrays, **options), mesh=mesh, in_specs=(), out_specs=jax.P("t"),
        check_vma=False,
    )  # fmt: skip
    return jax.eval_shape(fn)


def refused(text: str, error: type[Exception] = InputError) -> Any:
    """Expects an error with these words in it, spaces and numbers alike."""
    return pytest.raises(error, match=re.escape(text))
