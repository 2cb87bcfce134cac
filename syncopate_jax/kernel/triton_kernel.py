"""Local kernels of target ``triton``: an annotated Triton kernel as a local kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import pallas as pl

from syncopate_jax.errors import InputError
from syncopate_jax.kernel import directives, directives_tree
from syncopate_jax.kernel.annotated import Annotated
from syncopate_jax.kernel.directives import Access
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.triton_body import TritonBody


def triton_kernel(
    function: Any,
    arguments: Mapping[str, Any],
    *,
    out_dtypes: Mapping[str, jax.typing.DTypeLike],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    reference: Callable[..., Any] | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
) -> PallasKernel:
    """A local kernel from an annotated Triton kernel (paper section 5.2, listing 1).

    Args:
      function: a function under ``@triton.jit`` with directives, see ``kernel/directives.py``.
      arguments: value of every parameter that no ``reads`` or ``writes`` names; they are compiled
        in.
      out_dtypes: of every result, by its name: what stands behind ``as``, else its pointer's.
      shapes: of operands and results that a tile takes whole in some dimension (``:``), by name:
        ``{"x": (64, 128)}``.
      reference: the same function of the operands in plain JAX, for backend ``xla``.
      num_warps, num_stages: as for Triton.

    Returns:
      A kernel for ``compile(..., target="triton")``. Its operands and results are what the
      directives name, in the order of the kernel's parameters.

    Raises:
      FormatError: a directive is malformed or false.
      InputError: an argument or dtype is missing, or one is given that the kernel does not take.

    Example::

      kernel = triton_kernel(matmul_kernel, {"M": 512, "N": 512, "K": 256, "BLOCK_M": 128, …},
                             out_dtypes={"y": "bfloat16"})  # of ``writes y_ptr[m, n] as y``
    """
    source = directives_tree.read(function, arguments)
    values = _arguments(function, source, arguments)
    sizes = _Sizes(source, values)
    order = {name: i for i, name in enumerate(source.parameters)}
    accesses = sorted(source.accesses, key=lambda access: order[access.pointer])
    operands = tuple(a.operand for a in accesses if not a.write)
    results = tuple(a.operand for a in accesses if a.write)
    if set(out_dtypes) != set(results):
        raise InputError(
            f"kernel {source.name}: out_dtypes needs {', '.join(results)}, found "
            f"{', '.join(out_dtypes) or 'none'}"
        )
    shape_of = {a.operand: sizes.shape(a, (shapes or {}).get(a.operand)) for a in accesses}
    sizes.check_loop()
    names, tiles, extents = walked_axes(source), sizes.tiles, sizes.extents
    body = TritonBody(function, source, values, shape_of, num_warps, num_stages)
    specs = {a.operand: _spec(a, names, tiles, shape_of[a.operand]) for a in accesses}
    return PallasKernel(
        body=None,
        grid=tuple(-(-extents[name] // tiles[name]) for name in names),
        operands=operands,
        results=results,
        in_specs=tuple(specs[name] for name in operands),
        out_specs=tuple(specs[name] for name in results),
        out_shape=tuple(jax.ShapeDtypeStruct(shape_of[n], out_dtypes[n]) for n in results),
        has_addend=body.has_addend,
        reference=reference,
        triton=body,
        name=source.name,
    )


def walked_axes(source: Annotated) -> list[str]:
    """The axes of the grid: those that dispatch maps or a loop reduces, in the order given."""
    walked = {axis for axis, _ in source.variables} | set(source.reduced)
    return [axis.name for axis in source.axes if axis.name in walked]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A kernel's sizes under its arguments."""

    source: Annotated
    arguments: Mapping[str, Any]

    @property
    def tiles(self) -> dict[str, int]:
        """Elements of a tile along each axis."""
        found = {}
        for axis in self.source.axes:
            found[axis.name] = directives.evaluate(axis.tile, self.arguments, axis.place)
            if found[axis.name] < 1:
                raise axis.place.error(f"axis {axis.name} has tiles of 0 elements")
        return found

    @property
    def extents(self) -> dict[str, int]:
        """Elements along each axis."""
        found = {}
        for axis in self.source.axes:
            value = directives.evaluate(axis.extent or axis.count, self.arguments, axis.place)
            found[axis.name] = value if axis.extent else value * self.tiles[axis.name]
        return found

    def shape(self, access: Access, given: tuple[int, ...] | None) -> tuple[int, ...]:
        """Extents of an operand or result; ``given`` where some dimension is taken whole."""
        if given is not None and len(given) != len(access.dims):
            raise access.place.error(
                f"{access.operand} has {len(access.dims)} dimensions here, shapes= says {given}"
            )
        if given is None and None in access.dims:
            raise access.place.error(
                f"{access.operand} has a dimension ':', so its shape must be given: "
                f"triton_kernel(…, shapes={{{access.operand!r}: (…)}}), "
                f"{len(access.dims)} extents in elements"
            )
        return tuple(
            self.extents[name] if name is not None else (given or ())[d]
            for d, name in enumerate(access.dims)
        )

    def check_loop(self) -> None:
        """The reduction's variable counts steps, or the elements of one axis."""
        reduction = self.source.reduction
        if reduction is None or reduction.step == "1":
            return
        last = reduction.axes[-1]
        (axis,) = (axis for axis in self.source.axes if axis.name == last)
        try:
            step = directives.evaluate(reduction.step, self.arguments, axis.place)
        except (KeyError, AssertionError, SyntaxError):
            step = -1
        if step != self.tiles[last] or len(reduction.axes) > 1:
            raise axis.place.error(
                f"the loop over {', '.join(reduction.axes)} rises by {reduction.step} = {step}; it "
                f"must rise by 1, or along one axis by its tile of {self.tiles[last]}"
            )


def _arguments(function: Any, source: Annotated, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter's value, defaults filled in."""
    pointers = {access.pointer for access in source.accesses}
    takes = [name for name in source.parameters if name not in pointers]
    signature = inspect.signature(directives_tree.plain_function(function))
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    unknown = sorted(set(given) - set(takes))
    if unknown:
        raise InputError(
            f"kernel {source.name}: {unknown[0]} is none of its arguments: {', '.join(takes)}"
        )
    found = {name: given.get(name, defaults.get(name)) for name in takes}
    missing = [name for name in takes if name not in given and name not in defaults]
    if missing:
        raise InputError(
            f"kernel {source.name}: arguments {', '.join(missing)} are missing; a pointer needs a "
            f"reads or writes directive"
        )
    return found


def _spec(
    access: Access, names: list[str], tiles: Mapping[str, int], shape: tuple[int, ...]
) -> pl.BlockSpec:
    """Blocks of one element are left out of a block's shape, as Pallas has it."""
    block = tuple(
        shape[d] if name is None else (None if tiles[name] == 1 else tiles[name])
        for d, name in enumerate(access.dims)
    )
    return pl.BlockSpec(
        block,
        lambda *at: tuple(0 if name is None else at[names.index(name)] for name in access.dims),
    )
