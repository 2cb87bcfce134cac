"""The operators' variants as data: what each takes, gives and should equal; for all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from syncopate_jax import ops
from syncopate_jax.ops import (
    all_gather_matmul,
    all_to_all_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from syncopate_jax.registry import operators


@dataclass(frozen=True)
class Case:
    """One variant of an operator, by how its arrays are sharded along one axis.

    Attributes:
      x, w, out: index of the sharded dimension of [b, m, k], [k, n] and [b, m, n]; None: whole.
      options: keyword arguments that select the variant.
    """

    name: str
    operator: Callable[..., jax.Array]
    x: int | None
    w: int | None
    out: int | None
    options: dict[str, Any] = field(default_factory=dict)


def case_of(name: str) -> Case:
    """What a registered operator does if nothing else is asked for; what it does not move is cut
    along the result's other dimension, if at all."""
    spec = operators.get(name)
    x = w = None
    out = spec.out.index(spec.scatter) if spec.scatter else None
    if spec.place == "rhs":
        w = spec.rhs.index(spec.gather)
    elif spec.place == "lhs" or spec.gather:
        x = spec.lhs.index(spec.gather)
    else:  # terms of a sum
        (summed,) = set(spec.lhs) & set(spec.rhs) - set(spec.out)
        x, w = spec.lhs.index(summed), spec.rhs.index(summed)
    if spec.kind == "all_gather":  # which gives all ranks the same
        x, w, out = (1, w, 1) if spec.place == "rhs" else (x, 1, 2)
    return Case(name, getattr(ops, name), x, w, out)


TOLD = (
    Case("gather_x_m", all_gather_matmul, 1, 1, 2),
    Case("gather_x_k", all_gather_matmul, 2, 1, 2, {"dimension": "k"}),
    Case("gather_w_k", all_gather_matmul, 1, 0, 1, {"gathered": "w", "dimension": "k"}),
    Case("gather_w_n", all_gather_matmul, 1, 1, 1, {"gathered": "w", "dimension": "n"}),
    Case("scatter_m", matmul_reduce_scatter, 2, 0, 1),
    Case("scatter_n", matmul_reduce_scatter, 2, 0, 2, {"scatter": "n"}),
    Case("all_reduce", matmul_all_reduce, 2, 0, None),
    Case("to_rows", all_to_all_matmul, 2, None, 1),
    Case("to_columns", matmul_all_to_all, 1, None, 2),
)
_FOUND = (n for n in operators.names() if getattr(ops, n) not in {c.operator for c in TOLD})
CASES = (*TOLD, *map(case_of, _FOUND))
BY_NAME = {case.name: case for case in CASES}


def spec(dimension: int | None, ndim: int, axes: Any) -> P:
    """PartitionSpec with ``axes`` at ``dimension``."""
    return P(*(axes if d == dimension else None for d in range(ndim)))


def ranks_mesh(ranks: int, axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """A mesh over the first ``ranks`` devices, axis ``t``."""
    return jax.make_mesh((ranks,), ("t",), (axis_type,), devices=jax.devices()[:ranks])


def sharded(
    case: Case,
    mesh: jax.sharding.Mesh,
    axes: Any = "t",
    *,
    check_vma: bool = True,
    manual: frozenset[str] = frozenset(),
    **options: Any,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The operator over whole arrays, sharded as the case says along ``axes``.

    ``manual``: the axes of the mesh that are; none: all.
    """

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return case.operator(x, w, axis_name=axes, **case.options, **options)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec(case.x, 3, axes), spec(case.w, 2, axes)),
        out_specs=spec(case.out, 3, axes),
        axis_names=manual,
        check_vma=check_vma,
    )


def operands(b: int, m: int, k: int, n: int, dtype: str = "float32", seed: int = 0) -> Any:
    """Random x [b, m, k], w [k, n] and cotangent [b, m, n], scaled so that results are near 1."""
    rng = np.random.default_rng(seed)
    arrays = (
        rng.standard_normal((b, m, k)) / np.sqrt(k),
        rng.standard_normal((k, n)),
        rng.standard_normal((b, m, n)),
    )
    return tuple(jnp.asarray(a, dtype) for a in arrays)


def exact(x: jax.Array, w: jax.Array, ct: jax.Array) -> tuple[np.ndarray, ...]:
    """Result and both gradients in float64."""
    x, w, ct = (np.asarray(a, np.float64) for a in (x, w, ct))
    return x @ w, np.einsum("bmn,kn->bmk", ct, w), np.einsum("bmk,bmn->kn", x, ct)


def value_and_gradients(
    fn: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, w: jax.Array, ct: jax.Array
) -> tuple[np.ndarray, ...]:
    """Result and both gradients of ``fn``, in float64."""

    @jax.jit
    def run(x: jax.Array, w: jax.Array, ct: jax.Array) -> Any:
        y, transpose = jax.vjp(fn, x, w)
        return y, *transpose(ct.astype(y.dtype))

    return tuple(np.asarray(a, np.float64) for a in run(x, w, ct))


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Frobenius norm of the difference, relative to what is wanted."""
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))


def assert_near(found: Any, wanted: Any, bound: float | list[float]) -> None:
    """Trees of arrays are alike in structure and shape, finite, and near each other twice over.

    ``bound``, or one for each array, limits the ``error`` of an array, and that of each of its
    elements as a share of the largest wanted one.
    """
    chex.assert_trees_all_equal_shapes(found, wanted)
    chex.assert_tree_all_finite(found)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    bounds = bound if isinstance(bound, list) else [bound] * len(pairs)
    for (a, b), most in zip(pairs, bounds, strict=True):
        assert error(a, b) < most, f"error {error(a, b):.3g} is not below {most:.3g}"
        largest = float(np.abs(b).max(initial=0.0))
        # The largest of many errors is some times their root mean square.
        chex.assert_trees_all_close(a, b, rtol=0, atol=8 * most * largest)


def cancelling(m: int, k: int, n: int, dtype: str) -> Any:
    """x [1, m, k], w [k, n] of ``dtype`` and a float32 cotangent [1, m, n] that it rounds to ones.

    Signs alternate along m and n: of a rounded cotangent both gradients are zero, on each rank too.
    """
    rng = np.random.default_rng(3)
    signs = (-1.0) ** np.arange(max(m, n))
    x = signs[:m, None] * rng.choice([-2, -1, 1, 2], k)
    w = rng.choice([-2, -1, 1, 2], k)[:, None] * signs[:n]
    ct = jnp.asarray(1 + rng.random((1, m, n)) * 4e-4, jnp.float32)
    assert (ct.astype(dtype) == 1).all()
    return jnp.asarray(x[None], dtype), jnp.asarray(w, dtype), ct
