"""A user's own kernels and plans, compiled for each backend."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.backends import triton_backends
from syncopate_jax.compiler import bound_shapes
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import InputError, PlanError, UnsupportedError
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.options import Launch
from syncopate_jax.pallas_kernels.contraction_mosaic_gpu import contraction
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig
from syncopate_jax.passes.expand_collectives import expand_collectives
from syncopate_jax.plans.all_gather_swizzle import all_gather_swizzle
from syncopate_jax.plans.broadcast import broadcast
from syncopate_jax.plans.collective import collective
from syncopate_jax.registry import backends, templates
from syncopate_jax.runtime import device
from tests.backends import own_kernels
from tests.check.small_plans import with_column
from tests.ops import cases

P = jax.P
CONFIG = MatmulConfig(tile_m=128, tile_n=128, tile_k=64)
each_backend = pytest.mark.parametrize("backend", ["xla", "remote_dma"])


def refused(text: str, error: type[Exception] = InputError) -> Any:
    return pytest.raises(error, match=re.escape(text))


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


def run(operator: Any, ranks: int, in_specs: Any, out_specs: Any, *arrays: jax.Array) -> Any:
    fn = jax.shard_map(
        lambda *local: operator(*local)[0],
        mesh=cases.ranks_mesh(ranks),
        in_specs=in_specs,
        out_specs=out_specs,
    )
    return jax.jit(fn)(*arrays)


@each_backend
def test_a_row_scaling_kernel(backend: str) -> None:
    """Its rows are cut raggedly: five a rank, under tiles of two that straddle the ranks."""
    plan = own_kernels.gather_plan(3, t=(15, 4))
    operator = fuse(own_kernels.scale(15, 4), plan, {"t": "x"}, axis_name="t", backend=backend)
    x, s = random(15, 4), random(15, 1)
    y = run(operator, 3, (P("t"), P()), P("t"), x, s)
    np.testing.assert_allclose(y, np.tile(x * s, (3, 1)), rtol=1e-6)


@pytest.mark.parametrize("produced", [False, True])
def test_a_last_rank_with_less_than_the_others(produced: bool) -> None:
    """Rank 1 has 2 rows in arrays of 4."""
    plan = all_gather_swizzle(2, (6, 4), dtype="float32", shards=(4, 2), produced=produced)
    kernel = own_kernels.scale(4 if produced else 6, 4)
    bound = {"x": "out" if produced else "x"}
    operator = fuse(kernel, plan, bound, axis_name="t", backend="xla")
    x = random(8, 4)
    y = run(operator, 2, (P("t"), P()), P("t"), x, jnp.full((kernel.out_shape[0].shape[0], 1), 2.0))
    np.testing.assert_array_equal(y, np.tile(2 * x[:6], (2, 1)))


def test_operands_that_tiles_take_whole() -> None:
    def body(x: jax.Ref, a: jax.Ref, b: jax.Ref, c: jax.Ref, out: jax.Ref) -> None:
        out[...] = x[...] + a[...] * b[...]
        pltpu.sync_copy(c, out.at[pl.ds(0, 1)])

    rows, given = pl.BlockSpec((2, 4), lambda i: (i, 0)), jax.ShapeDtypeStruct((4, 4), "float32")
    whole = pl.BlockSpec(), pl.BlockSpec((1, 4), None), pl.BlockSpec(memory_space=pl.ANY)
    kernel = PallasKernel(body, 2, ("x", "a", "b", "c"), ("out",), (rows, *whole), rows, given)
    plan = own_kernels.gather_plan(2, t=(4, 4))
    operator = fuse(kernel, plan, {"t": "x"}, axis_name="t", backend="remote_dma")
    x, (a, b, c) = random(4, 4), random(3, 1, 4)
    y = run(operator, 2, (P("t"), P(), P(), P()), P("t"), x, a, b, c)
    wanted = (x + a * b).at[::2].set(c)
    np.testing.assert_allclose(y, np.tile(wanted, (2, 1)), rtol=1e-6)


@each_backend
def test_attention_that_walks_gathered_keys_and_values(backend: str) -> None:
    ranks, keys, width = 3, 12, 4
    plan = own_kernels.gather_plan(ranks, k=(keys, width), v=(keys, width))
    kernel = own_kernels.attention(4, keys, width, tile_q=2, tile_k=2)
    operator = fuse(kernel, plan, {"k": "k", "v": "v"}, axis_name="t", backend=backend, split=2)
    q, k, v = random(4 * ranks, width), random(keys, width), random(keys, width) + 1
    y = run(operator, ranks, (P("t"), P("t"), P("t")), P("t"), q, k, v)
    scores = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    wanted = weights / weights.sum(axis=1, keepdims=True) @ np.asarray(v, np.float64)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_a_running_average_of_chunks_as_they_arrive() -> None:
    """What is kept depends on the order of the blocks, which the plan changes: it is refused."""

    def body(x: jax.Ref, y: jax.Ref) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            y[...] = jnp.zeros_like(y)

        y[...] = y[...] * 0.5 + x[...] * 0.5

    block, given = pl.BlockSpec((2, 4), lambda k: (k, 0)), jax.ShapeDtypeStruct((2, 4), "float32")
    whole = pl.BlockSpec((2, 4), lambda k: (0, 0))
    kernel = PallasKernel(body, 4, ("x",), ("y",), block, whole, given, name="averages")
    plan = own_kernels.gather_plan(2, t=(8, 4))
    refusal = "kernel averages: on random blocks (normal) y[0, 0] is "
    with refused(refusal, UnsupportedError):
        fuse(kernel, plan, {"t": "x"}, axis_name="t", backend="remote_dma")
    operator = fuse(kernel, plan, {"t": "x"}, axis_name="t")
    assert operator.backend.name == "xla" and refusal in repr(operator)
    x = random(8, 4)
    y = run(operator, 2, P("t"), P("t"), x)
    wanted = sum(x[2 * k : 2 * k + 2] * 0.5 ** (4 - k) for k in range(4))
    np.testing.assert_allclose(y, np.tile(wanted, (2, 1)), rtol=1e-5)


def test_the_first_product_is_stored_and_others_added() -> None:
    def body(x: jax.Ref, w: jax.Ref, y: jax.Ref) -> None:
        part = jnp.dot(x[...].T, w[...], precision="highest")

        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            y[...] = part

        @pl.when(pl.program_id(0) > 0)
        def _() -> None:
            y[...] += part

    block = pl.BlockSpec((2, 4), lambda k: (k, 0))
    whole, given = pl.BlockSpec((4, 4), lambda k: (0, 0)), jax.ShapeDtypeStruct((4, 4), "float32")
    kernel = PallasKernel(body, 4, ("x", "w"), ("y",), [block, block], whole, given)
    plan = own_kernels.gather_plan(2, t=(8, 4))
    operator = fuse(kernel, plan, {"t": "x"}, axis_name="t", backend="remote_dma")
    x, w = random(8, 4), random(8, 4) + 1
    y = run(operator, 2, (P("t"), P()), P("t"), x, w)
    np.testing.assert_allclose(y, np.tile(x.T @ w, (2, 1)), rtol=1e-5, atol=1e-5)


@each_backend
@pytest.mark.slow
def test_a_gathered_operand_and_a_scattered_result(backend: str) -> None:
    ranks, rows = 2, 4
    plan = own_kernels.gather_and_scatter_plan(ranks, (rows, 3), (rows, 6))
    kernel = own_kernels.product(rows, 3, 6, 2, has_addend=True)
    operator = fuse(kernel, plan, {"x": "x", "y": "out"}, axis_name="t", backend=backend)
    assert operator.operand_shapes() == {"x": (2, 3)}
    x, w = random(rows, 3), random(3 * ranks, 6)
    y = run(operator, ranks, (P("t"), P("t")), P("t"), x, w)
    wanted = sum(np.asarray(x) @ np.asarray(w[3 * r : 3 * r + 3]) for r in range(ranks))
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_no_backend_can_move_partial_results_into_a_kernel_without_an_addend() -> None:
    plan = own_kernels.gather_and_scatter_plan(2, (4, 3), (4, 6))
    kernel = own_kernels.product(4, 3, 6, 2, has_addend=False)
    with refused(
        "no backend can fuse plan gather_and_scatter with kernel product for target tpu:\n"
        "  remote_dma: plan gather_and_scatter adds partial results in the epilogue, "
        "but kernel product takes no addend; give it has_addend=True",
        UnsupportedError,
    ):
        fuse(kernel, plan, {"x": "x", "y": "out"}, axis_name="t", backend="remote_dma")


def test_auto_takes_a_backend_that_can() -> None:
    plan = own_kernels.gather_and_scatter_plan(2, (4, 3), (4, 6))
    kernel = own_kernels.product(4, 3, 6, 2, has_addend=False)
    bound = {"x": "x", "y": "out"}
    unfused = fuse(kernel, plan, bound, axis_name="t")
    assert unfused.backend.name == "xla"
    assert list(unfused.passed_over) == ["remote_dma"]
    assert "target tpu\n  not remote_dma: plan gather_and_scatter adds" in repr(unfused)
    adding = own_kernels.product(4, 3, 6, 2, has_addend=True)
    fused = fuse(adding, plan, bound, axis_name="t")
    assert (fused.backend.name, fused.passed_over) == ("remote_dma", {})
    given = {"target": "mosaic_gpu", "launch": Launch(sms=8)}
    unfused = fuse(kernel, plan, bound, axis_name="t", **given)
    assert unfused.backend.name == "xla"
    assert "has no loop body" in unfused.passed_over["tma_dedicated"]


@pytest.mark.parametrize(
    "template,operand,fastest",
    [
        ("all_gather_ring", "lhs", "tma_dedicated"),
        ("reduce_scatter_direct", "out", "tma_colocated"),
    ],
)
def test_auto_asks_the_fastest_kind_first(template: str, operand: str, fastest: str) -> None:
    """Both can be done by loads and stores too, whose names come before."""
    dims = ("Gmk", "kn", "Gmn") if operand == "lhs" else ("mk", "kn", "Smn")
    sizes = {"G": 3, "S": 3, "m": 128, "k": 64, "n": 128}
    kernel = contraction(*dims, sizes, config=CONFIG, dtype="bfloat16", out_dtype="bfloat16")
    plan = templates.get(template)(3, (3, 128, 64 if operand == "lhs" else 128), axis=0)
    given = {"axis_name": "t", "target": "mosaic_gpu", "launch": Launch(sms=12)}
    for backend, name in (("auto", fastest), (slower := fastest.replace("tma", "ldst"), slower)):
        found = fuse(kernel, plan, {plan.tensors[0].name: operand}, backend=backend, **given)
        assert found.backend.name == name


@pytest.mark.parametrize("target", ["mosaic_gpu", "triton"])
def test_auto_without_a_gpu_takes_xla(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of the target that is asked for by name says what to give."""
    monkeypatch.setattr(device, "core_count", lambda: None)
    kernel, plan = own_kernels.scale(4, 4), own_kernels.gather_plan(2, t=(4, 4))
    given = {"axis_name": "t", "target": target}
    operator = fuse(kernel, plan, {"t": "x"}, **given)
    assert operator.backend.name == "xla"
    absent = triton_backends.missing(backends.get("copy_engine"), target)
    none = absent or "launch: there is no GPU whose multiprocessors could be counted; on CPUs"
    assert operator.passed_over["copy_engine"].startswith(none)
    x, s = random(4, 4), random(4, 1)
    y = run(operator, 2, (P("t"), P()), P("t"), x, s)
    np.testing.assert_allclose(y, np.tile(x * s, (2, 1)), rtol=1e-6)
    if not absent:
        with refused(none):
            fuse(kernel, plan, {"t": "x"}, backend="copy_engine", **given)


