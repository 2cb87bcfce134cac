"""Copies that run beside a kernel: their table, and the calls that start, await and join them."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import MAX_EXTENT
from syncopate_jax.native import build

LIMIT_MS = 30_000
LIMIT = "SYNCOPATE_MEETING_MS"
"""Names the environment variable with how long a rank waits for the others, in milliseconds, before
the call ends in an error; by default ``LIMIT_MS``."""


def limit_ms() -> int:
    """``$SYNCOPATE_MEETING_MS``, read when a program is traced; raises InputError for no number."""
    asked = os.environ.get(LIMIT) or str(LIMIT_MS)
    if not (asked.isascii() and asked.isdecimal() and 1 <= int(asked[:11]) <= MAX_EXTENT):
        raise InputError(
            f"{LIMIT}: needs milliseconds, a whole number of 1 to {MAX_EXTENT}, "
            f"found {asked[:40]!r}"
        )
    return int(asked)


@dataclass(frozen=True, slots=True)
class Copy:
    """``rows`` rows of ``width`` bytes into a rank; then ``value`` is written to flag ``slot``.

    Attributes:
      dst_rank, src_rank: ranks; the copy is issued by the destination's handler.
      operand, src_offset, src_pitch: source operand, and bytes to its first row and between rows.
      result, dst_offset, dst_pitch: the same of the destination.
      slot, value: flag of the destination rank, -1 for none, and what is written to it.
      lane: 0 for the kernel's own stream, ahead of it; from 1 a side stream, beside the kernel.
        Copies within device memory must be on lane 0: they may be kernels, which never start
        beside one that fills the device and waits for them. Copies of one lane run in order;
        those of one slot must share a lane.
    """

    dst_rank: int
    src_rank: int
    operand: int
    src_offset: int
    src_pitch: int
    result: int
    dst_offset: int
    dst_pitch: int
    width: int
    rows: int
    slot: int
    value: int
    lane: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call site of the copy engine; all its ranks are devices of one process.

    Attributes:
      name: shown in messages.
      ranks: devices that meet; 1 for copies from host memory, which meet nobody.
      copies: of all ranks, in the order in which they are issued.
      slots: flags of each rank.
      joined: whether ``join`` follows; without it nobody else may read the sources.
      limit_ms: how long a rank waits for the others.
      far: arrays that the kernels of other ranks touch: operand i, or result i as -1 - i, the flags
        counting as the last one. The last buffer then gets their addresses on all ranks, int32
        [arrays * ranks, 2], array by array; and ``join`` waits for the kernels of all ranks.
    """

    name: str
    ranks: int
    copies: tuple[Copy, ...]
    slots: int
    joined: bool = True
    limit_ms: int = field(default_factory=limit_ms)
    far: tuple[int, ...] = ()

    @property
    def table(self) -> np.ndarray:
        """The copies as the handler takes them, one after the other."""
        return np.array([astuple(copy) for copy in self.copies], np.int64).reshape(-1)

    def wanted(self) -> np.ndarray:
        """[ranks, slots] the last value that each flag gets."""
        found = np.zeros((self.ranks, self.slots), np.int32)
        for copy in self.copies:
            if copy.slot >= 0:
                at = copy.dst_rank, copy.slot
                found[at] = max(found[at], copy.value)
        return found


def place(axis_names: Sequence[str]) -> jax.Array:
    """int32 [2]: which group of ranks this device is in, by its place along the other axes of the
    mesh, and its rank there."""
    mesh = jax.sharding.get_abstract_mesh()
    others = tuple(name for name in mesh.manual_axes if name not in axis_names)
    group = lax.axis_index(others) if others else 0
    return jnp.stack([jnp.asarray(i, jnp.int32) for i in (group, lax.axis_index(axis_names))])


ALONE = np.zeros(2, np.int32)
"""The place of a rank without others."""


def start(
    call: Call,
    place: jax.typing.ArrayLike,
    sources: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
) -> tuple[list[jax.Array], jax.Array]:
    """Begins the copies; the results may be read only behind a wait for their flags.

    Args:
      call: the call site.
      place: of this device; see ``place``.
      sources: operands copied from.
      results: buffers copied into; what no copy writes is left undefined.

    Returns:
      The buffers, and flags int32 [slots + 2], zero until their chunk has arrived; behind them the
      place, so that one small kernel ahead of the handler makes both.
    """
    build.load()
    zeros = jnp.concatenate([jnp.zeros(call.slots, jnp.int32), place])
    flags = jax.ShapeDtypeStruct(zeros.shape, zeros.dtype)
    *buffers, flags_out = jax.ffi.ffi_call(
        "syncopate_start",
        [*results, flags],
        has_side_effect=True,
        input_output_aliases={0: len(results)},
    )(
        zeros,
        *sources,
        name=call.name,
        ranks=np.int64(call.ranks),
        limit_ms=np.int64(call.limit_ms),
        joined=call.joined,
        table=call.table,
        far=np.array(call.far, np.int64),
    )
    return buffers, flags_out


