"""Operator: a matrix product one of whose operands is streamed from host memory as it is needed.

The operand comes in by chunks of rows (of ``x``) or columns (of ``w``), brought by the copy engine
or by CTAs of the launch that only communicate; the kernel computes the tiles of a chunk once its
flag is up, or each part of its tiles, in the order of the chunks. The operand never waits in device
memory as a whole before the product begins, as it does with weight or activation offloading by
``jax.device_put``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncopate_jax.backends import triton_call
from syncopate_jax.backends.triton_ordered import OrderedTriton
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.arguments import integer
from syncopate_jax.kernel.tiles import fewest_workers
from syncopate_jax.native import build, copies
from syncopate_jax.ops import stream_readers
from syncopate_jax.ops.operands import check_arrays, result_dtype
from syncopate_jax.ops.stream_chunks import Pace, Rates, chunk_bounds
from syncopate_jax.ops.stream_readers import Readers
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig
from syncopate_jax.runtime import custom_call, device

NAME = "stream_matmul"
BACKENDS = ("copy_engine", "tma_dedicated")
READ = Rates(link=50.9e9, gap=0.0)  # the link, read by 2 to 8 CTAs of an H200 in boxes of 8 KB


def stream_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    chunks: int | None = None,
    w_transposed: bool = False,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    config: Any = None,
    num_sms: int | None = None,
    target: str = "mosaic_gpu",
    rates: Rates | None = None,
    backend: str | None = None,
    readers: Readers | None = None,
) -> jax.Array:
    """``x @ w`` where ``x`` or ``w`` lives in pinned host memory (paper section 5.2).

    Put the operand there with ``jax.device_put(x, jax.sharding.SingleDeviceSharding(device,
    memory_kind="pinned_host"))``; it may be an argument of the surrounding ``jax.jit``.

    Args:
      x: [M, K]; chunks are bands of rows where it is the one in host memory.
      w: [K, N], or [N, K] if ``w_transposed``; chunks are bands along N where it is. A weight that
        is streamed is faster as [N, K]: bands of it lie together.
      chunks: equal pieces the operand comes in, at most one a row (or column) of tiles; None: as
        many, and as large, as follows from ``rates``. More of them begin and end sooner, fewer
        reuse the other operand better.
      preferred_element_type: dtype of the result; default that of the operands.
      config: how the kernel is cut; see ``MatmulConfig`` of the target's matrix product.
      num_sms: multiprocessors to use; default all of the device's.
      target: what the kernel is written in, ``mosaic_gpu`` or ``triton``; the latter takes no
        transposed weight.
      rates: how fast the operand comes in and is multiplied; default those of an H200.
      backend: what brings the operand in: ``copy_engine``, or ``tma_dedicated``: CTAs of the launch
        that only communicate, for target ``mosaic_gpu``. By default the copy engine, or CTAs
        if its handlers cannot be compiled or ``readers`` are given. CTAs are faster where a weight
        [K, N] is streamed, whose bands the copy engine copies row by row.
      readers: those CTAs; default ``Readers()``.

    Returns:
      [M, N] in device memory.

    Raises:
      InputError: shapes, dtypes or ``chunks`` do not fit, or not exactly one operand lives in
        host memory.
      UnsupportedError: no C++ compiler for the copy engine's handlers, or no Triton; says what to
        install. Or the kernel cannot compute this product; says why.
    """
    if backend not in (None, *BACKENDS):
        raise InputError(f"{NAME}: backend needs one of {', '.join(BACKENDS)}, found {backend!r}")
    if target == "triton" and (reason := triton_call.missing()):
        raise UnsupportedError(f"{NAME}: {reason}")
    x, w = check_arrays(NAME, x, w)
    side = _check(x, w, w_transposed)
    if backend is None:
        reads = target == "mosaic_gpu" and (readers is not None or build.missing())
        backend = "tma_dedicated" if reads else "copy_engine"
    if backend == "copy_engine" and (reason := build.missing()):
        raise UnsupportedError(f"{NAME}: {reason}")
    if not isinstance(readers, Readers | None):
        raise InputError(f"{NAME}: readers needs Readers or None, found {readers!r}")
    if readers is not None and backend != "tma_dedicated":
        raise InputError(f"{NAME}: readers are of backend 'tma_dedicated', found {backend!r}")
    out = result_dtype(NAME, preferred_element_type, x, w)
    chunks = None if chunks is None else integer(NAME, "chunks", chunks, 1)
    if not isinstance(rates, Rates | None):
        raise InputError(f"{NAME}: rates needs Rates or None, found {rates!r}")
    num_sms = None if num_sms is None else integer(NAME, "num_sms", num_sms, 1)
    has = device.core_count()
    if num_sms is not None and has is not None and num_sms > has:
        raise InputError(f"{NAME}: num_sms needs at most the device's {has}, found {num_sms}")
    sizes = x.shape[0], x.shape[1], w.shape[0 if w_transposed else 1]
    config = _config(target, config, sizes, x.dtype, out, num_sms)
    by = (readers or Readers()) if backend == "tma_dedicated" else None
    rates = rates or (Rates() if by is None else READ)
    how = _How(side, w_transposed, chunks, rates, out, config, num_sms, target, by)
    if target == "triton" and by is not None:
        raise UnsupportedError(
            f"{NAME}: the Triton kernel has no CTAs that read; use target 'mosaic_gpu' or backend "
            "'copy_engine'"
        )
    if target == "triton" and w_transposed:
        raise UnsupportedError(
            f"{NAME}: the Triton kernel takes w as [K, N]; use target 'mosaic_gpu'"
        )
    (y,) = custom_call.fused_call(
        functools.partial(_emit, how=how),
        x,
        w,
        out_types=[jax.ShapeDtypeStruct((x.shape[0], w.shape[0 if w_transposed else 1]), out)],
        axis_names=(),
        name=NAME,
        key=(NAME, how),
        ordered=False,  # on the CPU no kernel is interpreted here
        narrow=True,
    )
    return y


def _config(
    target: str,
    asked: Any,
    sizes: tuple[int, int, int],
    dtype: jnp.dtype,
    out_dtype: jnp.dtype,
    num_sms: int | None,
) -> Any:
    """How the kernel of a target is cut: as asked, or by default."""
    kind: type[Any]
    usual: Callable[[], Any]
    if target == "mosaic_gpu":
        kind = usual = MatmulConfig
    elif target == "triton":
        from syncopate_jax.pallas_kernels import matmul_triton

        kind = matmul_triton.MatmulConfig
        usual = functools.partial(
            kind.usual, sizes, dtype, out_dtype, num_sms or _multiprocessors()
        )
    else:
        raise InputError(f"{NAME}: target needs 'mosaic_gpu' or 'triton', found {target!r}")
    if not isinstance(asked, kind | None):
        raise InputError(f"{NAME}: config needs the {target} MatmulConfig or None, found {asked!r}")
    return usual() if asked is None else asked


@dataclasses.dataclass(frozen=True, slots=True)
class _How:
    """What a call does: which operand is streamed (0 or 1), and the arguments.

    ``readers`` bring it in; None: the copy engine does.
    """

    side: int
    w_transposed: bool
    chunks: int | None
    rates: Rates
    out_dtype: jnp.dtype
    config: Any
    num_sms: int | None
    target: str
    readers: Readers | None


def _check(x: jax.Array, w: jax.Array, w_transposed: bool) -> int:
    """Which operand is streamed, 0 or 1; raises InputError where the operands do not fit."""
    if not isinstance(w_transposed, bool):
        raise InputError(f"{NAME}: w_transposed needs True or False, found {w_transposed!r}")
    depth = 1 if w_transposed else 0
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[depth] or 0 in (*x.shape, *w.shape):
        raise InputError(
            f"{NAME}: needs x [M, K] and w {'[N, K]' if w_transposed else '[K, N]'}, found "
            f"{x.shape} and {w.shape}"
        )
    if x.dtype != w.dtype:
        raise InputError(f"{NAME}: x is {x.dtype} and w is {w.dtype}; cast one of them")
    hosted = [jax.typeof(a).memory_space == jax.memory.Space.Host for a in (x, w)]
    if sum(hosted) != 1:
        raise InputError(
            f"{NAME}: exactly one operand must live in host memory, found "
            f"{'both' if hosted[0] else 'neither'} there; move it with jax.device_put(operand, "
            f"jax.sharding.SingleDeviceSharding(device, memory_kind='pinned_host'))"
        )
    return hosted.index(True)


def tile_table(
    tiles: tuple[int, int], runs: Sequence[int], side: int, chunks: Sequence[int] | None = None
) -> np.ndarray:
    """[tiles, 3] int32 (m, n, chunk): run by run, each walked along the other dimension.

    The walk turns round from run to run, so that what of the other operand is still in the cache is
    used first.

    Args:
      tiles: along m and n.
      runs: where each run of bands that are multiplied together starts, and the end.
      side: the dimension that is cut into bands: 0 for m, 1 for n.
      chunks: where each chunk that comes in starts, and the end; by default they are the runs.
    """
    chunk_of = np.searchsorted(runs if chunks is None else chunks, np.arange(tiles[side]), "right")
    rows = []
    for run, (lo, hi) in enumerate(itertools.pairwise(runs)):
        other = range(tiles[1 - side])
        for across in other if run % 2 == 0 else reversed(other):
            for along in range(lo, hi):
                at = (along, across) if side == 0 else (across, along)
                rows.append((*at, chunk_of[along] - 1))
    return np.array(rows, np.int32)


def stream_call(
    shape: tuple[int, ...], itemsize: int, bounds: Sequence[int], tile: int, axis: int
) -> copies.Call:
    """The copies of an operand of ``shape``, a flag a chunk of whole tiles along ``axis``."""
    found = []
    for chunk, (lo, hi) in enumerate(itertools.pairwise(bounds)):
        corner, box = [0, 0], list(shape)
        corner[axis] = lo * tile
        box[axis] = min(hi * tile, shape[axis]) - corner[axis]
        (row,) = copies.box_rows(itemsize, (shape, corner), (shape, corner), box)
        src, src_pitch, dst, dst_pitch, width, count = row
        place = (src, src_pitch, 0, dst, dst_pitch, width, count)
        found.append(copies.Copy(0, 0, 0, *place, chunk, 1, lane=1))
    return copies.Call(NAME, 1, tuple(found), len(bounds) - 1, joined=False)


def _emit(x: jax.Array, w: jax.Array, *, platform: str, how: _How) -> list[jax.Array]:
    config, side = how.config, how.side
    streamed, axis = (x, w)[side], int(side == 1 and not how.w_transposed)
    shape = (x.shape[0], w.shape[0 if how.w_transposed else 1])
    tiles, sms = config.tiles(*shape), how.num_sms or _multiprocessors()
    if how.target == "triton":
        tile, cluster = (config.block_m, config.block_n), 1
    else:
        tile = (config.tile_m * config.cluster_m, config.tile_n * config.cluster_n)
        cluster = config.cluster_m * config.cluster_n
    operands = [x, w]
    if how.readers is not None and platform == "cpu":
        operands[side] = jax.device_put(streamed, jax.memory.Space.Device)
        return [_product(operands, how)]
    pace = Pace.of(
        how.rates,
        tiles,
        tile,
        side=side,
        depth=x.shape[1],
        itemsize=x.dtype.itemsize,
        sms=sms if how.readers is None else max(sms - how.readers.ctas, 1),
        cluster=cluster,
    )
    if how.readers is not None:
        operands[side] = custom_call.in_place(streamed)
        return [_by_readers(operands, how, how.readers, pace, axis, sms)]
    bounds = pace.bounds() if how.chunks is None else chunk_bounds(tiles[side], how.chunks)
    table = tile_table(tiles, pace.taken(bounds, config.group), side, bounds)
    call = stream_call(streamed.shape, x.dtype.itemsize, bounds, tile[side], axis)
    device = jax.ShapeDtypeStruct(streamed.shape, streamed.dtype)
    (arriving,), flags = copies.start(call, copies.ALONE, [streamed], [device])
    operands[side] = arriving
    if platform == "cpu":
        (operands[side],) = copies.wait(call, flags, jnp.asarray(call.wanted()[0]), [arriving])
        return [_product(operands, how)]
    if how.target == "triton":
        return _triton(operands, how, table, flags)
    product = matmul_mosaic_gpu.matmul(
        *operands,
        config=config,
        num_sms=sms,
        out_dtype=how.out_dtype,
        w_transposed=how.w_transposed,
        table=jnp.asarray(table),
        flags=flags,
    )
    return [product]


def _product(operands: Sequence[jax.Array], how: _How) -> jax.Array:
    """The product where there is no kernel, of operands that are there."""
    right = operands[1].T if how.w_transposed else operands[1]
    product = jnp.dot(operands[0], right, preferred_element_type=jnp.float32)
    return product.astype(how.out_dtype)


def _by_readers(
    operands: Sequence[jax.Array], how: _How, readers: Readers, pace: Pace, axis: int, sms: int
) -> jax.Array:
    """The product beside CTAs that read the streamed operand, a turn of tiles' at a time."""
    x, w = operands
    config, side = how.config, how.side
    turn = pace.turn if how.chunks is None else Fraction(-(-pace.bands // how.chunks))
    streamed = operands[side]
    arrival = stream_readers.Arrival.of(
        readers,
        config,
        (streamed.shape[0], streamed.shape[1]),
        streamed.dtype.itemsize,
        side=side,
        axis=axis,
        turn=turn,
    )
    tiles = config.tiles(x.shape[0], w.shape[0 if how.w_transposed else 1])
    return stream_readers.matmul(
        x,
        w,
        side=side,
        arrival=arrival,
        readers=readers,
        table=tile_table(tiles, pace.taken(arrival.bounds, config.group), side),
        config=config,
        num_sms=sms,
        out_dtype=how.out_dtype,
        w_transposed=how.w_transposed,
    )


def _triton(
    operands: Sequence[jax.Array], how: _How, table: np.ndarray, flags: jax.Array
) -> list[jax.Array]:
    """The product by the rewritten Triton kernel, in the table's order behind the flags."""
    from syncopate_jax.pallas_kernels import matmul_triton

    x, w = operands
    sms = fewest_workers(len(table), how.num_sms or _multiprocessors())
    kernel = matmul_triton.matmul(
        x.shape[0], x.shape[1], w.shape[1], how.out_dtype, how.config, sms
    )
    ordered = OrderedTriton(kernel, table[:, :2], table[:, 2], sms)
    return ordered(*operands, flags=flags)


def _multiprocessors() -> int:
    own: Any = jax.local_devices()[0]
    return own.core_count if own.platform == "gpu" else device.HOPPER_CORES