def test_names_that_are_not_known() -> None:
    kernel, plan = own_kernels.scale(4, 4), own_kernels.gather_plan(2, t=(4, 4))
    with refused("no backend is called 'pigeon'; known: "):
        fuse(kernel, plan, {"t": "x"}, axis_name="t", backend="pigeon")
    for backend in ("auto", "xla", "remote_dma"):
        with refused("compile: target 'fpga' is not one of tpu, mosaic_gpu, triton"):
            fuse(kernel, plan, {"t": "x"}, axis_name="t", backend=backend, target="fpga")
    with refused("plan own_gather: no tensor 'u'; its tensors are ['t']"):
        fuse(kernel, plan, {"u": "x"}, axis_name="t")
    text = "is bound to operand 'y'; kernel scale has operands x, s and results out"
    with refused(f"axis map: tensor t {text}"):
        fuse(kernel, plan, {"t": "y"}, axis_name="t")
    with refused("compile: order needs one of natural, grouped, snake, found 'random'"):
        fuse(kernel, plan, {"t": "x"}, axis_name="t", order="random")
    for wrong in ((), ["t", "t"], 3):
        with refused(f"compile: axis_name must be a mesh axis name or a tuple of different ones, "
                     f"found {wrong!r}"):  # fmt: skip
            fuse(kernel, plan, {"t": "x"}, axis_name=wrong)


