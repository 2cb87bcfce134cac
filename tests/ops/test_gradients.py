"""Gradients of results wider than their operands: a cotangent is not rounded, on any backend."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from syncopate_jax.ops import all_gather_matmul, gradients, matmul
from syncopate_jax.options import Launch, Options
from syncopate_jax.runtime.folded import fold
from tests.ops import cases
from tests.ops.cases import BY_NAME, CASES, Case

TRITON = ("ldst_dedicated", "triton")
MOSAIC = ("tma_dedicated", "ldst_dedicated", "tma_colocated")
ON_HOPPER: dict[str, Any] = {"target": "mosaic_gpu", "launch": Launch(sms=132)}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])


def check(fns: dict[str, Callable[..., jax.Array]], arrays: Any, given: Any = None) -> None:
    """Both gradients of each are those in float64, in one program of ``given``, ``arrays`` placed.

    One for each by name, or for all.
    """

    @jax.jit
    def run(given: dict[str, Any]) -> dict[str, Any]:
        return {name: jax.vjp(fn, *given[name][:2])[1](given[name][2]) for name, fn in fns.items()}

    x, w, ct = arrays
    found = run(given or dict.fromkeys(fns, arrays))
    for name in fns:
        for one, operand, wanted in zip(
            found[name], (x, w), cases.exact(x, w, ct)[1:], strict=True
        ):
            assert one.dtype == operand.dtype
            # The result is rounded once, and once more where ranks add their shares.
            one = np.asarray(one, np.float64)
            assert cases.error(one, wanted.reshape(one.shape)) < 2.0**-7, name


def on_ranks(case: Case, backend: str, **options: Any) -> Callable[..., jax.Array]:
    mesh = cases.ranks_mesh(2)
    return cases.sharded(case, mesh, backend=backend, preferred_element_type=jnp.float32, **options)


@each_dtype
def test_operators(dtype: str) -> None:
    fns = {case.name: on_ranks(case, "xla") for case in CASES}
    check(fns, cases.cancelling(8, 4, 8, dtype))


@pytest.mark.slow
@each_case
def test_fused_operators_of_float32(case: Case) -> None:
    """A kernel that multiplies float32 gets the cotangent as it is."""
    check({case.name: on_ranks(case, "remote_dma")}, cases.cancelling(4, 2, 4, "bfloat16"))


@pytest.mark.parametrize("names", [("gather_x_m", "scatter_m"), slow(BY_NAME)], ids=len)
def test_kernels_of_tensor_cores(names: Any) -> None:
    """Their gradients are computed by ``xla``, on the CPU too."""
    fns = {name: on_ranks(BY_NAME[name], "tma_dedicated", **ON_HOPPER) for name in names}
    check(fns, cases.cancelling(256, 128, 256, "bfloat16"))


def lowered_dots(fn: Callable[..., Any], arrays: Any) -> list[tuple[str, str]]:
    """Dtypes of the operands of each dot in the program for a GPU, which has one fused kernel."""
    text = jax.jit(fn).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu_v2", text)) == 1
    return re.findall(r"dot_general.* : \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>\)", text)


def with_gradients(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(x: jax.Array, w: jax.Array, ct: jax.Array) -> Any:
        y, transpose = jax.vjp(fn, x, w)
        return y, transpose(ct)

    return run


@pytest.mark.parametrize("backend", ["tma_dedicated", *map(slow, MOSAIC[1:])])
@pytest.mark.parametrize("name", ["gather_x_m", slow("scatter_m"), slow("to_rows")])
def test_programs_for_gpus(name: str, backend: str) -> None:
    """One kernel computes the value; the gradients are products of float32."""
    fn = on_ranks(BY_NAME[name], backend, **ON_HOPPER)
    arrays = cases.cancelling(512, 256, 512, "bfloat16")
    assert lowered_dots(with_gradients(fn), arrays) == [("f32", "f32")] * 2


@pytest.mark.slow
def test_folded_ranks() -> None:
    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        given = {"backend": "tma_dedicated", "preferred_element_type": jnp.float32, **ON_HOPPER}
        return all_gather_matmul(x, w, axis_name="ranks", **given)

    x, w, ct = cases.cancelling(512, 256, 512, "bfloat16")
    rows = [jnp.stack(jnp.split(a, 2, at)) for a, at in ((x, 1), (w, 1), (ct, 2))]
    assert lowered_dots(fold(with_gradients(local), "ranks"), rows) == [("f32", "f32")] * 2


@each_dtype
@pytest.mark.parametrize("gathered", ["x", "w"])
def test_with_what_was_gathered(gathered: str, dtype: str) -> None:
    by_x = gathered == "x"

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return all_gather_matmul(
            x, w, axis_name="t", gathered=gathered, dimension="m" if by_x else "n",
            return_gathered=True, preferred_element_type=jnp.float32, backend="xla",
        )[0]  # fmt: skip

    rows, columns = P(None, "t"), P(None, None, "t")
    fn = jax.shard_map(
        local, mesh=cases.ranks_mesh(2), in_specs=(rows, P(None, "t")),
        out_specs=columns if by_x else rows,
    )  # fmt: skip
    check({gathered: fn}, cases.cancelling(8, 4, 8, dtype))


@each_dtype
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_products_of_whole_arrays(kind: AxisType, dtype: str) -> None:
    mesh = cases.ranks_mesh(2, kind)
    x, w, ct = cases.cancelling(8, 4, 8, dtype)
    shardings = {
        "gather": (P("t"), P(None, "t"), P(None, "t")),
        "scatter": (P(None, "t"), P("t"), P("t")),
        "sum": (P(None, "t"), P("t"), P()),
    }

    def sharded(out: P) -> Callable[..., jax.Array]:
        return lambda x, w: matmul(x, w, out_sharding=out, preferred_element_type=jnp.float32)

    with jax.set_mesh(mesh):
        fns = {name: sharded(specs[2]) for name, specs in shardings.items()}
        placed = {
            name: [
                jax.device_put(a, NamedSharding(mesh, spec))
                for a, spec in zip((x[0], w, ct[0]), specs, strict=True)
            ]
            for name, specs in shardings.items()
        }
        check(fns, (x, w, ct), placed)


def test_what_is_said_of_dtypes() -> None:
    float32, bfloat16, float16 = (jnp.dtype(t) for t in ("float32", "bfloat16", "float16"))
    for backend, target in (("auto", None), ("xla", None), ("remote_dma", None), TRITON):
        options = Options(backend=backend, target=target)
        assert gradients.unfused(options, float32, bfloat16) is None
    options = Options(backend="tma_dedicated")
    assert gradients.unfused(options, bfloat16, bfloat16) is None
    assert gradients.unfused(options, float32, bfloat16) == (
        "xla computes them, as they multiply float32 by bfloat16 in float32, and the kernels of "
        "target mosaic_gpu multiply bfloat16 or float16"
    )
    assert "bfloat16 by float16 in float32" in str(gradients.unfused(options, bfloat16, float16))
