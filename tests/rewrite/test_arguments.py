"""What ``overlap`` may be given: any function that ``jax.jit`` takes, called in any way."""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import syncopate_jax
from syncopate_jax.errors import InputError
from syncopate_jax.options import Launch
from syncopate_jax.rewrite.overlap import overlap
from tests.rewrite.compare import kinds, mesh_of

X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 6)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).standard_normal((6, 4)), jnp.float32)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.all_gather(x, "t", tiled=True) @ w

    columns = P(None, "t")
    return jax.shard_map(body, mesh=mesh_of(2), in_specs=(P("t"), columns), out_specs=columns)(x, w)


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("wrong", [None, 3, "all_gather", jnp.ones(2), (product,)])
def test_what_is_no_function(wrong: Any) -> None:
    with pytest.raises(
        InputError,
        match=r"overlap: fn must be a function, found (NoneType|int|str|.*Array.*|tuple)$",
    ):
        overlap(wrong)


def test_arguments_of_every_kind() -> None:
    class Pair(NamedTuple):
        w: jax.Array
        name: str

    def fn(p: Pair, *xs: jax.Array, scale: float = 1.0, flag: bool = False, **rest: Any) -> Any:
        assert isinstance(scale, float) and isinstance(flag, bool)
        y = product(xs[0], p.w) * scale
        return {"y": -y if flag else y, "none": None, "name": p.name, "n": 3, **rest}

    new = overlap(fn)
    out = new(Pair(W, "a"), X, scale=2.0, flag=True, more=[None, np.float32(2.0)])
    close(out["y"], -2 * (X @ W))
    assert (out["none"], out["name"], out["n"], out["more"][0]) == (None, "a", 3, None)
    assert kinds(new.report(Pair(W, "a"), jax.ShapeDtypeStruct(X.shape, X.dtype))) == ["all_gather"]
    assert (new.__name__, new.fn, new.__wrapped__) == ("fn", fn, fn)


def test_no_arguments_and_no_results() -> None:
    close(overlap(lambda: product(X, W))(), X @ W)
    assert overlap(lambda: None)() is None
    assert overlap(lambda x: {})(X) == {}
    assert overlap(lambda x: ())(None) == ()


def test_wrong_calls_fail_as_the_function_does() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'w'"):
        overlap(product)(X)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        overlap(lambda x: x if x.sum() > 0 else -x)(X)


@pytest.mark.parametrize("how", [{"static_argnums": 2}, {"static_argnames": "n"}])
def test_static_arguments_of_a_jit_within(how: dict[str, Any]) -> None:
    def fn(x: jax.Array, w: jax.Array, n: int) -> jax.Array:
        for _ in range(n):
            x = product(x, w) @ w.T
        return x

    new = overlap(jax.jit(fn, **how))
    close(new(X, W, n=2) if "static_argnames" in how else new(X, W, 2), X @ W @ W.T @ W @ W.T)
    outside = jax.jit(overlap(fn), **how)
    close(outside(X, W, 1) if "static_argnums" in how else outside(X, W, n=1), X @ W @ W.T)


def test_donated_arguments() -> None:
    rows = jax.sharding.NamedSharding(mesh_of(2), P("t"))

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + product(x, w) @ w.T

    donating = functools.partial(jax.jit, donate_argnums=0, out_shardings=rows)
    for new in (overlap(donating(fn)), donating(overlap(fn))):
        x = jax.device_put(X, rows)
        close(new(x, W), X + X @ W @ W.T)
        assert x.is_deleted()


def test_traced_once_inside_jit() -> None:
    calls = []

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        calls.append(x.shape)
        return product(x, w)

    step = jax.jit(overlap(fn))
    for _ in range(3):
        close(step(X, W), X @ W)
    assert len(calls) == 1
    plain = jax.jit(overlap(lambda x: calls.append("plain") or x * 2))
    plain(X), plain(X)
    assert len(calls) == 2
    gradient = jax.jit(jax.grad(lambda *a: overlap(fn)(*a).sum()))
    gradient(X, W), gradient(X, W)
    assert len(calls) == 3


