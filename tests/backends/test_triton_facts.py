"""What jax-triton 0.3 leaves out of a compiled kernel is passed on; later ones are left alone."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest

from syncopate_jax.backends import triton_backends, triton_facts
from syncopate_jax.options import Launch


@dataclasses.dataclass
class Result:
    binary: str


@dataclasses.dataclass
class Module:
    name: str
    warps: int | None = None

    def get_int_attr(self, name: str) -> int | None:
        return {"ttg.num-warps": self.warps}[name]


class Backend:
    def make_ttir(self, module: Module, *rest: Any) -> str:
        return f"ttir of {module.name}"

    def make_ttgir(self, module: str, *rest: Any) -> str:
        return f"ttgir of {module}"

    def gluon_to_ttgir(self, module: Module, *rest: Any) -> str:
        return f"gluon's ttgir of {module.name}"

    def make_ptx(self, source: str, metadata: dict[str, Any], options: Any) -> str:
        return f"ptx of {source}"


def library() -> Any:
    """The parts of ``jax_triton.triton_lib`` that are completed."""

    def compile_ptx(ttir: Module, backend: Any, metadata: dict[str, Any]) -> Result:
        ttgir = backend.make_ttgir(backend.make_ttir(ttir), metadata)
        return Result(backend.make_ptx(ttgir, metadata, None))

    def kernel(*args: Any, **scratch: Any) -> tuple[Any, ...]:
        return (*args, scratch)

    calls = types.SimpleNamespace(TritonKernel=kernel, create_array_parameter=len)
    return types.SimpleNamespace(
        triton_kernel_call_lib=calls,
        compile_ttir_to_ptx_inplace=compile_ptx,
        code_gen=types.SimpleNamespace(ast_to_ttir=lambda function, source, **given: given),
        CompilationResult=Result,
    )


def test_warps_and_scratch_memory_are_passed_on() -> None:
    made = library()
    triton_facts.complete(made)
    triton_facts.complete(made)  # once is enough
    facts = {"num_warps": 12, "global_scratch_size": 256, "global_scratch_align": 128}
    for name, metadata in (("a", facts), ("b", {"num_warps": 4, "global_scratch_size": 0})):
        ptx = made.compile_ttir_to_ptx_inplace(Module(name), Backend(), metadata).binary
        found = made.triton_kernel_call_lib.TritonKernel(name, 4, 1, 99, ptx, "ttir", 90)
        scratch = {k: v for k, v in metadata.items() if k != "num_warps" and v}
        assert found == (name, metadata["num_warps"], 1, 99, ptx, "ttir", 90, scratch)
    assert made.triton_kernel_call_lib.create_array_parameter("abc") == 3


def test_a_kernel_in_gluon_has_layouts_already() -> None:
    made = library()
    triton_facts.complete(made)
    found = [
        made.compile_ttir_to_ptx_inplace(Module("a", warps), Backend(), {}).binary
        for warps in (None, 4)
    ]
    assert found == ["ptx of ttgir of ttir of a", "ptx of gluon's ttgir of a"]


@pytest.mark.parametrize("gluon", [False, True])
def test_a_kernel_in_gluon_is_written_into_a_module_that_names_the_gpu(
    gluon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = pytest.importorskip("triton.experimental.gluon._runtime")

    class Source:
        def __init__(self, *given: Any) -> None:
            self.given = given

        def make_ir(self, target: Any, options: Any, **rest: Any) -> tuple[Any, ...]:
            return (*self.given, target.arch, target.warp_size, options, rest)

    monkeypatch.setattr(runtime, "GluonASTSource", Source)
    made = library()
    triton_facts.complete(made)
    function = types.SimpleNamespace(is_gluon=lambda: gluon)
    source = types.SimpleNamespace(signature="signature", constants="constants", attrs="attrs")
    options = types.SimpleNamespace(arch="sm90", warp_size=32)
    found = made.code_gen.ast_to_ttir(function, source, options=options, context="context")
    rest = {"context": "context"}
    wanted = (function, "signature", "constants", "attrs", 90, 32, options, rest)
    assert found == (wanted if gluon else rest | {"options": options})


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
