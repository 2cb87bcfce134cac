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
from syncopate_jax.pallas_kernels import matmul_tpu, tile_columns, triton_stages

DTYPES = ("bfloat16", "float16", "float32")
LEAST_TILE = 16  # elements along each side of what the tensor cores multiply


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
      num_warps, num_stages: as for Triton; by default as many stages as shared memory holds, beside
        the store of a tile where the loop over tiles is flat.

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
    fitting, flat = _stages(out, tiles, dtype, out_dtype)
    values["FLAT"] = flat
    return triton_kernel(
        _function(lhs, rhs, out),
        values,
        out_dtypes={"out": out_dtype},
        reference=functools.partial(
            matmul_tpu.reference, groups=groups, sizes=sizes, out_dtype=out_dtype
        ),
        num_warps=num_warps,
        num_stages=fitting if num_stages is None else num_stages,
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


def _stages(
    out: str,
    tiles: Mapping[str, int],
    dtype: jax.typing.DTypeLike,
    out_dtype: jax.typing.DTypeLike,
) -> tuple[int, bool]:
    """As ``triton_stages.fitting``."""
    rows, columns = (x for x in out if x in matmul_tpu.MATRIX_LETTERS)
    (depth,) = set(matmul_tpu.MATRIX_LETTERS) - {rows, columns}
    return triton_stages.fitting((tiles[rows], tiles[columns], tiles[depth]), dtype, out_dtype)


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
        body = [*self._directives(), *self._tiles()]
        return ["", *self._signature(), *_indented(body)]

    def _signature(self) -> list[str]:
        """Parameters; the text's first line is taken by an import, so that lines agree."""
        names = [f"SIZE_{x}" for x in self.axes]
        names += [f"BLOCK_{x}" for x in self.axes if x in matmul_tpu.MATRIX_LETTERS]
        for name, letters in _named(self.lhs, self.rhs, self.out):
            names += [f"{name.upper()}_{x}" for x in letters]
        names.append("FLAT")
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

    def _tiles(self) -> list[str]:
        """The loop over tiles, one after the other, and the index of each along every letter."""
        counts = [self._count(x) for x in self.out]
        bounds = f"tl.program_id(0), {' * '.join(counts)}, tl.num_programs(0)"
        lines = ["# syncopate: tiles persistent", f"for tile in tl.range({bounds}, flatten=FLAT):"]
        inner = ["rest = tile"]
        for x, count in reversed([*zip(self.out, counts, strict=True)]):
            inner += [f"{_at(x)} = rest % {count}", f"rest = rest // {count}"]
        pairs = ", ".join(f"{x}={_at(x)}" for x in self.out)
        inner = [f"# syncopate: dispatch tile -> {pairs}", *inner, "# syncopate: end dispatch"]
        return [*lines, *_indented([*inner, *self._loop(), *self._store()])]

    def _count(self, letter: str) -> str:
        """How many indices a letter has, tiles where it is cut into such."""
        if letter in matmul_tpu.MATRIX_LETTERS:
            return f"tl.cdiv(SIZE_{letter}, BLOCK_{letter})"
        return f"SIZE_{letter}"

    @property
    def _sides(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Name and letters of the operand that has the result's rows, and of the other."""
        pair = ("lhs", self.lhs), ("rhs", self.rhs)
        return pair if self.matrix[0] in self.lhs else pair[::-1]

    def _address(self, name: str, letters: Sequence[str], tensors: Mapping[str, str]) -> str:
        """Scalars first: they are added to the pointer once."""
        scalars = [f"{_at(x)} * {name.upper()}_{x}" for x in letters if x not in tensors]
        parts = [f"{index} * {name.upper()}_{x}" for x, index in tensors.items()]
        return f"{' + '.join([f'{name}_ptr', *scalars])} + ({' + '.join(parts)})"

    def _loop(self) -> list[str]:
        """The reduction; addresses come from scalars in it.

        A flat loop forgets of a vector that it carries what lies together.
        """
        rows, columns, depth = self.matrix
        first, last = self.reduced[:-1], self._count(depth)
        steps = [*(self._count(x) for x in first), last]
        inner = self._inside()
        if first:
            inner.append(f"part = step // {last}")
            for x in reversed(first):
                inner += [f"{_at(x)} = part % SIZE_{x}", f"part = part // SIZE_{x}"]
        start = f"step % {last}" if first else "step"
        inner.append(f"depth = {start} * BLOCK_{depth} + tl.arange(0, BLOCK_{depth})")
        left, right = self._sides
        inner += self._load("left", *left, {rows: "rows[:, None]", depth: "depth[None, :]"})
        inner += self._load("right", *right, {columns: "columns[None, :]", depth: "depth[:, None]"})
        inner.append('total = tl.dot(left, right, total, input_precision="ieee")')
        return [
            f"total = tl.zeros((BLOCK_{rows}, BLOCK_{columns}), dtype=tl.float32)",
            f"# syncopate: reduce {', '.join(self.reduced)}=step",
            f"for step in range({' * '.join(steps)}):",
            *_indented(inner),
        ]

    def _inside(self) -> list[str]:
        """Rows and columns of the tile."""
        rows, columns, _ = self.matrix
        return [
            f"rows = {_at(rows)} * BLOCK_{rows} + tl.arange(0, BLOCK_{rows})",
            f"columns = {_at(columns)} * BLOCK_{columns} + tl.arange(0, BLOCK_{columns})",
        ]

    def _load(self, side: str, name: str, letters: str, tensors: Mapping[str, str]) -> list[str]:
        """A load whose mask is left out where tiles divide the operand."""
        whole = " and ".join(f"SIZE_{x} % BLOCK_{x} == 0" for x in tensors)
        mask = " & ".join(f"({index} < SIZE_{x})" for x, index in tensors.items())
        return [
            f"{side}_ptrs = {self._address(name, letters, tensors)}",
            f"if {whole}:",
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
            *self._inside(),
            f"out_ptrs = {self._address('out', self.out, tensors)}",
            f"inside = {inside}",
            "tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)",
            "# syncopate: end epilogue",
        ]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _at(letter: str) -> str:
    """The variable that holds the index along a letter."""
    return f"tile_{letter}" if letter in matmul_tpu.MATRIX_LETTERS else f"at_{letter}"