def test_a_plan_of_another_shape_than_the_kernel() -> None:
    """The kernel's user sees blocks of a shape that is the plan's."""
    plan = own_kernels.gather_plan(2, t=(4, 4))
    with refused("of shape (4, 4), as plan own_gather has it, are numbered from 0 to (1, 0); 2 of"):
        fuse(own_kernels.scale(8, 4), plan, {"t": "x"}, axis_name="t")
    with refused("blocks of x have 2 dimensions, its shape is (4, 4, 1), as plan own_gather has"):
        fuse(
            own_kernels.scale(4, 4),
            own_kernels.gather_plan(2, t=(4, 4, 1)),
            {"t": "x"},
            axis_name="t",
        )


@pytest.mark.parametrize("columns", [3, 5, 8])
def test_a_plan_of_another_width_than_the_kernel(columns: int) -> None:
    """A contraction of 4 columns: with fewer the result is undefined, of more none is read."""
    plan = own_kernels.gather_plan(2, t=(4, columns))
    kernel = own_kernels.product(4, 4, 2, 2, has_addend=False)
    fault = "tiles would compute with what lies beyond it" if columns < 4 else "no tile reads the"
    with refused(
        f"product: blocks (2, 4) of x on grid (2,) reach to (4, 4), its shape is (4, {columns}), "
        f"as plan own_gather has it: along dimension 1 {fault}"
    ):
        fuse(kernel, plan, {"t": "x"}, axis_name="t")


