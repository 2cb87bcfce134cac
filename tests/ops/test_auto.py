"""``backend="auto"`` on a GPU: what was measured there, and XLA where that does not apply."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from syncopate_jax.ops import fused
from syncopate_jax.runtime import device
from syncopate_jax.tune import measured
from syncopate_jax.tune.measured import Choice, Problem
from tests.ops.cases import BY_NAME, ranks_mesh, sharded

KNOWN = Problem("bmk,kn", "reduce_scatter", "out", "", "m", 2, 512, 128, 256)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host that lowers for a GPU on which one problem was measured."""
    monkeypatch.setattr(device, "kind", lambda: "known")
    monkeypatch.setattr(device, "core_count", lambda: 132)
    entries = ((KNOWN, Choice("tma_colocated")),)
    monkeypatch.setattr(measured, "_entries", lambda kind: entries if kind == "known" else ())
    return monkeypatch


def lowered(
    dtype: Any = jnp.bfloat16, m: int = 512, ranks: int = 2, mesh: Any = None, **options: Any
) -> str:
    fn = sharded(BY_NAME["scatter_m"], mesh or ranks_mesh(ranks), **options)
    shapes = (1, m, 128 * ranks), (128 * ranks, 256)
    args = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def is_fused(text: str) -> bool:
    assert ("mosaic_gpu_v2" in text) != ("stablehlo.reduce_scatter" in text)
    return "mosaic_gpu_v2" in text


def test_a_measured_problem_is_fused(gpu: pytest.MonkeyPatch) -> None:
    assert is_fused(lowered())


@pytest.mark.parametrize(
    "change", [{"dtype": jnp.float32}, {"m": 2048}, {"ranks": 4}, {"split": 1}], ids=str
)
def test_what_was_not_measured_is_left_to_xla(gpu: pytest.MonkeyPatch, change: dict) -> None:
    assert not is_fused(lowered(**change))


def test_axes_left_to_the_compiler_are_left_to_xla(gpu: pytest.MonkeyPatch) -> None:
    """A launch would span them too."""
    mesh = jax.make_mesh((2, 2), ("d", "t"), (AxisType.Auto,) * 2)
    assert not is_fused(lowered(mesh=mesh, manual=frozenset({"t"})))


def test_a_choice_that_cannot_run_here_is_left_to_xla(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(measured, "_entries", lambda kind: ((KNOWN, Choice("copy_engine")),))
    assert not is_fused(lowered())


def test_without_a_gpu_it_is_xla() -> None:
    assert device.kind() is None
    assert fused.FREE.backend == "auto"
    assert not is_fused(lowered())
