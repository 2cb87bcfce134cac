"""What a user can get wrong, and the message with the numbers that each gives."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from syncopate_jax.errors import InputError, MeshError, UnsupportedError
from syncopate_jax.ops import (
    all_gather_matmul,
    all_to_all_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Launch, Options
from tests.ops import cases
from tests.ops.cases import CASES, Case
from tests.ops.refusals import BACKENDS, W, X, local, refused

OPERATORS = (
    all_gather_matmul,
    all_to_all_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
each_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.__name__)


@each_operator
@pytest.mark.parametrize("name", ["int32", "int8", "bool", "complex64"])
def test_types_that_are_not_floating_point(operator: Any, name: str) -> None:
    with refused(
        f"{operator.__name__}: x has dtype {name}; needs one of float32, bfloat16, float16, float64"
    ):
        local(operator, X.astype(name), W)
    with refused(f"{operator.__name__}: w has dtype {name}"):
        local(operator, X, W.astype(name))


@each_operator
@pytest.mark.parametrize("asked,shown", [("int32", "int32"), (object, "object"), ("nope", "nope")])
def test_result_types_that_are_not_floating_point(operator: Any, asked: Any, shown: str) -> None:
    with pytest.raises(InputError, match=f"preferred_element_type is .*{shown}.*; needs one of"):
        local(operator, X, W, preferred_element_type=asked)


@each_operator
def test_wrong_numbers_of_dimensions(operator: Any) -> None:
    name = operator.__name__
    with refused(f"{name}: x must be [..., rows, columns], found shape (4,)"):
        local(operator, X[:, 0], W)
    with refused(f"{name}: x must be [..., rows, columns], found shape ()"):
        local(operator, X[0, 0], W)
    with refused(f"{name}: w must be [rows, columns], found shape (8,)"):
        local(operator, X, W[:, 0])
    with refused(f"{name}: w must be [rows, columns], found shape (1, 8, 6)"):
        local(operator, X, W[None])


@each_operator
def test_what_is_no_array(operator: Any) -> None:
    with refused(f"{operator.__name__}: x must be an array, found list"):
        local(operator, [[1.0]], W)
    with refused(f"{operator.__name__}: w must be an array, found NoneType"):
        local(operator, X, None)


@each_operator
def test_missing_arguments_are_pythons_own_errors(operator: Any) -> None:
    with pytest.raises(TypeError, match="axis_name"):
        operator(X, W)
    with pytest.raises(TypeError, match="'w'"):
        operator(X, axis_name="t")


@each_operator
def test_numpy_arrays_are_arrays(operator: Any) -> None:
    options = {"ranks": 1}
    assert local(operator, np.ones((4, 8), "f"), np.ones((8, 6), "f"), **options).shape == (4, 6)


@each_operator
def test_outside_shard_map(operator: Any) -> None:
    text = (
        f"{operator.__name__} communicates over mesh axis 't', which is not bound here "
        "(bound: none); call it inside jax.shard_map over a mesh with that axis"
    )
    with refused(text, MeshError):
        operator(X, W, axis_name="t")
    sharded = jax.device_put(X, jax.NamedSharding(cases.ranks_mesh(4), jax.P("t")))
    with refused(text, MeshError):
        jax.jit(lambda x: operator(x, W, axis_name="t"))(sharded)


@each_operator
def test_axis_names(operator: Any) -> None:
    with refused(
        "communicates over mesh axis 'u', which is not bound here (bound: 't')", MeshError
    ):
        local(operator, X, W, axis_name="u")
    for wrong in ((), ("t", "t"), ["t"], (["t"],), ("t", 1), 3, None):
        with refused(
            f"{operator.__name__}: axis_name must be a mesh axis name or a tuple of different "
            f"ones, found {wrong!r}"
        ):
            local(operator, X, W, axis_name=wrong)


CONTRACTED = [
    (all_gather_matmul, {}, "x (4, 8) gives 8, w (7, 6) gives 7 (x and w as exchanged over 2"),
    (all_gather_matmul, {"dimension": "k"}, "x (4, 8) gives 16, w (7, 6) gives 7"),
    (
        all_gather_matmul,
        {"gathered": "w", "dimension": "k"},
        "x (4, 8) gives 8, w (7, 6) gives 14",
    ),
    (all_gather_matmul, {"gathered": "w", "dimension": "n"}, "x (4, 8) gives 8, w (7, 6) gives 7"),
    (all_to_all_matmul, {}, "x (4, 8) gives 16, w (7, 6) gives 7"),
    (matmul_all_reduce, {}, "x (4, 8) gives 8, w (7, 6) gives 7"),
    (matmul_all_to_all, {}, "x (4, 8) gives 8, w (7, 6) gives 7"),
    (matmul_reduce_scatter, {}, "x (4, 8) gives 8, w (7, 6) gives 7"),
]


@pytest.mark.parametrize("operator,options,text", CONTRACTED)
def test_contracted_dimensions_that_differ(operator: Any, options: Any, text: str) -> None:
    with refused(f"{operator.__name__}: contracted dimensions differ: {text}"):
        local(operator, X, jnp.ones((7, 6)), **options)


SCATTERED = [
    (matmul_reduce_scatter, {}, (4, 8), (8, 6), "m of the result", 4),
    (matmul_reduce_scatter, {"scatter": "n"}, (4, 8), (8, 7), "n of the result", 7),
    (all_to_all_matmul, {}, (4, 8), (24, 6), "m of x", 4),
    (matmul_all_to_all, {}, (4, 8), (8, 7), "n of the result", 7),
]


@pytest.mark.parametrize("operator,options,x,w,what,extent", SCATTERED)
def test_scattered_dimensions_that_do_not_divide(
    operator: Any, options: Any, x: Any, w: Any, what: str, extent: int
) -> None:
    with refused(
        f"{operator.__name__}: dimension {what} is scattered over 3 ranks, which does not divide "
        f"its extent {extent}; pad it to a multiple of 3"
    ):
        local(operator, jnp.ones(x), jnp.ones(w), ranks=3, **options)


def test_variants_that_do_not_exist() -> None:
    with refused("all_gather_matmul: cannot gather 'x' along 'n'; known: x along m, x along k, w"):
        all_gather_matmul(X, W, axis_name="t", dimension="n")
    with refused("all_gather_matmul: cannot gather 'y' along 'm'"):
        all_gather_matmul(X, W, axis_name="t", gathered="y")
    with refused("matmul_reduce_scatter: scatter must be 'm' or 'n', found 'k'"):
        matmul_reduce_scatter(X, W, axis_name="t", scatter="k")


TILES = "{'m': 128, 'n': 128, 'k': 64}"
OPTIONS = [
    ({"backend": "nope"}, "no backend is called 'nope'; known: "),
    ({"backend": 3}, "backend: needs a name, found 3"),
    ({"backend": None}, "backend: needs a name, found None"),
    ({"target": 4}, "target: needs a name, found 4"),
    ({"target": "fpga"}, "target: no local kernel is written for 'fpga'; known: tpu"),
    ({"plan": "nope"}, "no plan template is called 'nope'; known: all_gather_double_ring"),
    ({"plan": "ring.json"}, "a plan in a file is read by syncopate_jax.ir.serial.load"),
    ({"plan": 7}, "plan: needs a Plan, the name of a plan template or None, found 7"),
    ({"split": 0}, "split: needs an integer of at least 1 or None, found 0"),
    ({"split": 1.5}, "split: needs an integer of at least 1 or None, found 1.5"),
    ({"launch": 3}, "launch: needs a Launch or None, found 3"),
    ({"tiles": {"m": 8, 1: 2}}, "tiles: needs letters as keys, found 1"),
    ({"tiles": {"m": 0}}, "tiles: m needs an integer of at least 1, found 0"),
    ({"tiles": {"m": "8"}}, "tiles: m needs an integer of at least 1, found '8'"),
    ({"tiles": {"q": 8}}, "tiles: ['q'] are no letters; known: k, m, n"),
    ({"tiles": 128}, f"tiles: needs a mapping of letters to sizes, such as {TILES}, found 128"),
    ({"tiles": (7,)}, f"tiles: needs a mapping of letters to sizes, such as {TILES}, found (7,)"),
]


@pytest.mark.parametrize("options,text", OPTIONS)
@each_operator
def test_options(operator: Any, options: dict[str, Any], text: str) -> None:
    for backend in BACKENDS:
        with refused(text):
            local(operator, X, W, ranks=1, **({"backend": backend} | options))


WRONG = (0, -1, 1.5, "", b"m", ["m"], {1, 2}, {3: 4}, np.array([1, 2]), object(), np.float32(2))
SHOWN = {"preferred_element_type": "needs one of float32", "tiles": "tiles: "}
"""What is in a message that does not show the value as Python would."""


@each_operator
def test_wrong_values_of_every_keyword(operator: Any) -> None:
    """Whatever is given, the error is the project's own, and says what and for which keyword."""
    w = jnp.ones((16, 6)) if operator is all_to_all_matmul else W
    keywords = list(inspect.signature(operator).parameters)[2:]
    for name in keywords:
        words = {"gathered": "gather", "dimension": "gather"}.get(name, name.split("_")[0])
        for value in WRONG[: -1 if name == "preferred_element_type" else None]:
            with pytest.raises((InputError, MeshError)) as refusal:
                local(operator, X, w, **{name: value})
            text = str(refusal.value)
            assert words in text and SHOWN.get(name, repr(value)) in text, f"{name}={value!r}"


