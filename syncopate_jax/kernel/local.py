"""Local kernels: tiled kernels written as if for one device, whose tile loop can be handed in."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl

from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.kernel.access import Access, AnyAccess, BoxAccess
from syncopate_jax.kernel.blocks import (
    block_indices,
    block_shape,
    check_spec,
    check_written,
    takes,
)
from syncopate_jax.kernel.grid_numbers import asked_outside
from syncopate_jax.kernel.loop import LoopBody
from syncopate_jax.kernel.tiles import Axis, TileSpace
from syncopate_jax.kernel.triton_body import TritonBody


@dataclass(frozen=True, slots=True, eq=False)
class PallasKernel:
    """A local kernel as ``pl.pallas_call`` takes it, with a name for each array.

    Nothing is annotated. One spec or shape may stand bare, as there; a ``grid_spec`` is given as
    the arguments that it is made of.

    The grid axes on which no output's block depends are reduction axes: a tile walks them, and the
    fused kernel may walk them in another order, so block edges must not cut them. In ``body``
    ``pl.program_id`` is the block's index, as in ``pl.pallas_call``; only a comparison with the
    first or last number of a reduction axis that decides a ``pl.when`` or ``lax.cond`` is true at
    the tile's first or last step. See ``docs/own_kernels.md``.

    Tiles are computed in another order too, and must not depend on each other: scratch may carry
    something from step to step of a tile, but not from tile to tile.

    Attributes:
      body: ``body(*input_refs, *output_refs, *scratch_refs)``; if ``has_addend`` it also takes
        ``addend=None``, a function without arguments whose value the epilogue adds to the tile
        in float32 before it is stored.
      grid: tiles (and steps) along each axis; of one axis also as an integer.
      operands, results: names of the inputs and outputs, in order.
      in_specs, out_specs: one BlockSpec each, as for ``pl.pallas_call``.
      out_shape: one ShapeDtypeStruct a result.
      scratch_shapes: as for ``pl.pallas_call``; what a tile finds there is anything.
      has_addend: whether ``body`` takes ``addend``.
      reference: the same function of the operands in plain JAX, used by the ``xla`` backend.
      loop: the kernel as it is written for target ``mosaic_gpu``, where it has no grid but is
        handed its loop over tiles; ``body`` may then be None, and is for other targets.
      triton: the kernel as it is written for target ``triton``, see
        ``triton_kernel.triton_kernel``; ``body`` may then be None too.
      name: shown in programs and messages; that of ``body`` unless given.

    Raises:
      InputError: an argument is another kind of thing, or arrays, names and specs do not pair up.
    """

    body: Callable[..., None] | None
    grid: tuple[int, ...] = ()
    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    in_specs: Sequence[pl.BlockSpec] = ()
    out_specs: Sequence[pl.BlockSpec] = ()
    out_shape: Sequence[jax.ShapeDtypeStruct] = ()
    scratch_shapes: Sequence[Any] = ()
    has_addend: bool = False
    reference: Callable[..., Any] | None = None
    loop: LoopBody | None = None
    triton: TritonBody | None = None
    name: str = ""
    grid_spec: InitVar[Any] = None

    def __post_init__(self, grid_spec: Any) -> None:
        object.__setattr__(self, "name", self.name or _name(self.body))
        if grid_spec is not None:
            raise InputError(
                f"{self.name}: grid_spec is not taken; give its grid, in_specs, out_specs and "
                f"scratch_shapes themselves"
            )
        for what in ("operands", "results"):
            object.__setattr__(self, what, _names(self.name, what, getattr(self, what)))
        for what in ("in_specs", "out_specs", "out_shape", "scratch_shapes"):
            given = getattr(self, what)
            several = tuple(given) if isinstance(given, Sequence) else (given,)
            object.__setattr__(self, what, several)
        for names, what in (
            ("operands", "in_specs"),
            ("results", "out_specs"),
            ("results", "out_shape"),
        ):
            named, found = getattr(self, names), getattr(self, what)
            if len(named) != len(found):
                raise InputError(
                    f"{self.name}: {names} names {len(named)} arrays {named}, {what} has "
                    f"{len(found)}; each array needs a name in {names} and one of {what}, found "
                    f"{found}"
                )
        for name, shape in zip(self.results, self.out_shape, strict=True):
            if not (hasattr(shape, "shape") and hasattr(shape, "dtype")):
                raise InputError(
                    f"{self.name}: {name} needs a jax.ShapeDtypeStruct in out_shape, found "
                    f"{shape!r}"
                )
        if self.loop is not None and not hasattr(self.loop, "unsupported_reason"):
            raise InputError(f"{self.name}: loop needs a LoopBody, found {self.loop!r}")
        if self.triton is not None and not isinstance(self.triton, TritonBody):
            raise InputError(
                f"{self.name}: triton needs what triton_kernel makes of an annotated kernel, found "
                f"{self.triton!r}"
            )
        object.__setattr__(self, "grid", _grid(self.name, self.grid))
        named = (
            *zip(self.operands, self.in_specs, strict=True),
            *zip(self.results, self.out_specs, strict=True),
        )
        for name, spec in named:
            check_spec(f"{self.name}: {name}", spec, self.grid)
        if self.loop is None and self.triton is None and (fault := self.body_fault()):
            raise InputError(fault)
        reference: Any = self.reference
        count = len(self.operands)
        if reference is not None and not (callable(reference) and takes(reference, count)):
            raise InputError(
                f"{self.name}: reference must be a function of {count} arrays, one for each of "
                f"{', '.join(self.operands) or 'no operands'}, found {reference!r}"
            )
        for scratch in self.scratch_shapes:
            if not hasattr(scratch, "get_ref_aval"):
                raise InputError(
                    f"{self.name}: scratch_shapes needs references such as pltpu.VMEM(shape, "
                    f"dtype), found {scratch!r}"
                )
        repeated = [*self.operands, *self.results]
        if len(set(repeated)) != len(repeated):
            raise InputError(f"{self.name}: operand and result names repeat: {repeated}")

    def body_fault(self) -> str | None:
        """Why ``body`` is none that runs on a grid; None where it is one."""
        if self.body is None and (self.loop is not None or self.triton is not None):
            target = "mosaic_gpu" if self.triton is None else "triton"
            return (
                f"{self.name}: a kernel for {target} alone, without a body that runs on a grid; "
                f"compile it with target={target!r}"
            )
        refs = [*self.operands, *self.results, *map(str, self.scratch_shapes)]
        addend = {"addend": None} if self.has_addend else {}
        body: Any = self.body
        if not callable(body) or not takes(body, len(refs), **addend):
            by_name = " and addend by name" if addend else ""
            return (
                f"{self.name}: body must be a function of {len(refs)} references, one for each of "
                f"{', '.join(refs)}{by_name}, found {self.body!r}"
            )
        return None

    @property
    def grid_body(self) -> Callable[..., None]:
        """``body``; raises UnsupportedError where the kernel has none that runs on a grid."""
        fault = self.body_fault()
        if self.body is None or fault:
            raise UnsupportedError(fault)
        return self.body

    @property
    def loop_body(self) -> LoopBody:
        """``loop``; raises UnsupportedError where the kernel has none."""
        if self.loop is None:
            raise UnsupportedError(
                f"kernel {self.name} is not written for mosaic_gpu: it has no loop body"
            )
        return self.loop

    @property
    def triton_body(self) -> TritonBody:
        """``triton``; raises UnsupportedError where the kernel has none."""
        if self.triton is None:
            raise UnsupportedError(
                f"kernel {self.name} is not written for triton; make it of an annotated Triton "
                f"kernel with triton_kernel"
            )
        return self.triton

    def __call__(self, *operands: jax.Array, interpret: Any = False) -> list[jax.Array]:
        """Runs the kernel alone, in its natural order; one array a result."""
        body = self.grid_body
        return pl.pallas_call(
            asked_outside(body, self.grid) if interpret else body,
            grid=self.grid,
            in_specs=list(self.in_specs),
            out_specs=list(self.out_specs),
            out_shape=list(self.out_shape),
            scratch_shapes=list(self.scratch_shapes),
            interpret=interpret,
            name=self.name,
        )(*operands)

    def unfused_fault(self, runner: str) -> str | None:
        """Why ``runner`` cannot compute it in plain JAX or Pallas; None where it can."""
        if self.reference is not None or not self.body_fault():
            return None
        return (
            f"{runner} runs a kernel's plain-JAX reference or its ordinary Pallas body, and kernel "
            f"{self.name} has neither; give it reference=, a function of the operands "
            f"{', '.join(self.operands)} in plain JAX"
        )

    def unfused(self, *operands: jax.Array, runner: str, interpret: Any = False) -> list[jax.Array]:
        """What ``reference`` makes of the operands, or else the body alone; one array a result.

        Raises InputError unless the reference gives what ``out_shape`` says; UnsupportedError, in
        the name of ``runner``, where there is neither.
        """
        if fault := self.unfused_fault(runner):
            raise UnsupportedError(fault)
        if self.reference is None:
            return self(*operands, interpret=interpret)
        given = self.reference(*operands)
        outs = list(given) if isinstance(given, list | tuple) else [given]
        if len(outs) != len(self.results):
            raise InputError(
                f"{self.name}: reference gives {len(outs)} arrays, the kernel has "
                f"{len(self.results)} results {self.results}; give one for each, in this order"
            )
        for name, out, wanted in zip(self.results, outs, self.out_shape, strict=True):
            if not isinstance(out, jax.Array | np.ndarray):
                raise InputError(
                    f"{self.name}: reference gives {out!r} for result {name}, needs an array"
                )
            empty = out.size == 0 and 0 in wanted.shape
            if out.dtype != wanted.dtype or (tuple(out.shape) != tuple(wanted.shape) and not empty):
                raise InputError(
                    f"{self.name}: reference gives {_typed(out)} for result {name}, out_shape has "
                    f"{_typed(wanted)}; make the two agree"
                )
        return outs

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the grid axes: ``g0``, ``g1``, …"""
        return tuple(f"g{i}" for i in range(len(self.grid)))

    @property
    def reduction_axes(self) -> tuple[int, ...]:
        """Grid axes on which no output's block depends."""
        named = zip(self.results, self.out_specs, strict=True)
        maps = [block_indices(spec, self.grid, f"{self.name}: {name}") for name, spec in named]
        return tuple(a for a in range(len(self.grid)) if not any(_varies(m, a) for m in maps))

    def read(
        self, shapes: Mapping[str, tuple[int, ...]], *, source: str = ""
    ) -> tuple[TileSpace, dict[str, AnyAccess]]:
        """Tile space and accesses of every result and of the operands named in ``shapes``.

        ``shapes`` gives extents in elements; ``source`` says in messages who gave them. Accesses
        whose dimensions each follow one grid axis come as Access, others as BoxAccess.

        Raises InputError where a block begins outside its array, operands and blocks end apart (see
        ``check_reach``), or a result is not written whole, each block of it by one tile.
        """
        specs = dict(zip(self.operands, self.in_specs, strict=True))
        found = {name: (specs[name], tuple(shape), False) for name, shape in shapes.items()}
        for name, spec, out in zip(self.results, self.out_specs, self.out_shape, strict=True):
            found[name] = (spec, tuple(out.shape), True)
        for name, (spec, shape, write) in found.items():
            self.check_blocks(name, spec, shape, source="" if write else source)
            if not write:
                self.check_reach(name, shape, source=source, whole=True)
        reduction = self.reduction_axes
        for name, (spec, shape, write) in found.items():
            if write:
                check_written(self.name, name, spec, shape, self.grid, reduction)
        axes = [Axis(n, count, 1) for n, count in zip(self.axis_names, self.grid, strict=True)]
        followed = {n: self._follow(n, spec, shape) for n, (spec, shape, _) in found.items()}
        for name, dims in followed.items():
            spec, shape, _ = found[name]
            for d, axis in enumerate(dims or ()):
                if (
                    axis is not None
                    and axes[axis].tile == 1
                    and axes[axis].extent == self.grid[axis]
                ):
                    axes[axis] = Axis(axes[axis].name, shape[d], block_shape(spec, shape)[d])
        space = TileSpace(
            tuple(
                Axis(axis.name, axis.extent, axis.tile, reduction=i in reduction)
                for i, axis in enumerate(axes)
            )
        )
        return space, {
            name: self._access(name, found[name], followed[name], axes, space) for name in found
        }

    def check_blocks(
        self, name: str, spec: pl.BlockSpec, shape: tuple[int, ...], *, source: str = ""
    ) -> None:
        """Raises InputError unless every block of ``name`` begins inside its ``shape``.

        A copy of a block that does not would touch another array's memory. ``source`` says who gave
        the shape.
        """
        block = block_shape(spec, shape)
        given = f"{tuple(shape)}, as {source} has it," if source else f"{tuple(shape)}"
        if len(block) != len(shape):
            raise InputError(
                f"{self.name}: blocks of {name} have {len(block)} dimensions, its shape is {given}"
            )
        counts = [max(-(-extent // size), 1) for extent, size in zip(shape, block, strict=True)]
        index = block_indices(spec, self.grid, f"{self.name}: {name}", len(shape))
        if index.shape[-1] != len(shape):
            raise InputError(
                f"{self.name}: the index map of {name} gives {index.shape[-1]} indices, its blocks "
                f"{block} have {len(shape)} dimensions"
            )
        outside = np.argwhere(((index < 0) | (index >= counts)).any(-1))
        if len(outside):
            point = tuple(map(int, outside[0]))
            raise InputError(
                f"{self.name}: at grid point {point} the index map of {name} gives block "
                f"{tuple(map(int, index[point]))}, but blocks {block} of shape {given} are "
                f"numbered from 0 to {tuple(count - 1 for count in counts)}; {len(outside)} of "
                f"{index[..., 0].size} grid points are outside"
            )

    def check_reach(
        self, name: str, shape: tuple[int, ...], *, source: str = "", whole: bool = False
    ) -> None:
        """Raises InputError where blocks of operand ``name`` reach beyond its ``shape``.

        A block beside the last element holds anything there, which an ordinary body would compute
        with; only where a result ends in the same way is that cut off. With ``whole``, blocks must
        reach the end of ``shape``, too. ``source`` says who gave the shape.
        """
        specs = dict(zip(self.operands, self.in_specs, strict=True))
        block = block_shape(specs[name], shape)
        index = block_indices(specs[name], self.grid, f"{self.name}: {name}", len(shape))
        if not index.size:
            return
        ends = ((index.reshape(-1, len(shape)).max(axis=0) + 1) * block).tolist()
        for d, (end, extent) in enumerate(zip(ends, shape, strict=True)):
            if end > max(extent, 1):
                others = self.loop is not None or self.triton is not None  # they read zeros there
                if others or self._ends_alike(index[..., d], block[d], extent):
                    continue
                fault = "tiles would compute with what lies beyond it"
            elif whole and end < extent:
                fault = "no tile reads the rest"
            else:
                continue
            given = f"{tuple(shape)}, as {source} has it" if source else f"{tuple(shape)}"
            raise InputError(
                f"{self.name}: blocks {block} of {name} on grid {self.grid} reach to "
                f"{tuple(ends)}, its shape is {given}: along dimension {d} {fault}; make the two "
                f"agree"
            )

    def _ends_alike(self, index: np.ndarray, block: int, extent: int) -> bool:
        """Whether blocks along some dimension of a result are where these are, with its extent."""
        for name, spec, out in zip(self.results, self.out_specs, self.out_shape, strict=True):
            sizes = block_shape(spec, tuple(out.shape))
            made = block_indices(spec, self.grid, f"{self.name}: {name}", len(out.shape))
            for d, size in enumerate(sizes):
                if (size, out.shape[d]) == (block, extent) and np.array_equal(made[..., d], index):
                    return True
        return False

    def _follow(
        self, name: str, spec: pl.BlockSpec, shape: tuple[int, ...]
    ) -> tuple[int | None, ...] | None:
        """Per dimension the grid axis it follows (None: taken whole); None if one follows none."""
        index = block_indices(spec, self.grid, f"{self.name}: {name}", len(shape))
        axes = np.indices(self.grid)
        dims: list[int | None] = []
        for d, (extent, block) in enumerate(zip(shape, block_shape(spec, shape), strict=True)):
            equal = [a for a in range(len(self.grid)) if np.array_equal(index[..., d], axes[a])]
            equal = [a for a in equal if -(-extent // block) == self.grid[a]]
            if block >= extent and not index[..., d].any():
                dims.append(None)
            elif equal:
                dims.append(equal[0])
            else:
                return None
        return tuple(dims)

    def _access(
        self,
        name: str,
        entry: tuple[pl.BlockSpec, tuple[int, ...], bool],
        dims: tuple[int | None, ...] | None,
        axes: Sequence[Axis],
        space: TileSpace,
    ) -> AnyAccess:
        spec, shape, write = entry
        block = block_shape(spec, shape)
        if dims is not None and all(
            a is None or (axes[a].tile, axes[a].extent) == (block[d], shape[d])
            for d, a in enumerate(dims)
        ):
            names = tuple(None if a is None else axes[a].name for a in dims)
            return Access(name, shape, names, write)
        index = block_indices(spec, self.grid, f"{self.name}: {name}", len(shape))
        order = [i for i, axis in enumerate(space.axes) if not axis.reduction]
        order += [i for i, axis in enumerate(space.axes) if axis.reduction]
        index = index.transpose(*order, len(self.grid))
        index = index.reshape(space.num_tiles, space.num_steps, len(shape))
        lo = np.minimum(index * np.array(block), np.array(shape))
        return BoxAccess(name, shape, lo, np.minimum(lo + np.array(block), np.array(shape)), write)


def _name(body: Any) -> str:
    """The name of the function that ``body`` is or was made of."""
    while isinstance(body, functools.partial):
        body = body.func
    name = getattr(body, "__name__", "")
    return name if name.isidentifier() else "kernel"


def _typed(array: Any) -> str:
    """dtype and shape, such as ``float32[4, 8]``."""
    return f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _names(where: str, what: str, given: Any) -> tuple[str, ...]:
    """Names of arrays; raises InputError where they are none, such as letters of one string."""
    if (
        isinstance(given, str)
        or not isinstance(given, Sequence)
        or not all(isinstance(name, str) for name in given)
    ):
        raise InputError(f"{where}: {what} must be a tuple of names, found {given!r}")
    return tuple(given)


def _grid(where: str, given: Any) -> tuple[int, ...]:
    """A grid as integers; raises InputError where it is none."""
    extents = given if isinstance(given, Sequence) else (given,)
    try:
        grid = tuple(map(operator.index, extents))
    except TypeError:
        grid = (-1,)
    if any(isinstance(extent, bool) for extent in extents) or any(extent < 0 for extent in grid):
        raise InputError(f"{where}: grid must be integers of at least 0, found {given!r}")
    return grid


def _varies(index: np.ndarray, axis: int) -> bool:
    return bool(np.any(np.diff(index, axis=axis)))
