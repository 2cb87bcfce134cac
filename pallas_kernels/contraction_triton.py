"""Any contraction of two operands named by letters, as an annotated Triton kernel.

The operands are as in ``matmul_tpu``: two of the letters ``m``, ``n``, ``k`` in each are cut into
tiles, every other letter is walked one index at a time. The kernel's text is made for the letters,
so that it has the loops and addresses of that contraction and no others.
"""

from __future__ import annotations

import functools
import linecache
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from syncopate_jax.errors import InputError
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.triton_kernel import triton_kernel
from syncopate_jax.pallas_kernels import matmul_tpu, tile_columns

DTYPES = ("bfloat16", "float16", "float32")
LEAST_TILE = 16  # elements along each side of what the tensor cores multiply
SHARED_BYTES = 220 * 1024  # of the 227 KiB of a Hopper block


def contraction(
    lhs: str,
    rhs: str,
    out: str,
    sizes: Mapping[str, int],
    *,
    tiles: Mapping[str, int],
    dtype: jax.typing.DTypeLike,
    out_dtype: jax.typing.DTypeLike,
    num_warps: int = 8,
    num_stages: int | None = None,
) -> PallasKernel:
    """``out = sum over the letters that out lacks of lhs * rhs``, accumulated in float32.

    Args:
      lhs, rhs, out: letters of each operand, such as ``"Gbmk"``, ``"kn"``, ``"bGmn"``.
      sizes: extent of every letter, in elements.
      tiles: elements of a tile along ``m``, ``n`` and ``k``; powers of two.
      dtype, out_dtype: of the operands and of the result.
      num_warps, num_stages: as for Triton; by default as many stages as shared memory holds.

    Returns:
      A local kernel with operands ``lhs`` and ``rhs`` and result ``out``, with an addend.

    Raises:
      InputError: an operand has not two matrix letters, or a tile is no power of two from 16 on.
    """
    for name, letters in (("lhs", lhs), ("rhs", rhs), ("out", out)):
        if sum(letter in matmul_tpu.MATRIX_LETTERS for letter in letters) != 2:
            raise InputError(f"contraction: {name} {letters!r} needs two of the letters m, n, k")
    for letter, tile in tiles.items():
        if tile < LEAST_TILE or tile & (tile - 1):
            raise InputError(
                f"contraction: tiles of {letter} are {tile} elements; Triton needs a power of two "
                f"from {LEAST_TILE} on"
            )
    if str(jnp.dtype(dtype)) not in DTYPES:
        raise InputError(f"contraction: operands are {', '.join(DTYPES)}, found {jnp.dtype(dtype)}")
    used = dict.fromkeys(lhs + rhs + out)
    shapes = {name: [sizes[x] for x in found] for name, found in _named(lhs, rhs, out)}
    values = {f"SIZE_{x}": sizes[x] for x in used}
    values |= {f"BLOCK_{x}": tiles[x] for x in used if x in matmul_tpu.MATRIX_LETTERS}
    for name, found in _named(lhs, rhs, out):
        for d, letter in enumerate(found):
            values[f"{name.upper()}_{letter}"] = math.prod(shapes[name][d + 1 :])
    groups = {name: tuple(found) for name, found in _named(lhs, rhs, out)}
    if num_stages is None:
        num_stages = _stages(out, tiles, jnp.dtype(dtype).itemsize)
    return triton_kernel(
        _function(lhs, rhs, out),
        values,
        out_dtypes={"out": out_dtype},
        reference=functools.partial(
            matmul_tpu.reference, groups=groups, sizes=sizes, out_dtype=out_dtype
        ),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def choose_tiles(
    out: str, sizes: Mapping[str, int], asked: Mapping[str, int], *, workers: int
) -> dict[str, int]:
    """Tiles of a contraction into ``out``; ``asked`` has sizes by letter, in elements.

    Their columns are fewer where that keeps more of ``workers`` programs busy (``tile_columns``).
    """
    rows, columns = (x for x in out if x in matmul_tpu.MATRIX_LETTERS)
    (depth,) = set(matmul_tpu.MATRIX_LETTERS) - {rows, columns}

    def usual(letter: str, most: int) -> int:
        return asked.get(letter, max(min(most, _power(sizes[letter])), LEAST_TILE))

    height = usual(rows, 128)
    width = usual(columns, tile_columns.columns(out, sizes, height, workers))
    return {rows: height, columns: width, depth: usual(depth, 64)}


def _power(size: int) -> int:
    """The least power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def _stages(out: str, tiles: Mapping[str, int], itemsize: int) -> int:
    """As many stages of both operands as shared memory holds, up to 4."""
    (depth,) = set(matmul_tpu.MATRIX_LETTERS) - set(out)
    sides = sum(tile for letter, tile in tiles.items() if letter != depth)
    return max(2, min(4, SHARED_BYTES // (sides * tiles[depth] * itemsize)))


def _named(lhs: str, rhs: str, out: str) -> tuple[tuple[str, str], ...]:
    return ("lhs", lhs), ("rhs", rhs), ("out", out)


@functools.cache
def _function(lhs: str, rhs: str, out: str) -> Callable[..., None]:
    """The kernel's function, whose source can be inspected like that of a notebook's cell.

    It is not run: only the rewritten kernel is, which has Triton's names.
    """
    text = source(lhs, rhs, out)
    file = f"<contraction {lhs},{rhs}->{out}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile("from __future__ import annotations" + text, file, "exec"), namespace)
    return namespace["contraction_kernel"]


def source(lhs: str, rhs: str, out: str) -> str:
    """The annotated kernel's text."""
    return "\n".join(_Text(lhs, rhs, out).lines()) + "\n"


@dataclass(frozen=True, slots=True)
class _Text:
    """Writes the kernel; letters name axes, ``SIZE_x`` is an extent, ``LHS_x`` a stride."""

    lhs: str
    rhs: str
    out: str

    @property
    def matrix(self) -> tuple[str, str, str]:
        """Letters of rows, columns and depth."""
        rows, columns = (x for x in self.out if x in matmul_tpu.MATRIX_LETTERS)
        (depth,) = set(matmul_tpu.MATRIX_LETTERS) - {rows, columns}
        return rows, columns, depth

    @property
    def reduced(self) -> list[str]:
        """Letters that are reduced, the depth last: it is cut into tiles."""
        found = [x for x in dict.fromkeys(self.lhs + self.rhs) if x not in self.out]
        return sorted(found, key=lambda x: x in matmul_tpu.MATRIX_LETTERS)

    @property
    def axes(self) -> list[str]:
        return [*self.out, *self.reduced]

    def lines(self) -> list[str]:
        body = [*self._directives(), *self._dispatch(), *self._start(), *self._loop()]
        return ["", *self._signature(), *(f"    {line}" for line in [*body, *self._store()])]

    def _signature(self) -> list[str]:
        """Parameters; the text's first line is taken by an import, so that lines agree."""
        names = [f"SIZE_{x}" for x in self.axes]
        names += [f"BLOCK_{x}" for x in self.axes if x in matmul_tpu.MATRIX_LETTERS]
        for name, letters in _named(self.lhs, self.rhs, self.out):
            names += [f"{name.upper()}_{x}" for x in letters]
        arrays = ["    lhs_ptr,", "    rhs_ptr,", "    out_ptr,"]
        constants = [f"    {name}: tl.constexpr," for name in names]
        return ["def contraction_kernel(", *arrays, *constants, "):"]

    def _directives(self) -> list[str]:
        lines = []
        for x in self.axes:
            tiled = x in matmul_tpu.MATRIX_LETTERS
            size = f"extent=SIZE_{x}, tile=BLOCK_{x}" if tiled else f"count=SIZE_{x}"
            lines.append(f"# syncopate: axis {x}: {size}")
        for name, letters in _named(self.lhs, self.rhs, self.out):
            word = "writes" if name == "out" else "reads"
            lines.append(f"# syncopate: {word} {name}_ptr[{', '.join(letters)}] as {name}")
        return lines

    def _dispatch(self) -> list[str]:
        lines = ["tile = tl.program_id(0)"]
        for x in reversed(self.out):
            tiled = x in matmul_tpu.MATRIX_LETTERS
            count = f"tl.cdiv(SIZE_{x}, BLOCK_{x})" if tiled else f"SIZE_{x}"
            lines.append(f"{_at(x)} = tile % {count}")
            lines.append(f"tile = tile // {count}")
        pairs = ", ".join(f"{x}={_at(x)}" for x in self.out)
        first = f"# syncopate: dispatch tile -> {pairs}"
        return [first, *lines, "# syncopate: end dispatch"]

    def _start(self) -> list[str]:
        rows, columns, depth = self.matrix
        lines = [
            f"rows = {_at(rows)} * BLOCK_{rows} + tl.arange(0, BLOCK_{rows})",
            f"columns = {_at(columns)} * BLOCK_{columns} + tl.arange(0, BLOCK_{columns})",
            f"inner = tl.arange(0, BLOCK_{depth})",
            f"total = tl.zeros((BLOCK_{rows}, BLOCK_{columns}), dtype=tl.float32)",
        ]
        if len(self.reduced) == 1:
            lines += [f"left_ptrs = {self._left('inner')}", f"right_ptrs = {self._right('inner')}"]
        return lines

    @property
    def _sides(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Name and letters of the operand that has the result's rows, and of the other."""
        pair = ("lhs", self.lhs), ("rhs", self.rhs)
        return pair if self.matrix[0] in self.lhs else pair[::-1]

    def _left(self, depth: str) -> str:
        rows, _, k = self.matrix
        (name, letters), _ = self._sides
        return self._address(name, letters, {rows: "rows[:, None]", k: f"{depth}[None, :]"})

    def _right(self, depth: str) -> str:
        _, columns, k = self.matrix
        _, (name, letters) = self._sides
        return self._address(name, letters, {columns: "columns[None, :]", k: f"{depth}[:, None]"})

    def _address(self, name: str, letters: Sequence[str], tensors: Mapping[str, str]) -> str:
        """Scalars first: they are added to the pointer once."""
        scalars = [f"{_at(x)} * {name.upper()}_{x}" for x in letters if x not in tensors]
        parts = [f"{index} * {name.upper()}_{x}" for x, index in tensors.items()]
        return f"{' + '.join([f'{name}_ptr', *scalars])} + ({' + '.join(parts)})"

    def _loop(self) -> list[str]:
        rows, columns, depth = self.matrix
        steps = [*(f"SIZE_{x}" for x in self.reduced[:-1]), f"tl.cdiv(SIZE_{depth}, BLOCK_{depth})"]
        lines = [
            f"# syncopate: reduce {', '.join(self.reduced)}=step",
            f"for step in range({' * '.join(steps)}):",
        ]
        inner = []
        if len(self.reduced) == 1:
            inner.append(f"left_depth = SIZE_{depth} - step * BLOCK_{depth}")
            position = "inner"
        else:
            inner.append(f"part = step // {steps[-1]}")
            inner.append(f"depth = step % {steps[-1]} * BLOCK_{depth} + inner")
            for x in reversed(self.reduced[:-1]):
                inner += [f"{_at(x)} = part % SIZE_{x}", f"part = part // SIZE_{x}"]
            inner += [f"left_ptrs = {self._left('depth')}", f"right_ptrs = {self._right('depth')}"]
            inner.append(f"left_depth = SIZE_{depth}")
            position = "depth"
        inner += self._load("left", rows, f"(rows[:, None] < SIZE_{rows})", position, "None, :")
        inner += self._load(
            "right", columns, f"(columns[None, :] < SIZE_{columns})", position, ":, None"
        )
        inner.append('total = tl.dot(left, right, total, input_precision="ieee")')
        if len(self.reduced) == 1:
            (left, _), (right, _) = self._sides
            inner.append(f"left_ptrs += BLOCK_{depth} * {left.upper()}_{depth}")
            inner.append(f"right_ptrs += BLOCK_{depth} * {right.upper()}_{depth}")
        return [*lines, *(f"    {line}" for line in inner)]

    def _load(self, side: str, letter: str, inside: str, position: str, form: str) -> list[str]:
        """A load whose mask is left out where tiles divide the operand."""
        depth = self.matrix[2]
        whole = [f"SIZE_{x} % BLOCK_{x} == 0" for x in (letter, depth)]
        mask = f"{inside} & ({position}[{form}] < left_depth)"
        return [
            f"if {' and '.join(whole)}:",
            f"    {side} = tl.load({side}_ptrs)",
            "else:",
            f"    {side} = tl.load({side}_ptrs, mask={mask}, other=0.0)",
        ]

    def _store(self) -> list[str]:
        rows, columns, _ = self.matrix
        tensors = {rows: "rows[:, None]", columns: "columns[None, :]"}
        inside = f"(rows[:, None] < SIZE_{rows}) & (columns[None, :] < SIZE_{columns})"
        return [
            "# syncopate: epilogue total",
            f"out_ptrs = {self._address('out', self.out, tensors)}",
            f"inside = {inside}",
            "tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)",
            "# syncopate: end epilogue",
        ]


def _at(letter: str) -> str:
    """The variable that holds the index along a letter."""
    return f"tile_{letter}" if letter in matmul_tpu.MATRIX_LETTERS else f"at_{letter}"
