"""``matmul`` under plain jit: values, gradients, and no operand moved that need not be."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from syncopate_jax.errors import InputError, MeshError, UnsupportedError
from syncopate_jax.importers import shardings
from syncopate_jax.ops import auto_axes, explicit_axes, matmul
from syncopate_jax.options import Launch

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
ONE = (P(), P("t"), P(None, "t"))
TWO = (
    (P("t", "u"), P("u"), P("t")),
    (P("t"), P("u", "t"), P("t", "u")),
    (P(None, ("t", "u")), P(("t", "u")), P(("t", "u"))),
    (P(("t", "u")), P(None, ("u", "t")), P(None, ("u", "t"))),
)


def mesh_of(sizes: tuple[int, ...], *kinds: AxisType) -> jax.sharding.Mesh:
    kinds = kinds if len(kinds) == len(sizes) else kinds * len(sizes)
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, ("t", "u")[: len(sizes)], kinds, devices=devices)


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Small integers: sums are exact in whatever order."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) for shape in shapes]


def placed(mesh: jax.sharding.Mesh, x: jax.Array, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def spied(monkeypatch: pytest.MonkeyPatch) -> list[shardings.Derived]:
    """Every derivation from now on."""
    seen = []

    def spy(*args: Any, **kwargs: Any) -> shardings.Derived:
        seen.append((args[1:], shardings.derive(*args, **kwargs)))
        return seen[-1][1]

    for module in (auto_axes, explicit_axes):
        monkeypatch.setattr(module, "derive", spy)
    return seen


def padded(spec: P, ndim: int = 2) -> P:
    return P(*spec, *(None,) * (ndim - len(spec)))


def same(a: P, b: P) -> bool:
    return padded(a) == padded(b)


def check(mesh: Any, seen: list[Any], lhs: P, rhs: P, out: P | None) -> None:
    """Value, gradients, and that the derivation saw the operands as they are sharded."""
    x, w = arrays((8, 4), (4, 12))
    auto = mesh.axis_types[0] == AUTO

    def run(x: jax.Array, w: jax.Array) -> Any:
        y, transpose = jax.vjp(lambda x, w: matmul(x, w, out_sharding=out, backend="xla"), x, w)
        ct = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
        ct = ct if auto else jax.reshard(ct, jax.typeof(y).sharding.spec)
        return y, transpose(ct)

    seen.clear()
    with jax.set_mesh(mesh):
        y, (dx, dw) = jax.jit(run)(placed(mesh, x, lhs), placed(mesh, w, rhs))
    ct = np.cos(np.arange(y.size)).reshape(y.shape)
    np.testing.assert_array_equal(y, x @ w)
    np.testing.assert_allclose(dx, ct @ w.T, atol=1e-4)
    np.testing.assert_allclose(dw, x.T @ ct, atol=1e-4)
    assert out is None or same(y.sharding.spec, out)
    assert _kept(lhs, dx.sharding.spec, auto) and _kept(rhs, dw.sharding.spec, auto)
    # Three products: what each was derived from is what its operands were.
    found = [str((padded(a), padded(b))) for (a, b, _), _ in seen]
    shown = padded(y.sharding.spec)
    wanted = [str((padded(a), padded(b))) for a, b in ((lhs, rhs), (shown, rhs), (lhs, shown))]
    assert wanted[0] in found if auto else sorted(found) == sorted(wanted)


def _kept(wanted: P, found: P, auto: bool) -> bool:
    """On auto axes a gradient has its operand's axes, and may have more of them."""
    if not auto:
        return same(wanted, found)
    pairs = zip(padded(wanted), padded(found), strict=True)
    return all(_names(b)[: len(_names(a))] == _names(a) for a, b in pairs)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@pytest.mark.parametrize("out", [*ONE, None], ids=str)
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=str)
def test_every_sharding_along_one_axis(
    kind: AxisType, out: P | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = spied(monkeypatch)
    mesh = mesh_of((2,), kind)
    for lhs, rhs in itertools.product(ONE, ONE):
        if out is None and kind == AUTO and (lhs, rhs) == (ONE[0], ONE[0]):
            continue  # nothing is sharded
        check(mesh, seen, lhs, rhs, out)


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=str)
def test_two_axes(kind: AxisType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spied(monkeypatch)
    for lhs, rhs, out in TWO:
        check(mesh_of((2, 2), kind), seen, lhs, rhs, out)


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=str)
def test_the_program_has_the_derived_collectives_and_no_more(kind: AxisType) -> None:
    """Tensor parallelism in and out: one all-gather, one reduce-scatter."""
    mesh = mesh_of((2,), kind)
    x, w1, w2 = arrays((2, 8, 4), (4, 12), (12, 4))
    rows, columns = P(None, "t"), P(None, None, "t")

    def layer(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        h = matmul(x, w1, out_sharding=columns, backend="xla")
        return matmul(jax.nn.relu(h), w2, out_sharding=NamedSharding(mesh, rows), backend="xla")

    with jax.set_mesh(mesh):
        args = [placed(mesh, x, rows), placed(mesh, w1, P(None, "t")), placed(mesh, w2, P("t"))]
        compiled = jax.jit(layer).lower(*args).compile()
    np.testing.assert_array_equal(compiled(*args), jax.nn.relu(x @ w1) @ w2)
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text())
    assert sorted(found) == ["all-gather", "reduce-scatter"]


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=str)
def test_nothing_is_gathered_that_need_not_be(kind: AxisType) -> None:
    """Every combination along one axis, in one program: the derived collectives and no more."""
    mesh = mesh_of((2,), kind)
    cases = list(itertools.product(ONE, ONE, ONE))
    wanted: Counter[str] = Counter()
    args = []
    for lhs, rhs, out in cases:
        x, w = arrays((8, 4), (4, 12))
        args.append((placed(mesh, x, lhs), placed(mesh, w, rhs)))
        derived = shardings.derive(
            "mk,kn->mn", lhs, rhs, out, shapes=(x.shape, w.shape), mesh={"t": 2}
        )
        wanted.update(move.kind for move in derived.moves if move.kind != "slice")

    def every(args: Any) -> Any:
        return [
            matmul(*one, out_sharding=out, backend="xla")
            for one, (_, _, out) in zip(args, cases, strict=True)
        ]

    with jax.set_mesh(mesh):
        text = jax.jit(every).lower(args).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" ({kinds})(?:-start)?\(", text)
    counted = Counter(name.replace("-", "_") for name in found)
    # XLA joins all-reduces that are ready together.
    assert 1 <= counted.pop("all_reduce") <= wanted.pop("all_reduce")
    assert counted == wanted


