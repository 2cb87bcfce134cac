"""What jax-triton 0.3 leaves out of a compiled kernel is passed on; later ones are left alone."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

from syncopate_jax.backends import triton_backends, triton_facts
from syncopate_jax.options import Launch


@dataclasses.dataclass
class Result:
    binary: str


class Backend:
    def make_ptx(self, source: str, metadata: dict[str, Any], options: Any) -> str:
        return f"ptx of {source}"


def library() -> Any:
    """The parts of ``jax_triton.triton_lib`` that are completed."""

    def compile_ptx(ttir: str, backend: Any, metadata: dict[str, Any]) -> Result:
        return Result(backend.make_ptx(ttir, metadata, None))

    def kernel(*args: Any, **scratch: Any) -> tuple[Any, ...]:
        return (*args, scratch)

    calls = types.SimpleNamespace(TritonKernel=kernel, create_array_parameter=len)
    return types.SimpleNamespace(
        triton_kernel_call_lib=calls,
        compile_ttir_to_ptx_inplace=compile_ptx,
        CompilationResult=Result,
    )


def test_warps_and_scratch_memory_are_passed_on() -> None:
    made = library()
    triton_facts.complete(made)
    triton_facts.complete(made)  # once is enough
    facts = {"num_warps": 12, "global_scratch_size": 256, "global_scratch_align": 128}
    for name, metadata in (("a", facts), ("b", {"num_warps": 4, "global_scratch_size": 0})):
        ptx = made.compile_ttir_to_ptx_inplace(name, Backend(), metadata).binary
        found = made.triton_kernel_call_lib.TritonKernel(name, 4, 1, 99, ptx, "ttir", 90)
        scratch = {k: v for k, v in metadata.items() if k != "num_warps" and v}
        assert found == (name, metadata["num_warps"], 1, 99, ptx, "ttir", 90, scratch)
    assert made.triton_kernel_call_lib.create_array_parameter("abc") == 3


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