@pytest.mark.parametrize("operator", [all_gather_matmul, matmul_reduce_scatter])
def test_dtypes_that_numpy_reads_as_structures(operator: Any) -> None:
    for asked in ("i4, ,", {"names": 3}, [("a", "f4")]):
        with refused("preferred_element_type is "):
            local(operator, X, W, preferred_element_type=asked)


def test_numbers_may_be_numpys() -> None:
    options = Options(split=np.int64(2), tiles={"m": np.int32(8)}, launch=Launch(sms=np.int8(3)))
    assert options == Options(split=2, tiles=(("m", 8),), launch=Launch(sms=3))
    assert type(options.split) is type(options.launched.sms) is int


@pytest.mark.parametrize("split", [10**9, 10**30])
def test_more_pieces_than_there_are_rows(split: int) -> None:
    operator = matmul_reduce_scatter
    assert local(operator, X, W, backend="remote_dma", split=split).shape == (4, 6)
    if split > 2**31:
        with refused(f"split must be in 1..2147483647, found {split}"):
            local(all_gather_matmul, X, W, backend="remote_dma", split=split)


@pytest.mark.parametrize(
    "options,text",
    [
        ({"sms": 1.5}, "launch: sms needs an integer, found 1.5"),
        ({"communicating": "2"}, "launch: communicating needs an integer, found '2'"),
        ({"watchdog_us": None}, "launch: watchdog_us needs an integer, found None"),
        ({"folded": 1}, "launch: folded needs True or False, found 1"),
    ],
)
def test_launches(options: dict[str, Any], text: str) -> None:
    with refused(text):
        Launch(**options)


