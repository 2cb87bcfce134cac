"""A fused call behaves as one of JAX's own collectives does, wherever a program puts it."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.backends.peers import peer_id
from syncopate_jax.errors import InputError, MeshError, UnsupportedError
from syncopate_jax.runtime import custom_call
from tests import interpret
from tests.runtime.push_all_gather import push_all_gather

P = jax.P
AxisType = jax.sharding.AxisType
X = P("x")
ROWS = 8


def mesh_of(order, shape, names, axis_type=AxisType.Auto):
    """A mesh of the devices with these numbers, in this order."""
    devices = np.array([jax.devices()[i] for i in order]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(axis_type,) * len(names))


def line(ranks):
    return mesh_of(range(ranks), (ranks,), ("x",))


def rows(n, columns=128):
    return jnp.arange(n * ROWS * columns, dtype=jnp.float32).reshape(n * ROWS, columns)


def on(mesh, body, in_specs=X, out_specs=X, check_vma=True):
    return jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


gather_x = functools.partial(push_all_gather, axes=("x",))
MESHES = {  # arguments of mesh_of, axes of the operator
    "some of the devices, in any order": (((6, 1, 4), (3,), ("tp",)), ("tp",)),
    "second of two axes": (((5, 2, 7, 0, 3, 6), (2, 3), ("dp", "tp")), ("tp",)),
    "first of two axes": (((5, 2, 7, 0), (2, 2), ("tp", "dp")), ("tp",)),
    "two axes": (((3, 2, 1, 0), (2, 2), ("x", "y")), ("x", "y")),
    "two axes, the other way round": ((range(6), (2, 3), ("x", "y")), ("y", "x")),
    "explicit axes": (((4, 1, 2, 3), (2, 2), ("dp", "tp"), AxisType.Explicit), ("tp",)),
    "around another axis": ((range(8), (2, 2, 2), ("x", "dp", "y")), ("x", "y")),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", MESHES)
def test_values_on_any_mesh(name, check_vma):
    arguments, axes = MESHES[name]
    mesh = mesh_of(*arguments)
    x = jax.device_put(rows(mesh.size), jax.NamedSharding(mesh, P(mesh.axis_names)))

    def run(gather):
        spec = P(mesh.axis_names)
        return jax.jit(on(mesh, gather, spec, spec, check_vma))

    expected = run(lambda x: lax.all_gather(x, axes))(x)
    got = interpret.run_guarded(
        run(lambda x: push_all_gather(x, axes, interpret.params("eager"))), x
    )
    np.testing.assert_array_equal(got, expected)


def test_types_of_results():
    mesh = mesh_of(range(4), (2, 2), ("dp", "tp"))
    seen = {}

    def body(x, y):
        for name, arg in (("both", x), ("tp", y)):
            seen[name] = jax.typeof(push_all_gather(arg, ("tp",)))
            seen[f"{name} invariant"] = jax.typeof(push_all_gather(arg, ("tp",), invariant=True))
        return x

    jax.eval_shape(on(mesh, body, (P(("dp", "tp")), P("tp")), P(("dp", "tp"))), rows(4), rows(2))
    varying = {name: set(t.manual_axis_type.varying) for name, t in seen.items()}
    assert varying == {
        "both": {"dp", "tp"},
        "both invariant": {"dp"},
        "tp": {"tp"},
        "tp invariant": set(),
    }
    assert {t.shape for t in seen.values()} == {(2, ROWS, 128)}
    jax.eval_shape(
        on(mesh, body, (P(("dp", "tp")), P("tp")), P(("dp", "tp")), False), rows(4), rows(2)
    )
    assert all(t.manual_axis_type.empty for t in seen.values())


# A layer in the style of tensor parallelism, y = psum(tanh(gather(x) @ v) @ w), out of operators
# with the gradients that real ones have; once with fused calls and once with JAX's collectives.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_matmul(x, v, axes):
    return push_all_gather(x, axes).reshape(-1, x.shape[1]) @ v


def _gather_matmul_forward(x, v, axes):
    return _gather_matmul(x, v, axes), (x, v)


def _gather_matmul_backward(axes, saved, dy):
    x, v = saved
    gathered = push_all_gather(x, axes).reshape(-1, x.shape[1])
    dx = lax.psum_scatter(dy @ v.T, axes, scatter_dimension=0, tiled=True)
    return dx, gathered.T @ dy


_gather_matmul.defvjp(_gather_matmul_forward, _gather_matmul_backward)


def fused_sum(x, axes):
    def impl(x, *, platform):
        ranks = lax.psum(1, axes)
        call = pl.pallas_call(
            functools.partial(_sum_kernel, axes, ranks),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[
                pltpu.VMEM((ranks, *x.shape), x.dtype),
                *(pltpu.SemaphoreType.DMA((ranks,)),) * 2,
            ],
            compiler_params=pltpu.CompilerParams(collective_id=1, has_side_effects=True),
            interpret=pltpu.InterpretParams() if platform == "cpu" else False,
        )
        return [call(x)]

    key = ("sum", axes, x.shape)
    (total,) = custom_call.fused_call(
        impl, x, out_types=[x], axis_names=axes, name="push_sum", invariant_over=axes, key=key
    )
    return total


def _sum_kernel(axes, ranks, x, out, slots, send, arrive):
    me = lax.axis_index(axes)
    barrier = pltpu.get_barrier_semaphore()
    others = [lax.rem(me + d, ranks) for d in range(1, ranks)]
    for other in others:
        pl.semaphore_signal(barrier, 1, device_id=peer_id(axes, other))
    pl.semaphore_wait(barrier, ranks - 1)
    slots[me] = x[...]

    def put(source, to, slot):
        peer = peer_id(axes, to)
        return pltpu.make_async_remote_copy(
            x, slots.at[source], send.at[slot], arrive.at[source], device_id=peer
        )

    for slot, other in enumerate(others):
        put(me, other, slot).start()
    for slot, other in enumerate(others):
        put(other, other, 0).wait_recv()
        put(me, other, slot).wait_send()
    out[...] = slots[...].sum(0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul_sum(x, w, axes):
    return fused_sum(x @ w, axes)


def _matmul_sum_forward(x, w, axes):
    return _matmul_sum(x, w, axes), (x, w)


def _matmul_sum_backward(axes, saved, dy):
    x, w = saved
    if custom_call.tracks_varying_axes():
        dy, _ = custom_call.vary_alike((dy, x))
    else:
        dy = fused_sum(dy, axes)
    return dy @ w.T, x.T @ dy


_matmul_sum.defvjp(_matmul_sum_forward, _matmul_sum_backward)


def fused_layer(x, v, w, axes):
    h = jnp.tanh(_gather_matmul(*custom_call.vary_alike((x, v), axes), axes))
    return _matmul_sum(*custom_call.vary_alike((h, w), axes), axes)


def reference_layer(x, v, w, axes):
    h = jnp.tanh(lax.all_gather(x, axes, tiled=True) @ v)
    return lax.psum(h @ w, axes)


def gradients(layer, mesh, axes, check_vma, remat):
    """Value and gradients of two such layers in a scan, data parallel over the other axes."""
    others = tuple(name for name in mesh.axis_names if name not in axes)

    def body(x, v, w):
        def step(carry, _):
            y = layer(carry, v, w, axes)
            mine = lax.dynamic_slice_in_dim(y, lax.axis_index(axes) * ROWS, ROWS)
            return carry + mine, None

        step = jax.checkpoint(step) if remat else step
        last, _ = lax.scan(step, x, length=2)
        return lax.psum((last**2).sum(), mesh.axis_names)

    specs = (P((*others, *axes)), P(None, axes), P(axes))
    return jax.value_and_grad(on(mesh, body, specs, P(), check_vma), argnums=(0, 1, 2))


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "second of two axes",
        pytest.param("two axes, the other way round", marks=pytest.mark.slow),
    ],
)
def test_gradients_and_the_sums_they_need(name, check_vma, remat):
    arguments, axes = MESHES[name]
    mesh = mesh_of(*arguments)
    ranks = int(np.prod([mesh.shape[axis] for axis in axes]))
    random = np.random.default_rng(0)
    shapes = ((mesh.size * ROWS, 16), (16, ranks * 8), (ranks * 8, 16))
    args = [jnp.asarray(random.standard_normal(s) / 4, jnp.float32) for s in shapes]
    fused, reference = (
        gradients(layer, mesh, axes, check_vma, remat) for layer in (fused_layer, reference_layer)
    )
    got, expected = jax.jit(fused)(*args), jax.jit(reference)(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), got, expected)

    def sums(fn):
        text = str(jax.make_jaxpr(fn)(*args))
        return len(re.findall(r"= (?:psum|psum_invariant)\[|fused_call\[call=push_sum", text))

    # None where JAX has none; the recomputed forward sum, that no one reads, is removed as well.
    assert sums(fused) <= sums(reference)


def test_scan_and_vmap():
    mesh = line(2)

    def body(gather, x, y):
        def step(carry, row):
            return carry + gather(row).sum(0), gather(row)

        carry, out = lax.scan(step, x[0], x)
        # batched in the middle; nested, one argument of two batched
        mid = jax.vmap(gather, in_axes=1, out_axes=2)(x.swapaxes(0, 1))
        nested = jax.vmap(lambda a: jax.vmap(lambda b: gather(a * b))(y))(x)
        return carry, out, mid, nested

    def run(gather):
        specs = (P(None, "x"), P())
        out = P("x"), P(None, "x"), P("x"), P(None, None, "x")
        return jax.jit(on(mesh, functools.partial(body, gather), specs, out))

    x, y = jnp.stack([rows(2, 8), 2 * rows(2, 8)]), jnp.array([1.0, 3.0])
    got = run(gather_x)(x, y)
    expected = run(lambda x: lax.all_gather(x, "x"))(x, y)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("batch", [None, lambda size, batched, x: []])
def test_vmap_of_a_function_whose_call_is_not_batched(batch):
    """One call serves the whole batch, however the call is to be batched."""

    def body(gather, x, factors):
        return jax.vmap(lambda factor: factor * gather(x))(factors)

    def run(gather):
        return on(line(2), functools.partial(body, gather), (X, P()), P(None, "x"))

    x, factors = rows(2, 8), jnp.array([1.0, 3.0])
    fused = run(functools.partial(gather_x, batch=batch))
    text = str(jax.make_jaxpr(fused)(x, factors))
    assert text.count("fused_call") == 1 and "scan" not in text
    expected = run(lambda x: lax.all_gather(x, "x"))(x, factors)
    np.testing.assert_array_equal(jax.jit(fused)(x, factors), expected)


def test_a_batch_rule_takes_the_whole_batch():
    seen = []

    def batch(size, batched, x):
        seen.append((size, batched, x.shape))
        return [
            jnp.moveaxis(push_all_gather(x.reshape(size * ROWS, 128), ("x",)), 0, 0)
            .reshape(2, size, ROWS, 128)
            .swapaxes(0, 1)
        ]

    body = jax.vmap(lambda x: push_all_gather(x, ("x",), batch=batch))
    x = jnp.stack([rows(2), 2 * rows(2), 3 * rows(2)])
    fused = on(line(2), body, P(None, "x"), P(None, "x"))
    text = str(jax.make_jaxpr(fused)(x))
    assert text.count("fused_call") == 1 and "scan" not in text
    assert seen == [(3, (True,), (3, ROWS, 128))]
    expected = on(line(2), jax.vmap(lambda x: lax.all_gather(x, "x")), P(None, "x"), P(None, "x"))(
        x
    )
    np.testing.assert_array_equal(jax.jit(fused)(x), expected)


def test_a_call_that_nobody_reads_is_removed():
    def unused(x):
        push_all_gather(x, ("x",))
        return x + 1

    def recomputed(x):
        return jnp.sin(x).sum() + gather_x(lax.stop_gradient(x)).sum()

    def loss(x):
        return lax.psum(jax.checkpoint(recomputed)(x), "x")

    text = jax.jit(on(line(2), unused)).lower(rows(2)).as_text()
    assert "push_all_gather" not in text and "add" in text
    text = str(jax.make_jaxpr(jax.grad(on(line(2), loss, P("x"), P())))(rows(2)))
    assert text.count("fused_call") == 1  # forward only


def test_independent_calls_and_programs_are_kept_in_order():
    """Without an order the devices enter different kernels, and the interpreter breaks at once."""

    def many(x):
        sums = [gather_x(x * i).sum(0) + lax.psum(x, "x") for i in range(1, 4)]
        return sum(sums)

    def reference(x):
        return sum(lax.psum(x * i, "x") + lax.psum(x, "x") for i in range(1, 4))

    whole, left, right = (mesh_of(ids, (len(ids),), ("x",)) for ids in (range(4), (0, 1), (2, 3)))
    programs = [(jax.jit(on(m, many)), rows(m.size)) for m in (left, whole, right, left)]
    expected = [jax.jit(on(m, reference))(rows(m.size)) for m in (left, whole, right, left)]
    results = [fn(x) for fn, x in programs for _ in range(2)]
    for i, got in enumerate(results):
        np.testing.assert_allclose(got, expected[i // 2])


def test_calls_with_equal_keys_are_lowered_once_and_carry_their_name():
    def body(x):
        return gather_x(gather_x(x)[0])

    text = jax.jit(on(line(2), body)).lower(rows(2)).as_text()
    assert len(re.findall(r"func.func private @push_all_gather\w*\(", text)) == 1
    assert len(re.findall(r"call @push_all_gather\w*\(", text)) == 2


def test_outside_a_mesh_a_local_kernel_runs_eagerly():
    def impl(x, *, platform):
        assert platform == "cpu"
        call = pl.pallas_call(
            lambda x, out: out.__setitem__(..., x[...] + 1),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            interpret=pltpu.InterpretParams(),
        )
        return [call(x)]

    x = rows(1)
    (out,) = custom_call.fused_call(impl, x, out_types=[x], axis_names=(), name="add_one")
    np.testing.assert_array_equal(out, x + 1)


def test_the_kernel_lowers_for_a_tpu_without_one():
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((4,), ("x",), (AxisType.Auto,), abstract_device=device)
    x = jax.ShapeDtypeStruct((4 * ROWS, 128), "float32", sharding=jax.NamedSharding(mesh, P("x")))
    lowered = jax.jit(on(mesh, gather_x)).trace(x).lower(lowering_platforms=("tpu",))
    text = lowered.as_text()
    assert "tpu_custom_call" in text
    assert "token" not in text  # the compiled program has an order of its own


def test_errors():
    x, two = rows(2), mesh_of(range(4), (2, 2), ("dp", "x"))
    with pytest.raises(MeshError, match=r"axis 'x', which is not bound here \(bound: none\); call"):
        jax.jit(functools.partial(custom_call.fused_call, None, **call_options()))(x)
    with pytest.raises(MeshError, match=r"axis 'x', which is not bound here \(bound: 'y'\)"):
        mesh = mesh_of(range(2), (2,), ("y",))
        jax.jit(on(mesh, lambda x: call(x, lambda x, platform: [x]), P("y"), P("y")))(x)
    with pytest.raises(
        MeshError, match=r"manual over x only; one launch spans all devices, so axis 'dp' must"
    ):
        jax.jit(
            jax.shard_map(gather_x, mesh=two, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
        )(x)
    with pytest.raises(InputError, match=r"invariant_over names 'z', but .* over 'x'; only those"):
        jax.jit(on(line(2), lambda x: call(x, None, invariant_over=("z",))))(x)
    with pytest.raises(
        InputError, match=r"returned float32\[8, 64\], but out_types says float32\[8, 128\]; make"
    ):
        jax.jit(on(line(2), lambda x: call(x, lambda x, platform: [x[:, :64]])))(x)
    with pytest.raises(UnsupportedError, match=r"push_all_gather has no .*: wrap the call in "):
        jax.jit(jax.grad(lambda x: on(line(2), gather_x)(x).sum()))(x)
    with pytest.raises(UnsupportedError, match=r"interpreted on cpu, but .* pass ordered=True"):
        jax.jit(on(line(2), functools.partial(gather_x, ordered=False)))(x)


def call_options(**options):
    types = [jax.ShapeDtypeStruct((ROWS, 128), "float32")]
    return dict(out_types=types, axis_names=("x",), name="some_call") | options


def call(x, impl, **options):
    return custom_call.fused_call(impl, x, **call_options(**options))[0]