def test_fused_on_explicit_axes() -> None:
    mesh = mesh_of((2,), EXPLICIT)
    x, w = arrays((8, 4), (4, 12))
    with jax.set_mesh(mesh):
        args = placed(mesh, x, P("t")), placed(mesh, w, P(None, "t"))
        run = jax.jit(lambda x, w: matmul(x, w, out_sharding=P(None, "t"), backend="remote_dma"))
        np.testing.assert_array_equal(run(*args), x @ w)
        assert "syncopate" in run.lower(*args).as_text(debug_info=True)


def test_a_launch_for_a_gpu_that_is_not_here() -> None:
    mesh = mesh_of((2,), EXPLICIT)
    x, w = (a.astype(jnp.bfloat16) for a in arrays((256, 128), (128, 256)))
    options: dict[str, Any] = {"backend": "copy_engine", "target": "mosaic_gpu"}
    with jax.set_mesh(mesh):
        args = placed(mesh, x, P("t")), placed(mesh, w, P(None, "t"))
        with pytest.raises(InputError, match="there is no GPU whose multiprocessors"):
            matmul(*args, out_sharding=P(None, "t"), **options)
        options["launch"] = Launch(sms=132)
        run = jax.jit(lambda x, w: matmul(x, w, out_sharding=P(None, "t"), **options))
        np.testing.assert_array_equal(run(*args), x @ w)


@pytest.mark.parametrize("wrap", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
def test_axes_of_both_kinds(wrap: Any) -> None:
    """Explicit axes are read from the types; the others stay the partitioner's."""
    mesh = mesh_of((2, 2), EXPLICIT, AUTO)
    x, w = arrays((8, 4), (4, 12))

    def run(x: jax.Array, w: jax.Array) -> Any:
        y, transpose = jax.vjp(lambda x, w: matmul(x, w, out_sharding=P(None, "t")), x, w)
        return y, *transpose(y)

    with jax.set_mesh(mesh):
        args = placed(mesh, x, P("t")), placed(mesh, w, P(None, "t"))
        y, dx, dw = wrap(run)(*args)
        twice = wrap(jax.vmap(lambda x: matmul(x, args[1])))(jnp.stack([args[0]] * 2))
    assert same(y.sharding.spec, P(None, "t")) and same(dx.sharding.spec, P("t"))
    for found, wanted in ((y, x @ w), (dx, x @ w @ w.T), (dw, x.T @ (x @ w)), (twice[1], x @ w)):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=str)
def test_dtypes(kind: AxisType) -> None:
    mesh = mesh_of((2,), kind)
    x, w = arrays((8, 4), (4, 12))

    def run(x: jax.Array, w: jax.Array) -> Any:
        f = lambda x, w: matmul(x, w, preferred_element_type=jnp.float32, backend="xla")  # noqa: E731
        return f(x, w), jax.grad(lambda x, w: f(x, w).sum(), (0, 1))(x, w)

    with jax.set_mesh(mesh):
        args = placed(mesh, x.astype(jnp.bfloat16), P("t")), placed(mesh, w, P(None, "t"))
        y, (dx, dw) = jax.jit(run)(*args)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(y, x @ w)


