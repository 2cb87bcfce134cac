"""Launching rewritten Triton kernels: through jax-triton on a GPU, or in a simulator.

Triton and jax-triton are optional: this module imports neither until a kernel is launched.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from syncopate_jax.backends import triton_facts, triton_scratch
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.kernel.calls import captured
from syncopate_jax.kernel.directives_tree import plain_function
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.triton_source import module

NEEDED = ("triton", "jax_triton")
HOPPER = 90
"""Compute capability that is assumed where a program is lowered without a GPU."""
PTX_VERSION = 87
"""Of CUDA 12.8, which every JAX with a CUDA 13 plugin assembles; what Triton 3.6 writes too."""


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A kernel and how it is launched.

    Attributes:
      name: of the function in ``path``.
      given: names of the original kernel's module.
      arguments: of the parameters that are no arrays; compiled in.
      grid: programs.
      zeroed: output that is zero when the launch begins, where it is one.
      order: parameters of arrays, in order; the last ones are outputs.
      label: shown in programs and profiles.
    """

    name: str
    path: Path
    given: Mapping[str, Any]
    arguments: tuple[tuple[str, Any], ...]
    grid: int
    num_warps: int
    num_stages: int
    zeroed: str
    order: tuple[str, ...]
    label: str

    def load(self) -> types.ModuleType:
        """The module that holds the kernel."""
        return module.load(self.path, self.given)


@runtime_checkable
class Simulator(Protocol):
    """Runs a launch of folded ranks without a GPU; see ``interpret_settings``."""

    def run(self, launched: Launched, arrays: dict[str, np.ndarray]) -> None:
        """Runs all programs on arrays by parameter, in place."""
        ...


def missing() -> str | None:
    """What must be installed to launch a kernel; None if nothing."""
    absent = [n.replace("_", "-") for n in NEEDED if importlib.util.find_spec(n) is None]
    if not absent:
        return None
    return (
        f"target 'triton' needs {' and '.join(absent)}, not installed here: pip install "
        f"{' '.join(absent)}"
    )


def globals_of(function: Any) -> Mapping[str, Any]:
    """What a kernel's names mean that it does not assign."""
    return captured(plain_function(function))


def jax_triton() -> Any:
    """The module; raises UnsupportedError where it cannot be used, and says why."""
    if reason := missing():
        raise UnsupportedError(reason)
    try:
        import jax_triton as found
        from jaxlib.gpu_triton import TritonKernel  # noqa: F401  the plugin has it
    except ImportError as error:
        raise UnsupportedError(
            f"target 'triton': jax-triton cannot be used here ({error}); it needs JAX's CUDA "
            f"plugin: pip install 'jax[cuda13]' at the version of jax"
        ) from error
    triton_facts.complete(found.triton_lib)
    return found


def launch(
    launched: Launched,
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    """The launch's outputs by parameter."""
    called = call(
        list(inputs.values()),
        list(outputs.values()),
        dict(launched.arguments),
        kernel=getattr(launched.load(), launched.name),
        grid=(launched.grid,),
        name=launched.label,
        num_warps=launched.num_warps,
        num_stages=launched.num_stages,
        zeroed_outputs=tuple(i for i, n in enumerate(outputs) if n == launched.zeroed),
    )
    return dict(zip(outputs, called, strict=True))


def call(
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    arguments: Mapping[str, Any],
    **given: Any,
) -> list[jax.Array]:
    """``jax_triton.triton_call``, whose results' parameter was renamed in 0.4.

    A kernel that makes tensor descriptors is given their memory as one more output.
    """
    library = jax_triton()
    names = inspect.signature(library.triton_call).parameters
    scratch = []
    if triton_facts.takes_scratch(getattr(library, "triton_lib", None)):
        scratch = _scratch(given["kernel"], given["grid"], len(inputs) + len(outputs))
    given["out_type" if "out_type" in names else "out_shape"] = [*outputs, *scratch]
    if "backend_options" in names:  # XLA's assembler may be older than the newest Triton's PTX
        given["backend_options"] = {"ptx_version": PTX_VERSION}
    if jax.default_backend() == "gpu":
        triton_scratch.keep()
    else:
        given["compute_capability"] = HOPPER
    return list(library.triton_call(*inputs, **given, **arguments))[: len(outputs)]


def _scratch(kernel: Any, grid: Sequence[int], arrays: int) -> list[jax.ShapeDtypeStruct]:
    """The memory of descriptors that a kernel seems to make; jax-triton names it by a parameter
    behind the arrays', which must be there."""
    makes = "make_tensor_descriptor" in getattr(kernel, "src", "")
    if not makes or len(kernel.arg_names) <= arrays:
        return []
    bytes_ = math.prod(grid) * triton_facts.SCRATCH_BYTES
    return [jax.ShapeDtypeStruct((bytes_,), jnp.int8)]


def run_alone(
    kernel: PallasKernel, *operands: jax.Array, grid: int | tuple[int, ...]
) -> list[jax.Array]:
    """The kernel as it was written, not rewritten, with ``grid`` programs; one array a result.

    Raises:
      InputError: its results are not its last pointers, as jax-triton wants them.
    """
    body = kernel.triton_body
    wanted = [body.pointers[name] for name in (*kernel.operands, *kernel.results)]
    found = [name for name in body.source.parameters if name in wanted]
    if found != wanted:
        raise InputError(
            f"kernel {kernel.name}: its pointers are {', '.join(found)}; to run alone it takes "
            f"{', '.join(wanted)} in this order"
        )
    return call(
        operands,
        kernel.out_shape,
        body.arguments,
        kernel=body.function,
        grid=(grid,) if isinstance(grid, int) else grid,
        name=kernel.name,
        num_warps=body.num_warps,
        num_stages=body.num_stages,
    )


def simulate(
    simulator: Simulator,
    launched: Launched,
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    """As ``launch``, on the CPU; what no program writes is left undefined, as on a GPU."""

    def run(*arrays: Any) -> list[np.ndarray]:
        held = dict(zip(inputs, map(np.array, arrays), strict=True))
        for name, out in outputs.items():
            held[name] = _undefined(out, zero=name == launched.zeroed)
        simulator.run(launched, held)
        return [held[name] for name in outputs]

    found = jax.pure_callback(run, list(outputs.values()), *inputs.values())
    return dict(zip(outputs, found, strict=True))


def _undefined(out: jax.ShapeDtypeStruct, zero: bool) -> np.ndarray:
    if zero:
        return np.zeros(out.shape, out.dtype)
    is_float = jnp.issubdtype(out.dtype, jnp.floating)
    return np.full(out.shape, np.nan if is_float else -1, out.dtype)
