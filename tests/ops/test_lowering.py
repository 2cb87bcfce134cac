"""What a TPU gets: one kernel an operator, and no rearranged weights that fusion brought in."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ops import all_gather_matmul, matmul_reduce_scatter
from syncopate_jax.registry import operators
from tests.ops import cases
from tests.ops.cases import BY_NAME, CASES, Case

each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
MOVES = ("transpose", "copy", "gather", "concatenate", "pad")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "collective_permute")
ARGUMENTS = cases.operands(1, 512, 512, 512, "bfloat16")


def lowered(fn: Any, *args: Any) -> Counter[str]:
    """How often each operation occurs in the program for a TPU."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    found = Counter(re.findall(r"stablehlo\.(\w+)", text))
    found["tpu_custom_call"] = len(re.findall(r"custom_call @tpu_custom_call", text))
    return found


def with_gradients(fn: Any) -> Any:
    def run(x: jax.Array, w: jax.Array, ct: jax.Array) -> Any:
        y, transpose = jax.vjp(fn, x, w)
        return y, *transpose(ct)

    return run


@each_case
def test_one_kernel_and_no_rearrangement(case: Case) -> None:
    mesh = cases.ranks_mesh(2)
    unfused, fused = (
        lowered(cases.sharded(case, mesh, backend=backend), *ARGUMENTS[:2])
        for backend in ("xla", "remote_dma")
    )
    assert fused["tpu_custom_call"] == 1
    assert not any(fused[name] for name in COLLECTIVES)
    assert {name: fused[name] for name in MOVES if fused[name] > unfused[name]} == {}


@each_case
@pytest.mark.parametrize(
    ("m", "k", "n", "ranks"),
    [
        (8192, 14336, 4096, 8),  # Llama-3-8B's down projection: 1792 of k a rank
        pytest.param(8192, 4096, 28672, 8, marks=pytest.mark.slow),
        pytest.param(200, 256, 512, 2, marks=pytest.mark.slow),
    ],
)
def test_sizes_of_models(case: Case, m: int, k: int, n: int, ranks: int) -> None:
    fn = cases.sharded(case, cases.ranks_mesh(ranks), backend="remote_dma")
    given = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((1, m, k), (k, n))]
    assert lowered(fn, *given)["tpu_custom_call"] == 1


def test_blocks_that_no_register_of_a_tpu_holds() -> None:
    fn = cases.sharded(cases.BY_NAME["gather_w_k"], cases.ranks_mesh(2), backend="remote_dma")
    given = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((1, 512, 576), (576, 512))]
    with pytest.raises(UnsupportedError, match=r"blocks \(1, 256, 288\) of lhs \[1, 256, 576\]"):
        lowered(fn, *given)


@each_case
def test_gradients_are_kernels_too(case: Case) -> None:
    mesh = cases.ranks_mesh(2)
    unfused, fused = (
        lowered(with_gradients(cases.sharded(case, mesh, backend=backend)), *ARGUMENTS)
        for backend in ("xla", "remote_dma")
    )
    sums = operators.get(case.operator.__name__).kind == "all_reduce"
    assert fused["tpu_custom_call"] == (1 if sums else 3)  # gradients of a sum exchange nothing
    assert fused["all_reduce"] == unfused["all_reduce"] - sums
    assert not any(fused[name] for name in COLLECTIVES if name != "all_reduce")
    assert {name: fused[name] for name in MOVES if fused[name] > unfused[name]} == {}


def layer(backend: str) -> Any:
    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = all_gather_matmul(x, up, axis_name="t", backend=backend)
        return x + matmul_reduce_scatter(jax.nn.gelu(hidden), down, axis_name="t", backend=backend)

    return jax.shard_map(
        local,
        mesh=cases.ranks_mesh(4),
        in_specs=(jax.P("t"), jax.P(None, "t"), jax.P("t")),
        out_specs=jax.P("t"),
    )


def test_a_layer_has_one_kernel_an_operator() -> None:
    shapes = [(512, 256), (256, 512), (512, 256)]
    arguments = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    assert lowered(layer("remote_dma"), *arguments)["tpu_custom_call"] == 2

    def gradients(fn: Any) -> Any:
        return jax.grad(lambda *args: fn(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2))

    backward = lowered(gradients(layer("remote_dma")), *arguments)
    unfused = lowered(gradients(layer("xla")), *arguments)
    assert backward["tpu_custom_call"] == 5  # the result of the last product is not needed
    assert {name: backward[name] for name in MOVES if backward[name] > unfused[name]} == {}


def test_a_replicated_weight_is_reduced_as_often_as_without_the_operator() -> None:
    """One sum of the weight's gradient over the ranks, not one more for the kernel."""
    mesh = cases.ranks_mesh(4)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.all_to_all(x, "t", split_axis=1, concat_axis=2, tiled=True) @ w

    case = BY_NAME["to_rows"]
    specs = (cases.spec(case.x, 3, "t"), cases.spec(case.w, 2, "t"))
    by_hand = jax.shard_map(
        plain, mesh=mesh, in_specs=specs, out_specs=cases.spec(case.out, 3, "t")
    )
    wanted = lowered(with_gradients(by_hand), *ARGUMENTS)["all_reduce"]
    assert wanted == 1
    for backend in ("xla", "remote_dma"):
        fn = with_gradients(cases.sharded(case, mesh, backend=backend))
        assert lowered(fn, *ARGUMENTS)["all_reduce"] == wanted
