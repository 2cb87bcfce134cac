"""Blocked matrix product for TPU, in Pallas: any contraction of two operands named by letters."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.errors import InputError
from syncopate_jax.kernel.local import PallasKernel

MATRIX_LETTERS = "mnk"


def matmul(
    lhs: str,
    rhs: str,
    out: str,
    sizes: Mapping[str, int],
    *,
    tiles: Mapping[str, int],
    dtype: jax.typing.DTypeLike,
    out_dtype: jax.typing.DTypeLike,
) -> PallasKernel:
    """``out = sum over the letters that out lacks of lhs * rhs``, accumulated in float32.

    Dimensions are letters: ``m``, ``n`` and ``k`` are cut into tiles (two of them in each operand,
    ``tiles`` gives the elements of a tile), every other letter is walked one index at a time.
    Letters in brackets, such as ``(Gm)``, are one dimension, the first letter slowest; the tile of
    the last must then divide its extent.

    Args:
      lhs, rhs, out: letters of each operand, such as ``"Gbmk"``, ``"kn"``, ``"b(Gm)n"``.
      sizes: extent of every letter, in elements.
      tiles: tile size of the matrix letters; one that is reduced must divide its extent.
      dtype: of the operands.
      out_dtype: of the result.

    Returns:
      A local kernel with operands ``lhs`` and ``rhs`` and result ``out``, with an addend.

    Raises:
      InputError: when an operand has not two matrix letters, or an extent is not divided.
    """
    groups = {
        name: split_groups(given) for name, given in (("lhs", lhs), ("rhs", rhs), ("out", out))
    }
    lhs, rhs, out = ("".join(groups[name]) for name in ("lhs", "rhs", "out"))
    reduced = [letter for letter in dict.fromkeys(lhs + rhs) if letter not in out]
    for operand in (lhs, rhs, out):
        if sum(letter in MATRIX_LETTERS for letter in operand) != 2:
            raise InputError(f"matmul: operand {operand!r} needs two of the letters m, n, k")
    grouped = [group[-1] for found in groups.values() for group in found if len(group) > 1]
    for letter in (*reduced, *grouped):
        if letter in MATRIX_LETTERS and sizes[letter] % tiles[letter]:
            raise InputError(
                f"matmul: letter {letter}, which is reduced or in brackets, has extent "
                f"{sizes[letter]}, which its tile {tiles[letter]} does not divide"
            )
    axes = [*out, *reduced]
    blocks = {letter: tiles[letter] for letter in axes if letter in MATRIX_LETTERS}
    grid = tuple(-(-sizes[letter] // blocks.get(letter, 1)) for letter in axes)
    body = functools.partial(
        _body,
        contract=_contracting(lhs, rhs, out),
        reduced={len(out) + i: grid[len(out) + i] for i in range(len(reduced))},
    )
    tile = tuple(blocks[letter] for letter in out if letter in MATRIX_LETTERS)
    return PallasKernel(
        body=body,
        grid=grid,
        operands=("lhs", "rhs"),
        results=("out",),
        in_specs=tuple(block_spec(groups[name], axes, blocks, grid) for name in ("lhs", "rhs")),
        out_specs=(block_spec(groups["out"], axes, blocks, grid),),
        out_shape=(jax.ShapeDtypeStruct(group_shape(groups["out"], sizes), out_dtype),),
        scratch_shapes=(pltpu.VMEM(tile, jnp.float32),),
        has_addend=True,
        reference=functools.partial(reference, groups=groups, sizes=sizes, out_dtype=out_dtype),
        name="matmul",
    )


def _body(
    lhs_ref: jax.Ref,
    rhs_ref: jax.Ref,
    out_ref: jax.Ref,
    acc_ref: jax.Ref,
    *,
    contract: tuple[int, int, bool],
    reduced: Mapping[int, int],
    addend: Callable[[], jax.Array] | None = None,
) -> None:
    visits = [(pl.program_id(axis), count) for axis, count in reduced.items()]
    first = functools.reduce(jnp.logical_and, [i == 0 for i, _ in visits], jnp.bool_(True))
    last = functools.reduce(jnp.logical_and, [i == n - 1 for i, n in visits], jnp.bool_(True))

    @pl.when(first)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += _dot(lhs_ref[...], rhs_ref[...], contract)

    @pl.when(last)
    def _() -> None:
        acc = acc_ref[...] if addend is None else acc_ref[...] + addend()
        out_ref[...] = acc.astype(out_ref.dtype)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int, bool]) -> jax.Array:
    a_dim, b_dim, swap = contract
    if swap:
        a, b, a_dim, b_dim = b, a, b_dim, a_dim
    return lax.dot_general(
        a,
        b,
        (((a_dim,), (b_dim,)), ((), ())),
        precision=_precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def _precision(dtype: jnp.dtype) -> lax.Precision | None:
    """bfloat16 passes would lose float32 operands' low bits; narrower types are exact anyway."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _contracting(lhs: str, rhs: str, out: str) -> tuple[int, int, bool]:
    """Positions of the contracted matrix letter in the 2-D blocks; whether to swap the operands."""
    a, b, c = ([x for x in letters if x in MATRIX_LETTERS] for letters in (lhs, rhs, out))
    (shared,) = [x for x in a if x in b and x not in c]
    return a.index(shared), b.index(shared), c[0] in b


def split_groups(letters: str) -> tuple[str, ...]:
    """``"b(Gm)n"`` as ``("b", "Gm", "n")``: the letters of each dimension."""
    return tuple(a or b for a, b in re.findall(r"\((\w+)\)|(\w)", letters))


def group_shape(groups: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Extents of dimensions given by their letters."""
    return tuple(math.prod(sizes[letter] for letter in group) for group in groups)


def block_spec(
    groups: Sequence[str], axes: list[str], blocks: Mapping[str, int], grid: Sequence[int]
) -> pl.BlockSpec:
    """The blocks of an operand whose dimensions are the letters ``groups``, over ``axes``."""

    def index(group: str, at: Sequence[Any]) -> Any:
        total: Any = 0
        for letter in group:
            axis = axes.index(letter)
            total = total * grid[axis] + at[axis]
        return total

    return pl.BlockSpec(
        tuple(blocks.get(group[-1]) for group in groups),
        lambda *at: tuple(index(group, at) for group in groups),
    )


def reference(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    groups: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """The same in plain JAX; a letter that only ``out`` has must have extent 1.

    It too accumulates in float32 (or what is wider of the result's type) and rounds once.
    """
    a, b, c = ("".join(groups[name]) for name in ("lhs", "rhs", "out"))
    found = "".join(letter for letter in c if letter in a + b)
    wide = jnp.promote_types(out_dtype, jnp.float32)
    product = functools.partial(
        jnp.einsum,
        f"{a},{b}->{found}",
        precision=_precision(lhs.dtype),
        preferred_element_type=wide,
    )
    out = lax.platform_dependent(
        lhs.reshape(group_shape(a, sizes)),
        rhs.reshape(group_shape(b, sizes)),
        # XLA's CPU has no product of bfloat16 in float32 where the result is transposed.
        cpu=lambda lhs, rhs: product(lhs.astype(wide), rhs.astype(wide)),
        default=product,
    )
    return out.astype(out_dtype).reshape(group_shape(groups["out"], sizes))
