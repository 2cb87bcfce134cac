"""What is prepared for every target, and which target that is."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from syncopate_jax.errors import InputError
from syncopate_jax.ops import fused
from syncopate_jax.ops.blocked import block
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Launch, Options
from syncopate_jax.registry import operators
from syncopate_jax.runtime import device

SCATTER = Contraction("bmk", "kn", "bmn", "reduce_scatter", "out", scatter="m")


@pytest.mark.parametrize(
    "template,held", [("reduce_scatter_ring", "float32"), ("reduce_scatter_direct", "bfloat16")]
)
@pytest.mark.parametrize("target", fused.TARGETS)
def test_sums_on_the_way_are_float32(target: str, template: str, held: str) -> None:
    if target == "triton":
        pytest.importorskip("triton")
    layout = block(SCATTER, (1, 512, 64), (64, 256), 4)
    options = Options(plan=template, target=target)
    _, kernel, plan = fused.prepare(
        "reduce_scatter", layout, "bfloat16", "bfloat16", options, target=target
    )
    assert {tensor.dtype for tensor in plan.tensors} == {held}
    assert [str(out.dtype) for out in kernel.out_shape] == [held]


def test_executors_are_counted_as_they_are_launched() -> None:
    def count(backend: str, target: str = "mosaic_gpu", **launch: Any) -> int:
        options = Options(backend=backend, launch=Launch(**launch))
        return fused.tile_executors(options, target, 4)

    assert count("tma_colocated") == count("auto") == 132  # of a GPU that is not here
    assert count("tma_colocated", sms=100) == 100
    assert count("tma_dedicated", sms=100, communicating=8) == 92
    assert count("tma_dedicated", sms=100, communicating=8, folded=True) == 17
    assert count("tma_dedicated", sms=2, communicating=8) == 1
    assert count("ldst_dedicated", "triton", sms=100) == 92  # less the usual 8
    assert count("remote_dma") == 132  # a backend that has none for the target


@pytest.mark.parametrize(
    "backend,target",
    [("remote_dma", "tpu"), ("tma_dedicated", "mosaic_gpu"), ("copy_engine", "mosaic_gpu")],
)
def test_a_backend_names_its_target(backend: str, target: str) -> None:
    options = Options(backend=backend, launch=Launch(sms=132))
    layout = block(operators.get("all_gather_matmul"), (1, 512, 512), (512, 512), 2)
    operator, _ = fused.build("all_gather", layout, "bfloat16", "bfloat16", ("t",), options)
    assert (operator.target, operator.backend.name) == (target, backend)


@pytest.mark.parametrize("target", ["mosaic_gpu", "triton"])
def test_devices_of_other_core_counts_have_operators_of_their_own(target: str) -> None:
    if target == "triton":
        pytest.importorskip("jax_triton")
    options = Options(backend="ldst_dedicated", target=target)
    layout = block(operators.get("all_gather_matmul"), (1, 2048, 512), (512, 4096), 2)

    def sms(cores: int) -> int | None:
        device = AbstractDevice("NVIDIA GPU", cores, "cuda")
        mesh = AbstractMesh((2,), ("t",), (AxisType.Manual,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            found, _ = fused.build("all_gather", layout, "bfloat16", "bfloat16", ("t",), options)
        return found.work.launch.sms

    assert [sms(cores) for cores in (148, 132, 148)] == [148, 132, 148]


@pytest.mark.parametrize("backend", ["tma_dedicated", "ldst_dedicated", "copy_engine"])
def test_more_multiprocessors_than_the_device_has(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some CTAs would wait for others that are not resident, for ever."""
    monkeypatch.setattr(device, "core_count", lambda: 78)
    layout = block(operators.get("all_gather_matmul"), (1, 512, 512), (512, 512), 2)
    for sms in (78, 79):
        options = Options(backend=backend, launch=Launch(sms=sms))
        build = functools.partial(
            fused.build, "all_gather", layout, "bfloat16", "bfloat16", ("t",), options
        )
        if sms == 78:
            assert build()[0].work.launch.sms == 78
            continue
        with pytest.raises(InputError, match="sms = 79, but the device has 78 multiprocessors"):
            build()
