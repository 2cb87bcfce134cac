"""The loop kernel that ``docs/own_kernels.md`` writes out: right in every backend that takes it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import syncopate_jax
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.options import Launch
from tests.mosaic_interpreter.run import run_checked
from tests.mosaic_interpreter.versions import needs_known_jax
from tests.ops import cases
from tests.ops.test_stream_matmul import needs_compiler

PAGE = Path(__file__).parents[2] / "docs/own_kernels.md"
RANKS = 2
GATHER, SCATTER = "all_gather_swizzle", "reduce_scatter_direct"
BINDINGS = {GATHER: {"x": "x"}, SCATTER: {"y": "out"}}


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's program defines; JAX has its simulated devices already."""
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (text,) = (program for program in programs if "gated =" in program)
    text, settings = re.subn(r"^jax\.config\.update\(.*\n", "", text, flags=re.M)
    assert settings == 1
    names: dict[str, Any] = {}
    exec(text, names)
    return names


def fused(kernel: Any, template: str, backend: str) -> Any:
    shape = kernel.out_shape[0].shape
    shards = (32, shape[0] - 32)  # tiles end where they do
    plan = syncopate_jax.templates.get(template)(RANKS, shape, dtype="float32", shards=shards)
    given = {"target": "mosaic_gpu", "backend": backend, "launch": Launch(sms=5, communicating=1)}
    return syncopate_jax.compile(kernel, plan, BINDINGS[template], axis_name="t", **given)


@needs_known_jax
@pytest.mark.parametrize(
    ("template", "backend"),
    [
        *((GATHER, backend) for backend in ("tma_dedicated", "ldst_dedicated", "tma_colocated")),
        *((SCATTER, backend) for backend in ("tma_dedicated", "ldst_dedicated")),
        *((SCATTER, backend) for backend in ("tma_colocated", "ldst_colocated")),
    ],
)
def test_it_computes(page: dict[str, Any], template: str, backend: str) -> None:
    operator = fused(page["gated"], template, backend)
    x, gate = np.random.default_rng(0).standard_normal((2, 64, 256), np.float32)
    fn = jax.shard_map(
        lambda x, gate: operator(x, gate)[0],
        mesh=cases.ranks_mesh(RANKS),
        in_specs=(P("t") if template == GATHER else P(), P()),
        out_specs=P("t"),
    )
    found = run_checked(fn, x, gate)
    wanted = np.tile(x * gate, (RANKS, 1)) if template == GATHER else RANKS * x * gate
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@needs_compiler
@pytest.mark.parametrize("backend", ["auto", "copy_engine"])
def test_without_a_gpu_the_copies_come_before_the_ordinary_body(
    page: dict[str, Any], backend: str
) -> None:
    operator = fused(page["gated"], GATHER, backend)
    assert operator.backend.name == "copy_engine"
    x, gate = np.random.default_rng(0).standard_normal((2, 64, 256), np.float32)

    def run(operator: Any) -> jax.Array:
        specs = {"in_specs": (P("t"), P()), "out_specs": P("t")}
        fn = jax.shard_map(lambda *a: operator(*a)[0], mesh=cases.ranks_mesh(RANKS), **specs)
        return jax.jit(fn)(x, gate)

    np.testing.assert_array_equal(run(operator), np.tile(x * gate, (RANKS, 1)))
    halved = dataclasses.replace(page["gated"], reference=lambda x, gate: x * gate / 2)
    np.testing.assert_array_equal(
        run(fused(halved, GATHER, backend)), np.tile(x * gate / 2, (RANKS, 1))
    )
    bare = fused(dataclasses.replace(page["gated"], body=None), GATHER, backend)
    words = (
        "on the CPU copy_engine runs a kernel's plain-JAX reference or its ordinary Pallas body, "
        "and kernel gate_rows has neither; give it reference=, a function of the operands x, gate"
    )
    with pytest.raises(UnsupportedError, match=words):
        run(bare)


def test_partial_results_are_not_dropped(page: dict[str, Any]) -> None:
    kernel = dataclasses.replace(page["gated"], body=lambda *refs: None, has_addend=False)
    with pytest.raises(UnsupportedError, match=r"gate_rows takes no addend; give it has_addend="):
        fused(kernel, SCATTER, "tma_dedicated")
    assert fused(kernel, GATHER, "tma_dedicated").backend.name == "tma_dedicated"


@pytest.mark.parametrize("shape", [(64, 200), (40, 256)])
@pytest.mark.parametrize("template", [GATHER, SCATTER])
def test_blocks_end_where_operands_do(
    page: dict[str, Any], template: str, shape: tuple[int, int]
) -> None:
    """Its loads and stores are of whole blocks, and would reach beyond the end."""
    out = jax.ShapeDtypeStruct(shape, "float32")
    grid = (-(-shape[0] // 16), -(-shape[1] // 128))
    kernel = dataclasses.replace(page["gated"], grid=grid, out_shape=[out])
    words = f"gate_rows needs whole tiles of 16 x 128, out is {shape}"
    for backend in ("tma_dedicated", "ldst_dedicated", "tma_colocated"):
        with pytest.raises(UnsupportedError, match=re.escape(words)):
            fused(kernel, template, backend)
