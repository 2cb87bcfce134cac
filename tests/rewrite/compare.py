"""Values and gradients of a function with and without ``overlap``, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from syncopate_jax.rewrite.overlap import overlap
from syncopate_jax.rewrite.report import Report


def mesh_of(*sizes: int, names: str = "tuv") -> jax.sharding.Mesh:
    count = int(np.prod(sizes))
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, tuple(names[: len(sizes)]), types, devices=jax.devices()[:count])


def loss_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A scalar of every element of the result, different for each."""

    def loss(*args: Any) -> jax.Array:
        leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(fn(*args))]
        return sum(jnp.sum(jnp.sin(leaf + jnp.arange(leaf.size))) for leaf in leaves)

    return loss


def same(fn: Callable[..., Any], *args: Any, tolerance: float = 2e-5, **options: Any) -> Report:
    """Asserts equal values and gradients of all arguments; gives the report."""
    options.setdefault("backend", "xla")
    new = overlap(fn, **options)
    every = tuple(range(len(args)))

    def run(fn: Callable[..., Any]) -> Any:
        return jax.jit(lambda *a: (fn(*a), jax.grad(loss_of(fn), every)(*a)))(*args)

    found, wanted = run(new), run(fn)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1.0)
    return new.report(*args)


def same_gradient(fn: Callable[..., Any], *args: Any, tolerance: float = 2e-5) -> Report:
    """Asserts that ``overlap`` of the gradient of a loss is that gradient; gives the report."""
    gradient = jax.value_and_grad(loss_of(fn), tuple(range(len(args))))
    new = overlap(gradient, backend="xla")
    found, wanted = jax.jit(new)(*args), jax.jit(gradient)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1.0)
    return new.report(*args)


def kinds(report: Report) -> list[str]:
    """Kind of each operator."""
    return [item.spec.kind for item in report.replaced]


def reasons(report: Report) -> list[str]:
    return [item.reason for item in report.left]