def test_a_plan_of_more_rows_than_the_kernel() -> None:
    with refused("reach to (4, 4), its shape is (6, 4), as plan own_gather has it: along dimension "
                 "0 no tile reads the rest; make the two agree"):  # fmt: skip
        fuse(
            own_kernels.scale(4, 4), own_kernels.gather_plan(2, t=(6, 4)), {"t": "x"}, axis_name="t"
        )


@each_backend
def test_an_operand_that_ends_inside_a_block(backend: str) -> None:
    plan = own_kernels.gather_plan(2, t=(4, 4))
    kernel = own_kernels.product(4, 4, 2, 2, has_addend=False)
    operator = fuse(kernel, plan, {"t": "x"}, axis_name="t", backend=backend)
    with refused("product: blocks (4, 2) of w on grid (2,) reach to (4, 2), its shape is (3, 2): "
                 "along dimension 0 tiles would compute with what lies beyond it"):  # fmt: skip
        run(operator, 2, (P("t"), P()), P("t"), random(4, 4), random(3, 2))


def test_arguments_of_other_kinds() -> None:
    plan, kernel = own_kernels.gather_plan(2, t=(4, 4)), own_kernels.scale(4, 4)
    with refused("compile: kernel needs a PallasKernel, found None"):
        fuse(None, plan, {"t": "x"}, axis_name="t")
    with refused("compile: plan needs a Plan, found 'all_gather_ring'; syncopate_jax.templates."):
        fuse(kernel, "all_gather_ring", {"t": "x"}, axis_name="t")
    for name, needed in (("launch", "Launch"), ("backend", "str"), ("target", "str")):
        for value in (3, ["xla"], np.ones(2)):
            with refused(f"compile: {name} needs a {needed}, found {value!r}"):
                fuse(kernel, plan, {"t": "x"}, axis_name="t", **{name: value})
    for value in (3, ["natural"], np.ones(2)):
        with refused(f"compile: order needs one of natural, grouped, snake, found {value!r}"):
            fuse(kernel, plan, {"t": "x"}, axis_name="t", order=value)
    for name in ("split", "split_axis"):
        for value in (None, 1.5, "1", [1], True):
            with refused(f"compile: {name} must be an integer, found {value!r}"):
                fuse(kernel, plan, {"t": "x"}, axis_name="t", **{name: value})
    with refused("compile: split must be in 1..2147483647, found 0"):
        fuse(kernel, plan, {"t": "x"}, axis_name="t", split=0)
    with refused("compile: split_axis must be in 0..2147483647, found -1"):
        fuse(kernel, plan, {"t": "x"}, axis_name="t", split=2, split_axis=-1)
    for wrong in (
        None, {"t": 3}, {"t": ("x", 1)}, {"t": ("x", (0,), 1)}, {"t": ("x", ("a", 0))},
        {"t": ("x", (0.0, 1.0))}, {3: "x"}, {"t": (3, (0, 1))},
    ):  # fmt: skip
        with refused(
            "axis map: needs {tensor: operand} or {tensor: (operand, dimensions)}, "
            f"found {wrong!r}"
        ):
            fuse(kernel, plan, wrong, axis_name="t")