def test_without_a_mesh_it_is_a_product() -> None:
    x, w = arrays((8, 4), (4, 12))
    np.testing.assert_array_equal(matmul(x, w), x @ w)


def test_wrong_arguments() -> None:
    x, w = arrays((8, 4), (4, 12))
    with pytest.raises(
        InputError, match=r"contracted dimensions differ: x \(8, 4\) gives 4, w \(12"
    ):
        matmul(x, w.T)
    for wrong in ("t", 1, ["t"]):
        with pytest.raises(InputError, match="out_sharding must be a PartitionSpec or NamedShard"):
            matmul(x, w, out_sharding=wrong)  # type: ignore[arg-type]
    mesh = mesh_of((2,), EXPLICIT)
    with jax.set_mesh(mesh):
        with pytest.raises(
            InputError, match="out_sharding must be a PartitionSpec or NamedSharding"
        ):
            matmul(placed(mesh, x, P("t")), w, out_sharding="t")  # type: ignore[arg-type]
        with pytest.raises(
            InputError,
            match=r"cuts dimension 0 of the result \(7, 12\), an extent of 7 that the 2 ranks of t "
            r"do not divide; leave them out, or pad it",
        ):
            matmul(x[:7], w, out_sharding=P("t"))
        inside = jax.shard_map(lambda x: matmul(x, x), in_specs=P(), out_specs=P())
        with pytest.raises(MeshError, match=r"matmul was called inside jax\.shard_map over t"):
            inside(x[:4])
    with (
        jax.set_mesh(mesh_of((2,), AUTO)),
        pytest.raises(UnsupportedError, match="backend 'remote_dma' is interpreted on the CPU"),
    ):
        matmul(x, w, backend="remote_dma")


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
@pytest.mark.parametrize(
    ("out", "message"),
    [
        (P("v"), "has 'v', which is no axis of the mesh; known: t, u"),
        (P(3), "has 3, which is no axis of the mesh"),
        (P("t", None, "u"), "is for 3 dimensions, the result has 2"),
        (NamedSharding(mesh_of((2,), AUTO), P("t")), "is of mesh {'t': 2}, the operands are on"),
    ],
)
def test_results_that_cannot_be_sharded_so(kind: AxisType, out: Any, message: str) -> None:
    mesh = mesh_of((2, 2), kind)
    x, w = arrays((8, 4), (4, 12))
    with jax.set_mesh(mesh), pytest.raises(InputError, match=f"matmul: out_sharding .*{message}"):
        matmul(placed(mesh, x, P("t")), w, out_sharding=out)


def test_an_explicit_sharding_of_operands_on_auto_axes() -> None:
    mesh, out = mesh_of((2,), AUTO), NamedSharding(mesh_of((2,), EXPLICIT), P("t"))
    x, w = (placed(mesh, a, P()) for a in arrays((8, 4), (4, 12)))
    with pytest.raises(
        InputError, match=r"has 't' of a mesh where it is explicit, the operands ar"
    ):
        matmul(x, w, out_sharding=out)
    assert same(matmul(x, w, out_sharding=out.spec).sharding.spec, out.spec)


@pytest.mark.parametrize("whole", [False, True])
def test_an_auto_axis_beside_explicit_ones(whole: bool) -> None:
    mesh = mesh_of((2, 2), EXPLICIT, AUTO)
    x, w = (placed(mesh, a, P()) for a in arrays((8, 4), (4, 12)))
    out = NamedSharding(mesh, P("u")) if whole else P("u")
    with (
        jax.set_mesh(mesh),
        pytest.raises(
            InputError, match=r"matmul: out_sharding .* has mesh axis 'u', which is auto beside ex"
        ),
    ):
        matmul(x, w, out_sharding=out)


def test_other_wrong_input() -> None:
    x, w = arrays((8, 4), (4, 12))
    with pytest.raises(InputError, match=r"but there is no mesh here; use jax\.set_mesh"):
        matmul(x, w, out_sharding=P("t"))
    with pytest.raises(InputError, match="x has 13 dimensions, at most 12 fit; reshape the lead"):
        matmul(x.reshape((1,) * 11 + x.shape), w)
    with (
        jax.set_mesh(mesh_of((2,), AUTO)),
        pytest.raises(InputError, match="no backend is called 'nope'"),
    ):
        matmul(x, w, backend="nope")


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
def test_a_spec_is_of_the_operands_mesh_where_none_is_in_use(kind: AxisType) -> None:
    mesh, out = mesh_of((2,), kind), P(None, "t")
    x, w = arrays((8, 4), (4, 12))
    args = placed(mesh, x, P("t")), placed(mesh, w, out)
    for run in (jax.jit(matmul, static_argnames="out_sharding"), matmul):
        found = run(*args, out_sharding=out)
        assert same(found.sharding.spec, out)
        np.testing.assert_array_equal(found, x @ w)
    nowhere = NamedSharding(mesh, out)
    if kind == AUTO:
        assert same(matmul(x, w, out_sharding=nowhere).sharding.spec, out)
    else:
        with pytest.raises(InputError, match=r"but there is no mesh here; use jax\.set_mesh"):
            matmul(x, w, out_sharding=nowhere)


