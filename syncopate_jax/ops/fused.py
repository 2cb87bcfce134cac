"""Realising a contraction with an exchange: choosing the backend, and building its operator."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from syncopate_jax import compiler
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.plan import Plan
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.ops.blocked import Blocked, block
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options
from syncopate_jax.pallas_kernels import contraction_mosaic_gpu, matmul_tpu
from syncopate_jax.registry import backends, templates
from syncopate_jax.runtime import mesh
from syncopate_jax.runtime.operator import Operator

TEMPLATES = {
    "all_gather": "all_gather_swizzle",
    "reduce_scatter": "reduce_scatter_direct",
    "all_reduce": "all_reduce_two_shot",
    "all_to_all": "all_to_all_waves",
}
LARGEST_TILE = {
    "tpu": {"m": 256, "n": 256, "k": 512},
    "mosaic_gpu": {"m": 256, "n": 256, "k": 256},
}


def choose_backend(spec: Contraction, options: Options) -> str:
    """The backend to use: as asked, or for ``auto`` what is known to be fastest, else ``xla``."""
    if spec.kind == "none":
        return "xla"
    if options.backend == "auto":
        return "xla"
    backends.get(options.backend)  # raises for a name that is not registered
    return options.backend


def contract(
    spec: Contraction,
    axis_names: tuple[str, ...],
    options: Options,
    out_dtype: jnp.dtype,
    lhs: jax.Array,
    rhs: jax.Array,
) -> jax.Array:
    """``spec`` as one fused call; arguments as in ``contraction.contract``."""
    ranks = mesh.ranks(axis_names)
    if 0 in (*lhs.shape, *rhs.shape):
        raise UnsupportedError(
            f"a fused {spec.kind} of empty operands {lhs.shape} and {rhs.shape} has nothing to "
            f"compute; use backend 'xla'"
        )
    layout = block(spec, lhs.shape, rhs.shape, ranks)
    operator, layout = build(spec.kind, layout, str(lhs.dtype), str(out_dtype), axis_names, options)
    operands = (x.reshape(layout.operand_shape(p)) for p, x in (("lhs", lhs), ("rhs", rhs)))
    (out,) = operator(*operands)
    return out.reshape(layout.result)


@functools.lru_cache(maxsize=512)
def build(
    kind: str,
    layout: Blocked,
    dtype: str,
    out_dtype: str,
    axis_names: tuple[str, ...],
    options: Options,
) -> tuple[Operator, Blocked]:
    """The operator of a blocked contraction, and the layout of its operands; memoised."""
    target = options.target or "tpu"
    if target not in LARGEST_TILE:
        known = ", ".join(LARGEST_TILE)
        raise InputError(f"target: no local kernel is written for {target!r}; known: {known}")
    make = prepare_gpu if target == "mosaic_gpu" else prepare
    layout, kernel, plan = make(kind, layout, LARGEST_TILE[target], dtype, out_dtype, options)
    launch = options.launched.using(folded=mesh.is_folded(axis_names))
    operator = compiler.compile(
        kernel,
        plan,
        {plan.tensors[0].name: layout.place},
        axis_name=axis_names,
        backend=options.backend,
        target=target,
        order=options.order,
        launch=launch,
    )
    return operator, layout


def prepare(
    kind: str,
    layout: Blocked,
    largest: Mapping[str, int],
    dtype: str,
    out_dtype: str,
    options: Options,
) -> tuple[Blocked, PallasKernel, Plan]:
    """Layout, local kernel and plan of a contraction, with tiles of at most ``largest``."""
    tiles = choose_tiles(layout, largest, options.tile_sizes)
    if layout.split in tiles and layout.extents[layout.split] % tiles[layout.split]:
        layout = layout.ungrouped()
    plan = _plan(kind, layout, dtype if layout.place != "out" else out_dtype, tiles, options)
    kernel = matmul_tpu.matmul(
        layout.lhs,
        layout.rhs,
        layout.out,
        layout.extents,
        tiles=tiles,
        dtype=dtype,
        out_dtype=out_dtype,
    )
    return layout, kernel, plan


def prepare_gpu(
    kind: str,
    layout: Blocked,
    largest: Mapping[str, int],
    dtype: str,
    out_dtype: str,
    options: Options,
) -> tuple[Blocked, PallasKernel, Plan]:
    """As ``prepare``, for the tensor cores of a GPU: tiles of a fixed size, cut by the edge."""
    asked = options.tile_sizes
    unknown = set(asked) - set(largest)
    if unknown:
        raise InputError(f"tiles: {sorted(unknown)} are no letters; known: {sorted(largest)}")
    tiles, config = contraction_mosaic_gpu.choose_config(
        layout.lhs, layout.out, layout.extents, asked, out_dtype
    )
    if layout.split in tiles and layout.extents[layout.split] % tiles[layout.split]:
        layout = layout.ungrouped()
    plan = _plan(kind, layout, dtype if layout.place != "out" else out_dtype, tiles, options)
    kernel = contraction_mosaic_gpu.contraction(
        layout.lhs,
        layout.rhs,
        layout.out,
        layout.extents,
        config=config,
        dtype=dtype,
        out_dtype=out_dtype,
    )
    return layout, kernel, plan


def choose_tiles(
    layout: Blocked, largest: Mapping[str, int], asked: Mapping[str, int]
) -> dict[str, int]:
    """Tile size of each matrix letter: as asked, else the largest divisor up to ``largest``.

    A letter that is not reduced and has no divisor near ``largest`` is cut raggedly instead.
    """
    unknown = set(asked) - set(largest)
    if unknown:
        raise InputError(f"tiles: {sorted(unknown)} are no letters; known: {sorted(largest)}")
    tiles = {}
    for letter, most in largest.items():
        extent = layout.extents[letter]
        size = min(asked.get(letter, most), extent)
        divisor = next(d for d in range(size, 0, -1) if extent % d == 0)
        reduced = letter not in layout.out
        keep = letter in asked or (not reduced and divisor < size // 2)
        tiles[letter] = size if keep and not (reduced and extent % size) else divisor
    return tiles


def _plan(
    kind: str,
    layout: Blocked,
    dtype: str,
    tiles: Mapping[str, int],
    options: Options,
) -> Plan:
    if isinstance(options.plan, Plan):
        return options.plan
    name = options.plan or TEMPLATES[kind]
    axis, pieces = _split(kind, layout, tiles, options.split or 1)
    common = {"dtype": dtype, "split": pieces, "split_axis": axis}
    if kind == "all_gather":
        common |= {"axis": layout.gather, "tensor": "x"}
    elif kind == "all_to_all":
        common |= {"split_from": layout.gather, "split_to": layout.scatter, "tensor": "x"}
        common |= {"produced": layout.place == "out"}
    else:
        common |= {"axis": max(layout.scatter, 0), "tensor": "y"}
    return templates.get(name)(layout.ranks, layout.plan_shape, **common)


def _split(kind: str, layout: Blocked, tiles: Mapping[str, int], wanted: int) -> tuple[int, int]:
    """The dimension to cut chunks along, and into how many pieces.

    Pieces that land beside a tile, to be added to it, must hold whole tiles.
    """
    letters = layout.exchanged
    axis = next(d for d, letter in enumerate(letters) if letter in matmul_tpu.MATRIX_LETTERS)
    letter = letters[axis]
    if kind in ("all_gather", "all_to_all"):
        return axis, wanted
    extent, tile = layout.extents[letter], tiles[letter]
    whole = [p for p in range(1, wanted + 1) if extent % p == 0 and (extent // p) % tile == 0]
    return axis, max(whole, default=1)