@each_backend
def test_operands_that_blocks_do_not_fit(backend: str) -> None:
    """The operand of the plan is checked against the plan, another one against its blocks."""
    plan = own_kernels.gather_plan(2, t=(4, 4))
    operator = fuse(own_kernels.scale(4, 4), plan, {"t": "x"}, axis_name="t", backend=backend)
    with refused("the index map of s gives block (1, 0), but blocks (2, 1) of shape (2, 1)"):
        run(operator, 2, (P("t"), P()), P("t"), random(4, 4), random(2, 1))
    with refused("blocks of s have 2 dimensions, its shape is (4,)"):
        run(operator, 2, (P("t"), P()), P("t"), random(4, 4), random(4))


def test_a_tensor_that_is_bound_to_nothing() -> None:
    kernel, plan = own_kernels.scale(4, 4), own_kernels.gather_plan(2, x=(4, 4))
    with refused(
        "plan own_gather: rank 0 starts with x[0:2,0:4], but the axis map binds x to no operand or "
        "result that could hold it; bind it, as in {'x': operand}, since nothing is bound by equal "
        "names, or use a plan that starts from what the kernel reads or writes"
    ):
        fuse(kernel, plan, {}, axis_name="t")


@pytest.mark.parametrize("template", ["all_to_all_blocks", "hierarchical_all_to_all", "collective"])
def test_goals_in_a_tensor_that_no_tile_reads(template: str) -> None:
    """Tiles would read what the rank itself had, and nothing be exchanged."""
    options = {"kind": "all_to_all"} if template == "collective" else {}
    make = functools.partial(templates.get(template), 2, (4, 4), dtype="float32", **options)
    plan, kernel = make(), own_kernels.product(4, 4, 4, 2, has_addend=True)
    advice = (
        "; use a plan that ends in send itself, or one in which tiles produce send, as templates "
        "make with produced=True, and bind that to a result"
    )
    for bound, operand in (({"send": "x"}, "x"), ({"send": "w", "recv": "x"}, "w")):
        with refused(
            f"plan {plan.name}: rank 0 ends with recv{plan.goals[0].box}, made of send, which the "
            f"axis map binds to {operand!r}: no tile would read it there and no result have it"
            f"{advice}"
        ):
            fuse(kernel, plan, bound, axis_name="t")
    with refused(f"binds send to no operand or result that could hold it{advice}"):
        fuse(kernel, plan, {"recv": "x"}, axis_name="t")
    with refused("hold it; bind it, as in {'send': result}, since nothing is bound by equal"):
        fuse(kernel, make(produced=True), {"recv": "x"}, axis_name="t")
    assert fuse(kernel, make(produced=True), {"send": "out"}, axis_name="t").result_types()


def test_two_tensors_for_one_operand() -> None:
    kernel, plan = own_kernels.scale(4, 4), own_kernels.gather_plan(2, t=(4, 4), u=(4, 4))
    with refused("axis map: 2 tensors are bound to operand 'x'; it can be one"):
        fuse(kernel, plan, {"t": "x", "u": "x"}, axis_name="t")


def test_dimensions_that_do_not_fit() -> None:
    kernel, plan = own_kernels.scale(4, 4), own_kernels.gather_plan(2, t=(4, 4))
    with refused("axis map: dims (0, 0) of tensor t (4, 4) must name each of its 2 dimensions"):
        fuse(kernel, plan, {"t": ("x", (0, 0))}, axis_name="t")
    with refused("axis map: dims (0,) of tensor t (4, 4) must name each of its 2"):
        fuse(kernel, plan, {"t": ("x", (0,))}, axis_name="t")


def test_results_of_another_number_of_dimensions() -> None:
    plan = own_kernels.gather_and_scatter_plan(2, (4, 3), (4, 6))
    kernel = own_kernels.scale(4, 6)
    kernel = dataclasses.replace(
        kernel,
        out_specs=(pl.BlockSpec((1, 2, 6), lambda i: (0, i, 0)),),
        out_shape=(jax.ShapeDtypeStruct((1, 4, 6), "float32"),),
    )
    with refused(
        "dims (0, 1) of tensor y (4, 6) must name each of the 3 dimensions of operand out"
    ):
        fuse(kernel, plan, {"y": "out"}, axis_name="t")


