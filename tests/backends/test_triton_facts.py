"""What jax-triton 0.3 leaves out of a compiled kernel is passed on; later ones are left alone."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from syncopate_jax.backends import triton_backends, triton_call, triton_facts
from syncopate_jax.options import Launch


@dataclasses.dataclass
class Result:
    binary: str


class Backend:
    """Compiles to PTX of two arrays, and of what Triton adds: scratch memory and a profile's."""

    def make_ptx(self, source: str, metadata: dict[str, Any], options: Any) -> str:
        parameters = ",\n".join(f".param .u64 .ptr {source}_param_{i}" for i in range(4))
        return f".visible .entry {source}(\n{parameters}\n)\n.reqntid 256\n{{"


def library() -> Any:
    """The parts of ``jax_triton.triton_lib`` that are completed."""

    def compile_ptx(ttir: str, backend: Any, metadata: dict[str, Any]) -> Result:
        return Result(backend.make_ptx(ttir, metadata, None))

    def kernel(*args: Any, **scratch: Any) -> tuple[Any, ...]:
        return (*args, scratch)

    def call(*args: Any) -> tuple[Any, ...]:
        return args

    calls = types.SimpleNamespace(
        TritonKernel=kernel, TritonKernelCall=call, create_array_parameter=len
    )
    return types.SimpleNamespace(
        triton_kernel_call_lib=calls,
        compile_ttir_to_ptx_inplace=compile_ptx,
        CompilationResult=Result,
    )


def launched(made: Any, metadata: dict[str, Any], arrays: list[str]) -> tuple[Any, Any]:
    """The scratch memory that jaxlib is asked for, and the arrays that the kernel is passed."""
    ptx = made.compile_ttir_to_ptx_inplace("name", Backend(), metadata).binary
    calls = made.triton_kernel_call_lib
    kernel = calls.TritonKernel("name", 4, 1, 99, ptx, "ttir", 90)
    (*given, scratch), *grid, parameters = calls.TritonKernelCall(kernel, 132, 1, 1, arrays)
    assert given == ["name", metadata.get("num_warps", 4), 1, 99, ptx, "ttir", 90]
    assert grid == [132, 1, 1]
    return scratch, parameters


DESCRIPTORS = {"num_warps": 4, "global_scratch_size": 384, "global_scratch_align": 128}


def completed() -> Any:
    made = library()
    assert not triton_facts.takes_scratch(made)
    triton_facts.complete(made)
    triton_facts.complete(made)  # once is enough
    assert triton_facts.takes_scratch(made)
    return made


def test_warps_and_scratch_memory_are_passed_on() -> None:
    made = completed()
    size = {key: value for key, value in DESCRIPTORS.items() if key != "num_warps"}
    assert launched(made, DESCRIPTORS | {"num_warps": 12}, ["x", "y"]) == (size, ["x", "y"])
    assert launched(made, {"global_scratch_size": 0}, ["x", "y"]) == ({}, ["x", "y"])
    assert made.triton_kernel_call_lib.create_array_parameter("abc") == 3


def test_an_array_more_is_the_scratch_memory() -> None:
    arrays = ["x", "y", "scratch"]
    assert launched(completed(), DESCRIPTORS, arrays) == ({}, arrays)


def test_scratch_memory_that_is_too_small_is_left_out() -> None:
    size = {"global_scratch_size": triton_facts.SCRATCH_BYTES + 128, "global_scratch_align": 128}
    assert launched(completed(), size, ["x", "y", "scratch"]) == (size, ["x", "y"])


def test_an_array_more_is_passed_where_none_is_needed() -> None:
    """Triton's kernels take an address for it all the same."""
    arrays = ["x", "y", "scratch"]
    assert launched(completed(), {"global_scratch_size": 0}, arrays) == ({}, arrays)


def test_what_jax_triton_passes_itself_is_left_alone() -> None:
    made = library()
    made.CompilationResult = dataclasses.make_dataclass("Result", [("global_scratch_size", int)])
    before = made.triton_kernel_call_lib
    triton_facts.complete(made)
    assert made.triton_kernel_call_lib is before


def test_an_eighth_of_a_ranks_programs_communicate() -> None:
    for sms, ranks, wanted in ((132, 2, 8), (132, 4, 4), (132, 8, 2), (8, 8, 1)):
        launch = triton_backends.usual(Launch(sms=sms, folded=True), ranks)
        assert launch.communicating == wanted
    assert triton_backends.usual(Launch(sms=132, communicating=3), 2).communicating == 3
    assert triton_backends.usual(Launch(), 2).communicating is None


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What each launch is to return, of a jax-triton whose kernels may be given an array more."""
    found: list[list[Any]] = []

    def call(*arrays: jax.Array, out_shape: Any, **given: Any) -> list[jax.Array]:
        found.append([(out.shape, out.dtype) for out in out_shape])
        return [jnp.zeros(out.shape, out.dtype) for out in out_shape]

    stand_in = types.SimpleNamespace(triton_call=call, triton_lib=completed())
    monkeypatch.setattr(triton_call, "jax_triton", lambda: stand_in)
    return found


@pytest.mark.parametrize("described", [True, False])
def test_memory_of_descriptors_is_an_output(outputs: list[list[Any]], described: bool) -> None:
    pytest.importorskip("triton")
    from syncopate_jax.pallas_kernels import matmul_triton

    config = matmul_triton.MatmulConfig(described=described)
    kernel = matmul_triton.matmul(256, 64, 512, "bfloat16", config, 3)
    x, w = jnp.zeros((256, 64), jnp.bfloat16), jnp.zeros((64, 512), jnp.bfloat16)
    (y,) = triton_call.run_alone(kernel, x, w, grid=(3, 2))
    scratch = [((6 * triton_facts.SCRATCH_BYTES,), jnp.int8)] if described else []
    assert outputs == [[(y.shape, y.dtype), *scratch]]


def test_a_kernel_without_a_parameter_to_spare_takes_the_drivers_memory(
    outputs: list[list[Any]],
) -> None:
    """jax-triton names every array by a parameter of the kernel's source."""
    out = jax.ShapeDtypeStruct((4,), jnp.float32)
    source = "def kernel(x, y): tl.make_tensor_descriptor(x)"
    for names in (["x", "y"], ["x", "y", "N"]):
        kernel = types.SimpleNamespace(src=source, arg_names=names)
        triton_call.call([jnp.zeros(4)], [out], {}, kernel=kernel, grid=(1,), name="kernel")
    assert list(map(len, outputs)) == [1, 2]
