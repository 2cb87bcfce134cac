"""What Triton says of a kernel it compiled, where jax-triton 0.3 does not pass it on to JAX.

Tensor descriptors that a kernel makes lie in scratch memory, and a warp-specialized kernel has more
warps than were asked for. jaxlib takes both; jax-triton passes them from 0.4 on, which needs Triton
3.7.

jaxlib takes scratch memory from the driver at every launch and gives it back behind it, which costs
microseconds of the device's time; see experiments/triton. The compiled kernel takes its address
behind the addresses of its arrays, so an output behind the others, which the kernel's source does
not know of, serves as well, and XLA's memory costs nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCRATCH_BYTES = 4096
"""Of a program, as ``triton_call`` sets aside: 32 descriptors."""
_HIDDEN = 2  # addresses that Triton adds to a kernel's parameters: scratch memory, a profile's
_ENTRY = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What jaxlib's kernel is made of, and the scratch memory that a program of it takes."""

    given: tuple[Any, ...]
    ptx: str
    scratch: dict[str, int]

    @property
    def arrays(self) -> int | None:
        """Parameters of the compiled kernel but those that Triton adds; None if PTX says none."""
        entry = _ENTRY.search(self.ptx)
        return entry.group(1).count(".param") - _HIDDEN if entry else None

    def is_given_scratch(self, parameters: Sequence[Any]) -> bool:
        """Whether one more array is passed than it has, and is as large as it takes."""
        more = self.arrays is not None and len(parameters) == self.arrays + 1
        return more and self.scratch.get("global_scratch_size", 0) <= SCRATCH_BYTES


class _KernelCalls:
    """jaxlib's module of Triton kernels, with kernels completed by ``facts``."""

    def __init__(self, module: Any, facts: dict[str, dict[str, Any]]):
        self._module, self._facts = module, facts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def TritonKernel(
        self, name: str, num_warps: int, ctas: int, shared: int, ptx: str, *rest: Any
    ) -> _Kernel:
        """What jaxlib's is made of, with the warps and the scratch memory that the code needs."""
        facts = self._facts.pop(ptx, {})
        scratch = {
            key: facts[key] for key in ("global_scratch_size", "global_scratch_align")
            if facts.get("global_scratch_size")
        }  # fmt: skip
        warps = facts.get("num_warps", num_warps)
        return _Kernel((name, warps, ctas, shared, ptx, *rest), ptx, scratch)

    def TritonKernelCall(
        self, kernel: _Kernel, x: int, y: int, z: int, parameters: Sequence[Any]
    ) -> Any:
        """As jaxlib's; its scratch memory is the last array, if there is one more than it has."""
        scratch = {} if kernel.is_given_scratch(parameters) else kernel.scratch
        if scratch and kernel.arrays is not None:
            parameters = parameters[: kernel.arrays]
        made = self._module.TritonKernel(*kernel.given, **scratch)
        return self._module.TritonKernelCall(made, x, y, z, list(parameters))


_lock = threading.Lock()


def takes_scratch(library: Any) -> bool:
    """Whether ``complete`` changed the module: kernels may be given an array more."""
    return isinstance(getattr(library, "triton_kernel_call_lib", None), _KernelCalls)


def complete(library: Any) -> None:
    """Makes ``jax_triton.triton_lib`` pass on warps and scratch memory; once, and only 0.3."""
    with _lock:
        calls = library.triton_kernel_call_lib
        results = getattr(library.CompilationResult, "__dataclass_fields__", {})
        if takes_scratch(library) or "global_scratch_size" in results:
            return
        facts: dict[str, dict[str, Any]] = {}
        compile_ptx = library.compile_ttir_to_ptx_inplace

        def recorded(ttir: Any, backend: Any, *rest: Any) -> Any:
            seen: dict[str, Any] = {}
            make_ptx = backend.make_ptx

            def make(source: Any, metadata: dict[str, Any], *more: Any) -> Any:
                seen.update(metadata)
                return make_ptx(source, metadata, *more)

            backend.make_ptx = make
            result = compile_ptx(ttir, backend, *rest)
            facts[result.binary] = seen
            return result

        library.compile_ttir_to_ptx_inplace = recorded
        library.triton_kernel_call_lib = _KernelCalls(calls, facts)