def wait(
    call: Call, flags: jax.Array, wanted: jax.Array, buffers: Sequence[jax.Array]
) -> list[jax.Array]:
    """CPU only: the buffers once ``flags >= wanted``; on a GPU the kernel waits itself."""
    build.load()
    types = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in buffers]
    return list(
        jax.ffi.ffi_call("syncopate_wait", types, has_side_effect=True)(
            flags, wanted, *buffers, name=call.name, limit_ms=np.int64(call.limit_ms)
        )
    )


def join(
    results: Sequence[jax.Array], flags: jax.Array, kept: Sequence[jax.Array]
) -> list[jax.Array]:
    """The end of the call: what peers copy from, or store in, is theirs until all are done.

    Args:
      results: what the call returns, in place: what peers store in is complete only now.
      flags: those that ``start`` returned.
      kept: the other arrays that peers, or copies into this device, touch. One that is a result
        too is handed over once: XLA would copy it, before the peers are done.
    """
    build.load()
    held = [x for x in kept if not any(x is result for result in results)]
    return list(
        jax.ffi.ffi_call(
            "syncopate_join",
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
            has_side_effect=True,
            input_output_aliases={1 + i: i for i in range(len(results))},
        )(flags, *results, *held)
    )


def take_cost() -> dict[str, float]:
    """Host work of the handlers since the last reading, in microseconds, and calls."""
    out = (ctypes.c_int64 * 8)()
    build.load().SyncopateTakeCost(out)
    found = {}
    for name, (calls, work, waited, most) in zip(
        ("start", "join"), (list(out[:4]), list(out[4:])), strict=True
    ):
        found[f"{name}_calls"] = float(calls)
        found[f"{name}_work_us"] = work / 1e3 / max(calls, 1)
        found[f"{name}_wait_us"] = waited / 1e3 / max(calls, 1)
        found[f"{name}_most_us"] = most / 1e3
    return found


def box_rows(
    itemsize: int,
    src: tuple[Sequence[int], Sequence[int]],
    dst: tuple[Sequence[int], Sequence[int]],
    box: Sequence[int],
) -> list[tuple[int, int, int, int, int, int]]:
    """A box between row-major arrays, as copies of evenly spaced rows.

    Args:
      itemsize: bytes of an element.
      src, dst: shape of the array, and the box's first corner in it.
      box: extents of the box.

    Returns:
      (src_offset, src_pitch, dst_offset, dst_pitch, width, rows) of each copy, in bytes; as few
      as the arrays' layout allows.

    Raises:
      InputError: the box leaves one of the arrays.
    """
    for what, (shape, corner) in (("source", src), ("destination", dst)):
        if any(a < 0 or a + n > extent for a, n, extent in zip(corner, box, shape, strict=True)):
            raise InputError(
                f"a box of {tuple(box)} at {tuple(corner)} leaves its {what} of {tuple(shape)}"
            )
    if 0 in box:
        return []
    strides = [_strides(shape, itemsize) for shape, _ in (src, dst)]
    first = [
        sum(a * s for a, s in zip(corner, stride, strict=True))
        for (_, corner), stride in zip((src, dst), strides, strict=True)
    ]
    dims = [(itemsize, 1, 1)]  # innermost first: extent, source stride, destination stride
    for extent, a, b in zip(reversed(box), *map(reversed, strides), strict=True):
        inner, inner_a, inner_b = dims[-1]
        if (a, b) == (inner * inner_a, inner * inner_b):
            dims[-1] = (inner * extent, inner_a, inner_b)
        elif extent > 1:
            dims.append((extent, a, b))
    width = dims[0][0]
    rows, src_pitch, dst_pitch = dims[1] if len(dims) > 1 else (1, width, width)
    found = []
    for index in itertools.product(*(range(extent) for extent, _, _ in reversed(dims[2:]))):
        steps = list(zip(index, reversed(dims[2:]), strict=True))
        src_at = first[0] + sum(i * a for i, (_, a, _) in steps)
        dst_at = first[1] + sum(i * b for i, (_, _, b) in steps)
        found.append((src_at, src_pitch, dst_at, dst_pitch, width, rows))
    return found


def _strides(shape: Sequence[int], itemsize: int) -> list[int]:
    strides = [itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return list(reversed(strides))
