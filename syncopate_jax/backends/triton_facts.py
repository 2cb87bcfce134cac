"""What Triton says of a kernel it compiled, where jax-triton 0.3 does not pass it on to JAX.

Tensor descriptors that a kernel makes lie in scratch memory, and a warp-specialized kernel has more
warps than were asked for. jaxlib takes both; jax-triton passes them from 0.4 on, which needs Triton
3.7.
"""

from __future__ import annotations

import threading
from typing import Any


class _KernelCalls:
    """jaxlib's module of Triton kernels, with kernels completed by ``facts``."""

    def __init__(self, module: Any, facts: dict[str, dict[str, Any]]):
        self._module, self._facts = module, facts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def TritonKernel(
        self, name: str, num_warps: int, ctas: int, shared: int, ptx: str, *rest: Any
    ) -> Any:
        """As jaxlib's, with the warps and the scratch memory that the kernel's code needs."""
        facts = self._facts.pop(ptx, {})
        scratch = {
            key: facts[key] for key in ("global_scratch_size", "global_scratch_align")
            if facts.get("global_scratch_size")
        }  # fmt: skip
        warps = facts.get("num_warps", num_warps)
        return self._module.TritonKernel(name, warps, ctas, shared, ptx, *rest, **scratch)


_lock = threading.Lock()


def complete(library: Any) -> None:
    """Makes ``jax_triton.triton_lib`` pass on warps and scratch memory; once, and only 0.3."""
    with _lock:
        calls = library.triton_kernel_call_lib
        results = getattr(library.CompilationResult, "__dataclass_fields__", {})
        if isinstance(calls, _KernelCalls) or "global_scratch_size" in results:
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