UNEVEN = (
    (P("t"), P(), P("t")),  # padding stays
    (P("t"), P("u"), P("t")),
    (P("t"), P(None, "u"), P("t", "u")),
    (P(("t", "u")), P(), P(("t", "u"))),
    (P("t"), P(), P()),  # padding would be moved
    (P("t"), P(None, "u"), P("u")),
    (P(None, "t"), P(), P(None, "u")),
    (P(None, "t"), P("t"), P()),  # padding is summed
    (P(None, ("u", "t")), P(("u", "t")), P()),
    (P("u"), P("t"), P("t", "u")),
)


@pytest.mark.parametrize(("lhs", "rhs", "out"), UNEVEN)
def test_extents_that_the_ranks_of_auto_axes_do_not_divide(lhs: P, rhs: P, out: P) -> None:
    mesh = mesh_of((2, 2), AUTO)
    x, w = arrays((3, 5), (5, 6))

    def run(x: jax.Array, w: jax.Array, multiply: Any) -> Any:
        def f(x: jax.Array, w: jax.Array) -> jax.Array:
            x, w = (jax.lax.with_sharding_constraint(a, s) for a, s in ((x, lhs), (w, rhs)))
            x, w = x + 1, w + 1  # padding too
            return jax.lax.with_sharding_constraint(multiply(x, w), out)

        return f(x, w), jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1))(x, w)

    with jax.set_mesh(mesh):
        args = placed(mesh, x, P()), placed(mesh, w, P())
        compiled = jax.jit(lambda x, w: run(x, w, matmul)).lower(*args).compile()
        wanted = jax.jit(lambda x, w: run(x, w, jnp.matmul))(*args)
    jax.tree.map(np.testing.assert_array_equal, compiled(*args), wanted)


def test_an_uneven_result_outside_jit() -> None:
    mesh = mesh_of((2,), AUTO)
    x, w = (placed(mesh, a, P()) for a in arrays((3, 4), (4, 6)))
    np.testing.assert_array_equal(matmul(x, w, out_sharding=P(None, "t")), x @ w)
    with pytest.raises(
        InputError, match="an extent of 3 that the 2 ranks of t do not divide; call it in"
    ):
        matmul(x, w, out_sharding=P("t"))


def test_arrays_that_a_program_closes_over() -> None:
    """Without a sharded argument, JAX gives the partitioner no mesh."""
    mesh = mesh_of((2, 2), AUTO)
    x, w = arrays((8, 4), (4, 12))
    rows, columns = placed(mesh, x, P("t")), placed(mesh, w, P(None, "u"))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(lambda: matmul(rows, columns))(), x @ w)


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
def test_a_contraction_of_nothing(kind: AxisType) -> None:
    mesh = mesh_of((2,), kind)
    x, w = arrays((4, 0), (0, 6))
    with jax.set_mesh(mesh):
        args = placed(mesh, x, P("t")), placed(mesh, w, P())
        np.testing.assert_array_equal(jax.jit(matmul)(*args), np.zeros((4, 6)))


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_under_vmap(kind: AxisType, in_axes: tuple[int | None, int | None]) -> None:
    mesh = mesh_of((2, 2), kind)
    shapes = [
        (3, *shape) if axis == 0 else shape
        for axis, shape in zip(in_axes, ((8, 4), (4, 12)), strict=True)
    ]
    x, w = arrays(*shapes)
    with jax.set_mesh(mesh):
        rows = placed(mesh, x, P(*(None,) * (x.ndim - 2), "t"))
        columns = placed(mesh, w, P(*(None,) * (w.ndim - 1), "u"))
        over = jax.vmap(matmul, in_axes)

        @jax.jit
        def run(x: jax.Array, w: jax.Array) -> Any:
            return over(x, w), jax.grad(lambda *a: (over(*a) ** 2).sum(), (0, 1))(x, w)

        y, (dx, dw) = run(rows, columns)
    wanted = x @ w
    by_x, by_w = jax.grad(lambda x, w: ((x @ w) ** 2).sum(), (0, 1))(x, w)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(dx, by_x)
    np.testing.assert_array_equal(dw, by_w)
