"""Programs over all ranks: on the devices of a mesh, or folded onto one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.two_gpus.problems import Operator, Problem
from syncopate_jax.runtime.folded import fold

AXIS = "x"
Fn = Callable[..., jax.Array]


@dataclass(frozen=True)
class Ranks:
    """Where the ranks are.

    Attributes:
      folded: on one device, as rows of arrays.
    """

    count: int
    folded: bool

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.array(jax.devices()[: self.count]), (AXIS,))

    def spec(self, dimension: int | None) -> P:
        return P(*(AXIS if d == dimension else None for d in range(2)))

    def over(self, fn: Fn, x: int | None, w: int | None, y: int | None) -> Fn:
        """One rank's ``fn(x, w)`` over all, given the dimension of each that ranks share."""
        if self.folded:
            return fold(fn, AXIS)
        specs = tuple(map(self.spec, (x, w)))
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=specs, out_specs=self.spec(y), check_vma=False
        )

    def shape(
        self, whole: tuple[int, int], dimension: int | None, dtype: Any
    ) -> jax.ShapeDtypeStruct:
        """The array of all ranks as programs take it."""
        if not self.folded:
            sharding = NamedSharding(self.mesh, self.spec(dimension))
            return jax.ShapeDtypeStruct(whole, dtype, sharding=sharding)
        part = (n // self.count if d == dimension else n for d, n in enumerate(whole))
        return jax.ShapeDtypeStruct((self.count, *part), dtype)

    def random(self, like: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
        """Normal values of that shape, made where they are needed."""
        return _normal(like)(jax.random.key(seed, impl="rbg"))


@functools.lru_cache(maxsize=64)
def _normal(like: jax.ShapeDtypeStruct) -> Any:
    """Compiled once a shape: compiling it takes far longer than running it."""
    return jax.jit(
        lambda key: jax.random.normal(key, like.shape, like.dtype), out_shardings=like.sharding
    )


def operands(problem: Problem, ranks: Ranks, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """x and w of a problem."""
    operator = problem.operator
    return (
        ranks.shape((problem.m, problem.k), operator.x, dtype),
        ranks.shape((problem.k, problem.n), operator.w, dtype),
    )


def one_rank(operator: Operator, options: dict[str, Any]) -> Fn:
    """The operator on one rank; ``options`` say how it is realised."""
    given = dict(options)
    if given["backend"] != "xla":
        given.setdefault("target", "mosaic_gpu")
    return lambda x, w: operator.function(x, w, axis_name=AXIS, **operator.options, **given)


def program(problem: Problem, ranks: Ranks, options: dict[str, Any]) -> Any:
    """The jitted operator over all ranks."""
    operator = problem.operator
    fn = one_rank(operator, options)
    return jax.jit(ranks.over(fn, operator.x, operator.w, operator.y))


def repeated(fn: Fn, times: int) -> Fn:
    """``fn(x, w)`` ``times`` times in one program, each after the one before; returns x."""

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            # The next x differs from this one by something that the result alone tells.
            y = lax.optimization_barrier(fn(x, w))
            some = jnp.max(jnp.abs(y[:1, :8].astype(jnp.float32))) * 0
            # Read apart, so that XLA writes it in place; else it copies all of x.
            first = lax.optimization_barrier(x[:1, :1] + some.astype(x.dtype))
            return lax.dynamic_update_slice(x, first, (0, 0)), None

        return lax.scan(body, x, None, length=times)[0]

    return run


def repeated_program(problem: Problem, ranks: Ranks, options: dict[str, Any], times: int) -> Any:
    """The jitted operator, ``times`` times in one program."""
    operator = problem.operator
    fn = repeated(one_rank(operator, options), times)
    return jax.jit(ranks.over(fn, operator.x, operator.w, operator.x))


def local(problem: Problem, ranks: Ranks, matmul: Fn) -> tuple[Any, tuple[Any, Any]]:
    """One rank's product alone on every rank, and its operands' shapes."""
    m, k, n = problem.local(ranks.count)
    count = ranks.count
    shapes = (
        ranks.shape((count * m, k), 0, jnp.bfloat16),
        ranks.shape((count * k, n), 0, jnp.bfloat16),
    )
    return jax.jit(ranks.over(matmul, 0, 0, 0)), shapes


def exchange(problem: Problem, ranks: Ranks, times: int = 1) -> tuple[Any, tuple[Any, Any]]:
    """The communication alone, by XLA, and its operands' shapes (the second is not used).

    With ``times`` that often in one program.
    """
    operator, (m, k, n) = problem.operator, problem.mkn
    unused = ranks.shape((ranks.count, 8), 0, jnp.bfloat16)
    functions: dict[str, tuple[Fn, tuple[int, int], int | None, int | None]] = {
        "all_gather_matmul": (lambda x, _: lax.all_gather(x, AXIS, tiled=True), (m, k), 0, None),
        "matmul_reduce_scatter": (
            lambda y, _: lax.psum_scatter(y, AXIS, tiled=True),
            (m, n),
            None,
            0,
        ),
        "matmul_all_reduce": (lambda y, _: lax.psum(y, AXIS), (m, n), None, None),
        "all_to_all_matmul": (
            lambda x, _: lax.all_to_all(x, AXIS, 0, 1, tiled=True),
            (m, k),
            1,
            0,
        ),
        "matmul_all_to_all": (
            lambda y, _: lax.all_to_all(y, AXIS, 1, 0, tiled=True),
            (m, n),
            0,
            1,
        ),
    }
    fn, whole, into, out = functions[operator.name]
    shapes = ranks.shape(whole, into, jnp.bfloat16), unused
    if times > 1:
        fn, out = repeated(fn, times), into
    return jax.jit(ranks.over(fn, into, 0, out)), shapes