def test_a_jit_within_is_compiled_once() -> None:
    new = overlap(jax.jit(product))
    close(new(X, W), X @ W)
    with jax.log_compiles(), _recorded() as messages:
        close(new(X, W), X @ W)
    assert [m for m in messages if "Finished XLA compilation of jit(product)" in m] == []


class _recorded:
    """Messages that JAX logs about compiling."""

    def __enter__(self) -> list[str]:
        self.messages: list[str] = []
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.messages.append(record.getMessage())
        logging.getLogger("jax").addHandler(self.handler)
        return self.messages

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("jax").removeHandler(self.handler)


def test_overlapped_twice() -> None:
    once = overlap(product, backend="remote_dma")
    twice = overlap(once)
    assert (twice.fn, twice.options.backend) == (product, "auto")
    within = overlap(lambda x, w: overlap(product)(x, w) + 1)
    close(within(X, W), X @ W + 1)
    report = within.report(X, W)
    assert report.replaced == ()
    assert report.left[0].reason == "it is inside an operator of this package"
    assert syncopate_jax.overlap is overlap


def test_a_launch_for_a_gpu_that_is_not_here() -> None:
    """The copy engine's copies are made on CPU devices, if the launch says for which GPU."""
    given = {"backend": "copy_engine", "target": "mosaic_gpu"}
    x, w = jnp.tile(X[:, :4], (16, 32)), jnp.tile(W[:4], (32, 64))
    (left,) = overlap(product, **given).report(x, w).left
    assert "give launch=syncopate_jax.options.Launch(sms=132) to compile for" in left.reason
    new = overlap(product, **given, launch=Launch(sms=132))
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    assert kinds(new.report(x, w)) == ["all_gather"]
    np.testing.assert_allclose(
        np.float32(jax.jit(new)(x, w)), np.float32(x) @ np.float32(w), rtol=2e-2, atol=1
    )
    with pytest.raises(InputError, match="launch: needs a Launch or None, found 132"):
        overlap(product, launch=132)


def test_shown_with_its_function_and_backend() -> None:
    assert repr(overlap(product, backend="xla")) == f"overlap({product!r}, backend='xla')"


def test_side_effects_happen_once_a_device() -> None:
    seen: list[float] = []

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        h = lax.all_gather(x, "t", tiled=True)
        jax.debug.callback(lambda total: seen.append(float(total)), h.sum())
        return h @ w

    columns = P(None, "t")
    fn = jax.shard_map(body, mesh=mesh_of(2), in_specs=(P("t"), columns), out_specs=columns)
    new = jax.jit(overlap(fn))
    close(new(X, W), X @ W)
    jax.effects_barrier()
    assert len(seen) == 2
    close(seen, [float(X.sum())] * 2)
    assert kinds(overlap(fn).report(X, W)) == ["all_gather"]


def test_linear_solves_are_left_alone() -> None:
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        def twice(v: jax.Array) -> jax.Array:
            return 2 * v + 0 * lax.psum(x @ (w @ v), "t")

        right = lax.psum(x @ w, "t")
        return lax.custom_linear_solve(twice, right, lambda _, b: b / 2, symmetric=True)

    halves = (P(None, "t"), P("t"))
    fn = jax.shard_map(body, mesh=mesh_of(2), in_specs=halves, out_specs=P(), check_vma=False)
    square = W @ W.T
    close(jax.jit(overlap(fn))(square, square), square @ square / 2)
    report = overlap(fn).report(square, square)
    assert kinds(report) == ["all_reduce"]
    assert "inside a custom_linear_solve, whose gradient is" in report.left[0].reason


def test_methods_and_partials() -> None:
    class Model:
        scale = 2.0

        def apply(self, x: jax.Array, w: jax.Array) -> jax.Array:
            return product(x, w) * self.scale

    close(overlap(Model().apply)(X, W), 2 * (X @ W))
    close(overlap(functools.partial(product, w=W))(X), X @ W)
    batched = jax.vmap(overlap(jnp.dot), in_axes=(0, None))(jnp.stack([X, X]), W)
    close(batched[1], X @ W)