@pytest.mark.parametrize("backend", ["remote_dma", "xla"])
def test_a_transposed_binding_is_refused(backend: str) -> None:
    kernel, plan = own_kernels.scale(4, 4), own_kernels.gather_plan(2, t=(4, 4))
    words = f"{backend}: tensor t is bound with dims (1, 0); a copy keeps the order of dimensions"
    with refused(words, UnsupportedError):
        fuse(kernel, plan, {"t": ("x", (1, 0))}, axis_name="t", backend=backend)


def test_results_of_another_type_than_the_plan() -> None:
    plan = own_kernels.gather_and_scatter_plan(2, (4, 3), (4, 6))
    kernel = own_kernels.product(4, 3, 6, 2, has_addend=True)
    half = jax.ShapeDtypeStruct((4, 6), jnp.bfloat16)
    kernel = dataclasses.replace(kernel, out_shape=(half,))
    with refused(
        "plan gather_and_scatter: tensor y is float32, but result out of kernel product is "
        "bfloat16; make the plan with dtype='bfloat16'"
    ):
        fuse(kernel, plan, {"x": "x", "y": "out"}, axis_name="t")


def test_a_result_of_another_shape_than_tiles_produce_for_the_plan() -> None:
    """The kernel would write outside of the buffer that the plan gives it."""
    gathered = functools.partial(all_gather_swizzle, 2, dtype="float32", produced=True)
    for plan, tensor, produced in (
        (gathered((8, 4)), "x", "(4, 4)"),  # a rank's shard, not the tensor
        (gathered((32, 4)), "x", "(16, 4)"),
        (own_kernels.gather_and_scatter_plan(2, (4, 3), (4, 4)), "y", "(4, 4)"),
    ):
        wanted = (
            f"of tensor {tensor} {plan.tensor(tensor).shape} the tiles of a rank produce "
            f"{produced}, but result out of kernel scale is (8, 4); make the plan such that the "
            f"tiles of a rank produce (8, 4), or bind another tensor"
        )
        for backend in ("xla", "remote_dma"):
            with refused(wanted):
                fuse(own_kernels.scale(8, 4), plan, {tensor: "out"}, axis_name="t", backend=backend)
    fused = fuse(own_kernels.scale(8, 4), gathered((16, 4)), {"x": "out"}, axis_name="t")
    assert [out.shape for out in fused.result_types()] == [(16, 4)]
    uneven = gathered((12, 4), shards=(8, 4))
    assert fuse(own_kernels.scale(8, 4), uneven, {"x": "out"}, axis_name="t").result_types()


def test_a_result_bound_to_a_tensor_that_ranks_start_with() -> None:
    """Nothing would bring the kernel's tiles into it."""
    for plan in (
        all_gather_swizzle(2, (8, 4), dtype="float32"),
        broadcast(2, (8, 4), dtype="float32"),
    ):
        with refused(
            f"plan {plan.name}: rank 0 starts with x{plan.initial[0].box}, but the axis map binds "
            f"x to result out of kernel scale, which could not hold it; bind it to an operand, or "
            f"use a plan in which tiles produce x"
        ):
            fuse(own_kernels.scale(8, 4), plan, {"x": "out"}, axis_name="t")


def test_a_plan_that_does_not_verify() -> None:
    plan = own_kernels.gather_plan(2, t=(4, 4))
    broken = with_column(plan, "dst_rank", 0, 7)
    with pytest.raises(PlanError, match=r"own_gather: .* finding"):
        fuse(own_kernels.scale(4, 4), broken, {"t": "x"}, axis_name="t")


def test_shapes_around_all_goals_of_a_rank() -> None:
    """An all-to-all leaves several boxes on a rank; the kernel's operand holds them all."""
    plan = expand_collectives(collective(2, (12, 6), kind="all_to_all", dtype="float32"))
    tensor = plan.goals[0].tensor
    boxes = [goal.box for goal in plan.goals if goal.rank == 0]
    assert len(boxes) > 1
    shapes = bound_shapes(plan, AxisMap.of({tensor: "x"}), own_kernels.scale(12, 6))
    assert shapes == {"x": (12, max(box.hi[1] for box in boxes))}


def test_templates_are_plans_like_others() -> None:
    plan = all_gather_swizzle(2, (4, 4), dtype="float32")
    operator = fuse(own_kernels.scale(4, 4), plan, {"x": "x"}, axis_name="t")
    assert operator.backend.name == "remote_dma"
