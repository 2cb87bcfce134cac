"""NumPy's arrays as operands: in the dtype that JAX has for them, without a warning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import InputError
from syncopate_jax.ops import all_gather_matmul, matmul
from syncopate_jax.runtime.given_arrays import as_jax
from tests.backends import own_kernels
from tests.ops import cases

P = jax.P
X, W = np.arange(32.0).reshape(4, 8), np.arange(48.0).reshape(8, 6) - 20  # sums are exact


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def over_ranks(local: Any, *arrays: Any) -> jax.Array:
    """``local`` of arrays whose rows two ranks share; it closes over the others."""
    specs = {"in_specs": P("t"), "out_specs": P("t")}
    return jax.jit(jax.shard_map(local, mesh=cases.ranks_mesh(2), **specs))(*arrays)


@pytest.mark.parametrize("backend", ["auto", "xla", "remote_dma"])
def test_an_operator(backend: str) -> None:
    def local(x: jax.Array) -> jax.Array:
        return all_gather_matmul(x, W, axis_name="t", backend=backend)

    found = over_ranks(local, X)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.concatenate([X @ W] * 2))


def test_an_operator_that_keeps_what_it_gathered() -> None:
    def local(x: jax.Array) -> Any:
        return all_gather_matmul(x, W, axis_name="t", return_gathered=True)[0]

    np.testing.assert_array_equal(over_ranks(local, X), np.concatenate([X @ W] * 2))


def test_a_compiled_operator() -> None:
    plan = own_kernels.gather_plan(2, t=(4, 4))
    operator = fuse(own_kernels.scale(4, 4), plan, {"t": "x"}, axis_name="t")
    scales = np.arange(4.0)[:, None]
    found = over_ranks(lambda x: operator(x, scales)[0], X[:, :4])
    np.testing.assert_array_equal(found, np.concatenate([X[:, :4] * scales] * 2))
    # The operand that the plan moves, too, whose dtype must be the plan's.
    mine = np.ones((2, 4))
    found = over_ranks(lambda s: operator(mine, jnp.concatenate([s, s]))[0], np.ones((4, 1)))
    np.testing.assert_array_equal(found, np.ones((8, 4)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_product_outside_shard_map(kind: AxisType) -> None:
    mesh = cases.ranks_mesh(2, kind)
    x = jax.device_put(X, jax.NamedSharding(mesh, P("t")))
    found = jax.jit(lambda x: matmul(x, W))(x)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, X @ W)


def test_64_bits_where_jax_has_them() -> None:
    with jax.enable_x64(True):
        assert as_jax("f", "x", X).dtype == jnp.float64
    assert as_jax("f", "x", X).dtype == jnp.float32
    assert as_jax("f", "x", X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (np.array([None]), "NumPy ndarray of dtype object"),
        (np.array(["a"]), "NumPy ndarray of dtype <U1"),
        (np.ma.masked_array([1.0]), "NumPy MaskedArray of dtype float64"),
    ],
)
def test_what_jax_does_not_take(given: Any, shown: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"f: x is a {shown}, which JAX does not take")):
        as_jax("f", "x", given)
