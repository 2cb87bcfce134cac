"""The body of a local kernel as a program, of which a backend reads what it may not reorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.kernel.blocks import block_indices, kept_sizes
from syncopate_jax.kernel.carried_state import check_state
from syncopate_jax.kernel.grid_numbers import run_at
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.step_numbers import asking_visits


@dataclass(frozen=True, slots=True)
class TracedBody:
    """A body, traced on the references that it is run on.

    Attributes:
      program: the jaxpr; its inputs are the indices along the grid's axes, then, an axis each, the
        visits along them. Calls of ``pl.program_id`` are uses of the former.
      constants: what it uses from around it, such as references.
    """

    program: Any
    constants: Sequence[Any]

    def __call__(self, indices: Sequence[Any], visits: Sequence[Any]) -> None:
        """Runs the body at one step of a tile."""
        jax.core.eval_jaxpr(self.program, self.constants, *indices, *visits)


def trace_body(
    kernel: PallasKernel,
    refs: Sequence[Any],
    reordered: Sequence[int],
    addend: Mapping[str, Callable[[], jax.Array]],
) -> TracedBody:
    """``kernel.body`` on ``refs``, for tiles in any order that walk ``reordered`` in any order.

    Raises UnsupportedError where the body would compute something else in another order.
    """
    grid = kernel.grid

    def body(*numbers: jax.Array) -> None:
        run_at(numbers[: len(grid)], grid, lambda: kernel.grid_body(*refs, **addend))

    zeros = [jax.numpy.int32(0)] * (2 * len(grid))
    traced = jax.make_jaxpr(body)(*zeros)
    names = [*kernel.operands, *kernel.results, *("" for _ in kernel.scratch_shapes)]
    named = {id(ref): name for ref, name in zip(refs, names, strict=True)}
    roles = [named.get(id(constant)) for constant in traced.consts]
    check_state(
        kernel.name,
        traced.jaxpr,
        grid,
        kernel.reduction_axes,
        scratch=[role == "" for role in roles],
        results=[role in kernel.results for role in roles],
    )
    program = asking_visits(
        kernel.name,
        traced.jaxpr,
        {axis: grid[axis] for axis in reordered},
        blocks=[role in _walking(kernel, reordered) for role in roles],
        state=[role == "" or role in kernel.results for role in roles],
        results=[role in kernel.results for role in roles],
    )
    return TracedBody(program, traced.consts)


def _walking(kernel: PallasKernel, axes: Sequence[int]) -> set[str]:
    """The operands of which a tile reads another block as it walks ``axes``."""
    found = set()
    for name, spec in zip(kernel.operands, kernel.in_specs, strict=True):
        index = block_indices(spec, kernel.grid, f"{kernel.name}: {name}", 1)
        if any((index != index.take([0], axis)).any() for axis in axes):
            found.add(name)
    return found


def check_body(
    kernel: PallasKernel,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, Any],
    reordered: Sequence[int],
    addend: tuple[int, ...] | None,
) -> None:
    """Traces the body alone, before its operands are there, as far as their blocks are known.

    ``shapes`` has those of the arrays that are known, ``dtypes`` that of each operand, known or
    supposed; ``addend`` is the shape of what is added, if something is. Raises what ``trace_body``
    and the body raise.
    """
    specs = dict(zip(kernel.operands, kernel.in_specs, strict=True))
    specs |= dict(zip(kernel.results, kernel.out_specs, strict=True))
    if any(spec.block_shape is None and name not in shapes for name, spec in specs.items()):
        return
    results = zip(kernel.results, kernel.out_shape, strict=True)
    types = {**dtypes, **{name: out.dtype for name, out in results}}
    blocks = [
        (spec.memory_space or pltpu.VMEM)(
            tuple(n for n in kept_sizes(spec, shapes.get(name, ())) if n is not None), types[name]
        )
        for name, spec in specs.items()
    ]

    def total() -> jax.Array:
        return jax.numpy.zeros(addend, jax.numpy.float32)

    def run(*refs: Any) -> None:
        trace_body(kernel, refs, reordered, {} if addend is None else {"addend": total})

    jax.make_jaxpr(lambda: pl.run_scoped(run, *blocks, *kernel.scratch_shapes))()