def test_what_only_looks_like_an_array() -> None:
    described = jax.ShapeDtypeStruct((4, 8), "float32")
    with refused("all_gather_matmul: x must be an array, found ShapeDtypeStruct"):
        local(all_gather_matmul, described, W)


def test_orders() -> None:
    with refused("order: needs one of natural, grouped, snake, found 'random'"):
        Options(order="random")


ONE_WAY = [  # backend, target, operator, why its gradient cannot be had
    ("copy_engine", "mosaic_gpu", all_gather_matmul, "moves what a tile made"),
    ("copy_engine", "triton", all_gather_matmul, "moves what a tile made"),
    ("copy_engine", "mosaic_gpu", all_to_all_matmul, "moves what a tile made"),
    ("ldst_colocated", "mosaic_gpu", matmul_reduce_scatter, "brings data to tiles"),
    ("ldst_colocated", "mosaic_gpu", matmul_all_to_all, "brings data to tiles"),
    ("ldst_colocated", "mosaic_gpu", matmul_all_reduce, None),
    ("ldst_colocated", "triton", matmul_reduce_scatter, None),
    ("tma_dedicated", "mosaic_gpu", all_gather_matmul, None),
]


@pytest.mark.parametrize(
    "backend,target,operator,text", ONE_WAY, ids=[f"{b}-{t}-{o.__name__}" for b, t, o, _ in ONE_WAY]
)
def test_backends_that_move_data_one_way_have_no_gradient(
    backend: str, target: str, operator: Any, text: str | None
) -> None:
    """As the README says; ``remote_dma`` and the others have all."""
    pytest.importorskip("jax_triton" if target == "triton" else "jax")
    options = {"backend": backend, "target": target, "launch": Launch(sms=132)}
    x = jnp.ones((256, 256), jnp.bfloat16)
    w = jnp.ones((512 if operator is all_to_all_matmul else 256, 256), jnp.bfloat16)

    def total(x: jax.Array, w: jax.Array, **axis: Any) -> jax.Array:
        return jnp.sum(operator(x, w, **axis, **options))

    def gradient(x: jax.Array, w: jax.Array, **axis: Any) -> jax.Array:
        return jax.grad(total)(x, w, **axis)

    assert local(lambda *a, **k: total(*a, **k)[None], x, w).shape == (2,)
    if text is None:
        assert local(gradient, x, w).shape == (2 * 256, 256)
    else:
        with refused(text, UnsupportedError):
            local(gradient, x, w)


