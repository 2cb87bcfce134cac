"""Operators wherever a program may put them: transformations, loops, layers and meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from syncopate_jax.ops import all_gather_matmul, matmul_reduce_scatter
from tests.ops import cases
from tests.ops.cases import BY_NAME, CASES, Case

P = jax.P
BACKENDS = ("xla", "remote_dma")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
KINDS = ("gather_x_m", "scatter_m", "all_reduce", "to_rows")
each_case = pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c.name in KINDS else pytest.mark.slow) for c in CASES],
    ids=lambda c: c.name,
)
"""The quick suite has one of each kind of exchange."""


def close(found: Any, wanted: Any) -> None:
    chex.assert_trees_all_close(found, wanted, rtol=2e-5, atol=2e-5)


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s) / np.sqrt(s[0]), jnp.float32) for s in shapes]


def on_two(body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    mesh = cases.ranks_mesh(2)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def gather(backend: str) -> Any:
    return lambda x, w: all_gather_matmul(x, w, axis_name="t", backend=backend)


def scatter(backend: str) -> Any:
    return lambda x, w: matmul_reduce_scatter(x, w, axis_name="t", backend=backend)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[] if c.name in ("gather_x_m", "scatter_m") else pytest.mark.slow)
        for c in CASES
    ],
    ids=lambda c: c.name,
)
def test_eager_equals_jit(case: Case) -> None:
    x, w, ct = cases.operands(1, 4, 4, 4)
    for backend in BACKENDS:
        fn = cases.sharded(case, cases.ranks_mesh(2), backend=backend)
        chex.assert_trees_all_equal(fn(x, w), jax.jit(fn)(x, w))
        chex.assert_equal_shape([jax.eval_shape(fn, x, w), ct])


def test_a_jitted_operator_is_traced_once() -> None:
    x, w = arrays((4, 4), (4, 4))
    mapped = cases.sharded(BY_NAME["gather_x_m"], cases.ranks_mesh(2), backend="remote_dma")
    traced_once = jax.jit(chex.assert_max_traces(lambda x, w: mapped(x, w), n=1))
    first = traced_once(x[None], w)
    chex.assert_trees_all_equal(traced_once(x[None], w), first)


@each_case
def test_axes_left_to_the_compiler(case: Case) -> None:
    """What launches nothing, ``auto`` among it: data parallel by the compiler."""
    mesh = jax.make_mesh((2, 2), ("d", "t"), (AxisType.Auto,) * 2)
    x, w, ct = cases.operands(2, 4, 8, 4)
    spread = jax.device_put(x, jax.NamedSharding(mesh, P("d")))
    for backend in ("auto", "xla") if case.name == "scatter_m" else ("auto",):
        fn = cases.sharded(case, mesh, manual=frozenset({"t"}), backend=backend)
        found = cases.value_and_gradients(fn, spread, w, ct)
        cases.assert_near(found, cases.exact(x, w, ct), 1e-6)


def test_two_operators_and_a_sum_in_a_loop() -> None:
    """Two fused operators take turns beside an independent psum; nothing leaks between turns."""
    x, up, down = arrays((4, 4), (4, 6), (6, 4))

    def body(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        def turn(carry: Any, _: None) -> Any:
            x, total = carry
            total = total + lax.psum(x.sum(), "t")
            x = scatter("remote_dma")(gather("remote_dma")(x, up), down)
            return (x, total), x.sum()

        start = lax.pcast(jnp.float32(0), (), to="varying")
        (x, total), sums = lax.scan(turn, (x, start), None, length=3)
        return x, total, sums[None]

    specs = ((P("t"), P(None, "t"), P("t")), (P("t"), P(), P("t")))
    y, total, sums = on_two(body, *specs)(x, up, down)
    wanted, wanted_total = np.asarray(x, np.float64), 0.0
    for _ in range(3):
        wanted_total += wanted.sum()
        wanted = wanted @ np.asarray(up, np.float64) @ np.asarray(down, np.float64)
    close((y, total, sums.sum(0)[-1]), (wanted, wanted_total, wanted.sum()))


def test_rematerialised() -> None:
    x, w = arrays((4, 4), (4, 4))

    def loss(backend: str, wrap: Any) -> Any:
        def body(x: jax.Array, w: jax.Array) -> jax.Array:
            return wrap(lambda x, w: jnp.sin(gather(backend)(x, w)))(x, w)

        fn = on_two(body, (P("t"), P(None, "t")), P(None, "t"))
        return jax.jit(jax.grad(lambda x, w: fn(x, w).sum(), argnums=(0, 1)))(x, w)

    close(loss("remote_dma", jax.checkpoint), loss("xla", lambda fn: fn))


@pytest.mark.parametrize(
    "over,backend",
    [
        pytest.param(
            over, backend, marks=[] if over == "x" or backend == "xla" else pytest.mark.slow
        )
        for over in ("x", "w", "both")
        for backend in BACKENDS
    ],
)
def test_vmap(over: str, backend: str) -> None:
    x, w = arrays((3, 4, 4), (3, 4, 4))
    x, w = (x if over != "w" else x[0]), (w if over != "x" else w[0])
    axes = (0 if over != "w" else None, 0 if over != "x" else None)
    fn = on_two(
        jax.vmap(gather(backend), axes),
        (P(None, "t") if axes[0] == 0 else P("t"), P(*(None,) * (w.ndim - 1), "t")),
        P(None, None, "t"),
    )
    close(fn(x, w), jnp.matmul(x, w, precision="highest"))


@pytest.mark.slow
@each_backend
def test_gradient_of_vmap_and_vmap_of_shard_map(backend: str) -> None:
    x, w = arrays((2, 4, 4), (4, 4))
    inside = on_two(
        jax.vmap(scatter(backend), (0, None)), (P(None, None, "t"), P("t")), P(None, "t")
    )
    outside = jax.vmap(on_two(scatter(backend), (P(None, "t"), P("t")), P("t")), (0, None))

    def gradients(fn: Any) -> Any:
        return jax.jit(jax.grad(lambda x, w: jnp.sin(fn(x, w)).sum(), argnums=(0, 1)))(x, w)

    wanted = gradients(lambda x, w: jnp.matmul(x, w, precision="highest"))
    close(gradients(inside), wanted)
    close(gradients(outside), wanted)


def layer(product_up: Any, product_down: Any, mean: Any) -> Any:
    def run(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        x = x - mean(x)
        return x + product_down(jnp.tanh(product_up(x, up)), down)

    return run


@pytest.mark.slow
def test_gradients_through_a_layer() -> None:
    given = arrays((4, 4), (4, 6), (6, 4))
    plain = layer(jnp.matmul, jnp.matmul, jnp.mean)
    specs = (P("t"), P(None, "t"), P("t"))

    def gradients(fn: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda *a: (fn(*a) ** 2).sum(), argnums=(0, 1, 2)))(
            *given
        )

    with jax.default_matmul_precision("highest"):
        wanted = gradients(plain)
    for backend in BACKENDS:
        fused = layer(gather(backend), scatter(backend), lambda x: lax.pmean(x.mean(), "t"))
        close(gradients(on_two(fused, specs, P("t"))), wanted)


def mesh_of(order: Any, shape: Any, names: Any, kind: AxisType = AxisType.Auto) -> Any:
    devices = np.array([jax.devices()[i] for i in order]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(kind,) * len(names))


MESHES = {
    "some devices in any order": (((6, 1, 4), (3,), ("t",)), "t", None),
    "second of two axes": (((5, 2, 7, 0), (2, 2), ("d", "t")), "t", "d"),
    "first of two axes": (((5, 2, 7, 0), (2, 2), ("t", "d")), "t", "d"),
    "two axes as one": (((3, 2, 1, 0), (2, 2), ("a", "b")), ("a", "b"), None),
    "two axes the other way": ((range(4), (2, 2), ("a", "b")), ("b", "a"), None),
    "around another axis": ((range(8), (2, 2, 2), ("a", "d", "b")), ("a", "b"), "d"),
    "explicit axes": (((4, 1, 2, 3), (2, 2), ("d", "t"), AxisType.Explicit), "t", "d"),
}
FUSED = {("second of two axes", "gather_x_m"), ("two axes the other way", "scatter_m")}


def on_mesh(
    case: Case, which: str, backend: str, check_vma: bool = True, **options: Any
) -> tuple[Any, Any]:
    """The case over a mesh, its batch cut along the axis that takes no part; and its arrays."""
    arguments, axes, other = MESHES[which]
    mesh = mesh_of(*arguments)

    def batched(dimension: int | None) -> P:
        return P(other, *list(cases.spec(dimension, 3, axes))[1:])

    fn = jax.shard_map(
        lambda x, w: case.operator(
            x, w, axis_name=axes, backend=backend, **case.options, **options
        ),
        mesh=mesh,
        in_specs=(batched(case.x), cases.spec(case.w, 2, axes)),
        out_specs=batched(case.out),
        check_vma=check_vma,
    )
    given = cases.operands(2, 12, 12, 12)
    specs = (batched(case.x), cases.spec(case.w, 2, axes), batched(case.out))
    placed = tuple(
        jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip(given, specs, strict=True)
    )
    return fn, (given, placed)


@pytest.mark.parametrize("which", MESHES)
@each_case
def test_unfused_on_any_mesh(case: Case, which: str) -> None:
    fn, (given, placed) = on_mesh(case, which, "xla")
    y = np.asarray(jax.jit(fn)(*placed[:2]), np.float64)
    cases.assert_near(y, cases.exact(*given)[0], 1e-6)


@pytest.mark.parametrize(
    "which,name",
    [
        pytest.param(which, name, marks=[] if (which, name) in FUSED else pytest.mark.slow)
        for which in MESHES
        for name in KINDS
    ],
)
def test_fused_on_any_mesh(which: str, name: str) -> None:
    fn, (given, placed) = on_mesh(BY_NAME[name], which, "remote_dma")
    y = np.asarray(jax.jit(fn)(*placed[:2]), np.float64)
    cases.assert_near(y, cases.exact(*given)[0], 1e-6)


@each_case
def test_check_vma_makes_no_difference(case: Case) -> None:
    x, w, ct = cases.operands(1, 6, 6, 6)
    mesh = cases.ranks_mesh(3)
    checked, unchecked = (
        cases.value_and_gradients(cases.sharded(case, mesh, check_vma=c), x, w, ct)
        for c in (True, False)
    )
    close(checked, unchecked)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c.name == "to_rows" else pytest.mark.slow) for c in CASES],
    ids=lambda c: c.name,
)
def test_fused_without_check_vma(case: Case) -> None:
    """The replicated weight of ``to_rows`` has a gradient that is not counted once a rank.

    With it see ``test_operators.test_fused_with_gradients``.
    """
    x, w, ct = cases.operands(1, 4, 4, 4)
    fn = cases.sharded(case, cases.ranks_mesh(2), check_vma=False, backend="remote_dma")
    close(cases.value_and_gradients(fn, x, w, ct), cases.exact(x, w, ct))
