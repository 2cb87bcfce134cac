"""The body of a local kernel as a program, of which a backend reads what it may not reorder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.kernel.accumulation import accumulates
from syncopate_jax.kernel.blocks import block_indices, kept_sizes
from syncopate_jax.kernel.carried_state import ADDEND, check_state
from syncopate_jax.kernel.grid_numbers import run_at
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.step_numbers import asking_visits
from syncopate_jax.kernel.tried_orders import Body, check_addend, check_orders, check_scratch


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
    """``kernel.body`` on ``refs``, for tiles in any order that walk ``reordered`` in another order.

    Raises UnsupportedError where the body surely computes something else there; whether it may is
    for ``check_body``.
    """
    jaxpr, constants = _trace(kernel, refs, addend)
    program, _ = _asking_visits(kernel, jaxpr, _roles(kernel, refs, constants), reordered)
    return TracedBody(program, constants)


def reordered_axes(kernel: PallasKernel, orders: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The reduction axes along which one of ``orders`` differs from the grid's.

    Each is a permutation of the numbers of a tile's steps, of which the last axis counts fastest.
    """
    axes = kernel.reduction_axes
    counts = [kernel.grid[axis] for axis in axes]
    walked = np.unravel_index(np.asarray(orders, np.int64), counts) if axes else ()
    natural = np.unravel_index(np.arange(math.prod(counts)), counts) if axes else ()
    pairs = zip(axes, walked, natural, strict=True)
    return tuple(axis for axis, found, grids in pairs if (found != grids).any())


def check_body(
    kernel: PallasKernel,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, Any],
    orders: Sequence[Sequence[int]],
    addend: tuple[int, ...] | None,
) -> None:
    """Traces the body alone, before its operands are there, as far as their blocks are known.

    ``shapes`` has those of the arrays that are known, ``dtypes`` that of each operand, known or
    supposed; ``orders`` has those in which tiles walk their steps (see ``reordered_axes``);
    ``addend`` is the shape of what is added, if something is.

    Raises what the body raises; UnsupportedError where tiles depend on each other or do not ask
    once for what is added, and where the body gives something else in these orders or may do so
    without this being seen.
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

    total.__name__ = ADDEND
    asked = {} if addend is None else {"addend": jax.jit(total)}

    def run(*refs: Any) -> None:
        _check(kernel, refs, orders, asked)

    jax.make_jaxpr(lambda: pl.run_scoped(run, *blocks, *kernel.scratch_shapes))()


def _check(
    kernel: PallasKernel,
    refs: Sequence[Any],
    orders: Sequence[Sequence[int]],
    addend: Mapping[str, Callable[[], jax.Array]],
) -> None:
    jaxpr, constants = _trace(kernel, refs, addend)
    roles = _roles(kernel, refs, constants)
    _check_captured(kernel, constants)
    _check_operands(kernel, jaxpr, roles)
    check_state(
        kernel.name,
        jaxpr,
        kernel.grid,
        kernel.reduction_axes,
        scratch=[role == "" for role in roles],
        results=[role in kernel.results for role in roles],
        addend=bool(addend),
    )
    if addend:
        check_addend(kernel, Body(jaxpr, constants, roles, None))
    reordered = reordered_axes(kernel, orders)
    program, doubt = _asking_visits(kernel, jaxpr, roles, reordered)
    if doubt is None and _is_sum(kernel, jaxpr, roles, reordered or kernel.reduction_axes):
        return
    if kernel.scratch_shapes:
        check_scratch(kernel, Body(jaxpr, constants, roles, None))
    if reordered:
        check_orders(kernel, Body(program, constants, roles, doubt), orders)


def _check_captured(kernel: PallasKernel, constants: Sequence[Any]) -> None:
    """Raises UnsupportedError where the body uses an array that is none of its arguments."""
    types = [jax.typeof(constant) for constant in constants]
    found = [str(type_) for type_ in types if isinstance(type_, jax.core.ShapedArray)]
    if found:
        raise UnsupportedError(
            f"kernel {kernel.name}: the body uses arrays from around it ({', '.join(found)}), "
            f"which Pallas refuses; make each an operand, or a Python number"
        )


def _check_operands(kernel: PallasKernel, jaxpr: Any, roles: Sequence[str | None]) -> None:
    """Raises UnsupportedError where a tile may write into a block of an operand.

    Another tile may find the block as it was, or as it is now: it is not fetched anew where it is
    there already.
    """
    role_of = dict(zip(jaxpr.constvars, roles, strict=True))
    for effect in jaxpr.effects:
        if type(effect).__name__ in ("WriteEffect", "AccumEffect"):
            role = role_of.get(effect.input)
            if role in kernel.operands:
                raise UnsupportedError(
                    f"kernel {kernel.name}: the body stores into its operand {role}, which other "
                    f"tiles may read before or after, as they are computed in the order in which "
                    f"chunks arrive; keep what changes in scratch, or use backend 'xla'"
                )


def _is_sum(
    kernel: PallasKernel, jaxpr: Any, roles: Sequence[str | None], axes: Sequence[int]
) -> bool:
    """Whether tiles are seen to be started at their first step, and to be sums along ``axes``."""
    try:
        program, doubt = _asking_visits(kernel, jaxpr, roles, axes)
    except UnsupportedError:  # of an order that is not walked
        return False
    walking = _walking(kernel, axes)
    return doubt is None and accumulates(
        program,
        kernel.grid,
        kernel.reduction_axes,
        axes,
        blocks=[role in walking for role in roles],
        state=[role == "" or role in kernel.results for role in roles],
    )


def _trace(
    kernel: PallasKernel, refs: Sequence[Any], addend: Mapping[str, Callable[[], jax.Array]]
) -> tuple[Any, Sequence[Any]]:
    """The body's program, whose inputs are indices, then visits, and what it uses from around."""
    grid = kernel.grid

    def body(*numbers: jax.Array) -> None:
        run_at(numbers[: len(grid)], grid, lambda: kernel.grid_body(*refs, **addend))

    traced = jax.make_jaxpr(body)(*[jax.numpy.int32(0)] * (2 * len(grid)))
    return traced.jaxpr, traced.consts


def _roles(kernel: PallasKernel, refs: Sequence[Any], constants: Sequence[Any]) -> list[str | None]:
    """Of each constant the operand or result that it is, "" for scratch, or None."""
    names = [*kernel.operands, *kernel.results, *("" for _ in kernel.scratch_shapes)]
    named = {id(ref): name for ref, name in zip(refs, names, strict=True)}
    return [named.get(id(constant)) for constant in constants]


def _asking_visits(
    kernel: PallasKernel, jaxpr: Any, roles: Sequence[str | None], reordered: Sequence[int]
) -> tuple[Any, str | None]:
    walking = _walking(kernel, reordered)
    return asking_visits(
        kernel.name,
        jaxpr,
        {axis: kernel.grid[axis] for axis in reordered},
        blocks=[role in walking for role in roles],
        state=[role == "" or role in kernel.results for role in roles],
        results=[role in kernel.results for role in roles],
    )


def _walking(kernel: PallasKernel, axes: Sequence[int]) -> set[str]:
    """The operands of which a tile reads another block as it walks ``axes``."""
    found = set()
    for name, spec in zip(kernel.operands, kernel.in_specs, strict=True):
        index = block_indices(spec, kernel.grid, f"{kernel.name}: {name}", 1)
        if any((index != index.take([0], axis)).any() for axis in axes):
            found.add(name)
    return found