def test_no_gpu_whose_multiprocessors_could_be_counted() -> None:
    with refused("give launch=syncopate_jax.options.Launch(sms=132) to compile for a GPU"):
        local(all_gather_matmul, X, W, backend="tma_dedicated")
    with refused("with that launch backend 'copy_engine' runs on CPUs too"):
        local(all_gather_matmul, X, W, backend="copy_engine")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_fused_operators_refuse_empty_operands(case: Case) -> None:
    fn = cases.sharded(case, cases.ranks_mesh(2), backend="remote_dma")
    with refused("has nothing to compute; use backend 'xla'", UnsupportedError):
        jax.eval_shape(fn, jnp.ones((0, 4, 4)), jnp.ones((4, 4)))


def test_fused_operators_refuse_float64() -> None:
    with jax.enable_x64(True):
        x, w = np.ones((4, 8)), np.ones((8, 6))
        with refused("a fused all_gather adds in float32, which would lose", UnsupportedError):
            local(all_gather_matmul, x, w, backend="remote_dma")
        assert local(all_gather_matmul, x, w).dtype == jnp.float64
        assert local(all_gather_matmul, x, w, plan="all_gather_ring").dtype == jnp.float64


@pytest.mark.parametrize(
    ("kind", "backend", "text"),
    [
        (AxisType.Auto, "remote_dma", "axis 'd' must be manual too: leave out axis_names="),
        (
            AxisType.Explicit,
            "auto",
            "types speak of axis 'd', which must be manual too, or of Axis",
        ),
    ],
)
def test_mesh_axes_that_are_left(kind: AxisType, backend: str, text: str) -> None:
    fn = jax.shard_map(
        lambda x: all_gather_matmul(x, W, axis_name="t", backend=backend),
        mesh=jax.make_mesh((2, 2), ("d", "t"), (kind, AxisType.Auto)),
        in_specs=jax.P("t"),
        out_specs=jax.P("t"),
        axis_names={"t"},
    )
    with refused(text, MeshError):
        jax.eval_shape(jax.jit(fn), X)


@pytest.mark.parametrize("kind", ["broadcast", "nothing"])
def test_kinds_of_exchange(kind: str) -> None:
    spec = Contraction("bmk", "kn", "bmn", kind, "lhs", gather="m")
    from syncopate_jax.backends import xla

    with refused(f"exchange: {kind!r} is no kind of exchange"):
        xla.exchange(X, spec.exchange, ("t",))
