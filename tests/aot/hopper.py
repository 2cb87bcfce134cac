"""Compiles programs for GPUs that are not there, down to machine code, and reads what that took.

Private parts of JAX in use, read at 0.11.2: ``xla_bridge.canonicalize_platform``, which knows only
the platforms of devices that are there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax._src import xla_bridge
from jax.experimental import topologies
from jaxlib.mlir import ir

DEVICE = Path(__file__).with_name("h200.txtpb")
# The plugin speaks through the interpreter's standard output: what the assembler said of a kernel,
# and what Pallas asked for it.
SETTINGS = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}


def _has_plugin() -> bool:
    """The folder of plugins need not be there."""
    return all(map(importlib.util.find_spec, ("jax_plugins", "jax_plugins.xla_cuda13")))


def missing() -> str | None:
    """Why nothing can be compiled for a GPU here, or None."""
    if not _has_plugin():
        return "the CUDA plugin of JAX is not installed; `make test-aot` installs it"
    return None


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a kernel takes of a multiprocessor.

    Attributes:
      registers: of a thread, when it starts.
      spilled: bytes stored and loaded because registers did not suffice.
      shared_memory: bytes of a CTA, barriers left out.
      serialized: the tensor cores wait for each other.
    """

    registers: int
    spilled: int
    shared_memory: int
    serialized: bool

    @classmethod
    def read(cls, text: str) -> list[Kernel]:
        """The kernels of one compiled program, from the plugin's and the assembler's words."""
        memory = [int(n) for n in re.findall(r"smem_scratch_bytes=(\d+)", text)]
        # A newer assembler also warns of what is spilled, in words of the same kind.
        stores = re.findall(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
        if not len(memory) == len(stores) == len(registers):
            raise AssertionError(f"not understood: {text}")
        serialized = "instructions are serialized" in text
        return [
            cls(r, sum(map(int, s)), m, serialized)
            for r, s, m in zip(registers, stores, memory, strict=True)
        ]


@contextlib.contextmanager
def _knows_cuda() -> Iterator[None]:
    """The name of a platform without devices is a platform's name."""
    known = xla_bridge.canonicalize_platform

    def canonical(platform: str) -> str:
        return "cuda" if platform in ("cuda", "gpu") else known(platform)

    with mock.patch.object(xla_bridge, "canonicalize_platform", canonical):
        yield


def mesh(ranks: int) -> jax.sharding.Mesh:
    """``ranks`` H200s of one host along axis ``t``."""
    with _knows_cuda():
        found = topologies.get_topology_desc(
            f"h200x{ranks}",
            platform="cuda",
            target_config=DEVICE.read_text(),
            topology=f"1x1x{ranks}",
        )
    return topologies.make_mesh(found, (ranks,), ("t",))


def compiled(
    fn: Callable[..., Any], *arguments: jax.ShapeDtypeStruct, hosted: Sequence[int] = ()
) -> Any:
    """The machine code of a function of arrays with shardings over a ``mesh``.

    Arguments ``hosted`` are in pinned host memory, which devices that are not there cannot say.
    """
    with _knows_cuda():
        lowered = jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",))
        module: Any = lowered.compiler_ir()
        (main,) = (f for f in module.body.operations if str(f.name) == '"main"')
        with module.context:
            attributes = [{a.name: a.attr for a in argument} for argument in main.arg_attrs]
            for number in hosted:
                attributes[number]["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(found) for found in attributes])
        return lowered.compile()
