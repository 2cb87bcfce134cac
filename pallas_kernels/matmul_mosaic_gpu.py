"""Hopper matrix product in Pallas Mosaic GPU whose loop over tiles is handed in.

``y[M, N] = x[M, K] @ w[K, N]``: persistent, warp-specialised, float32 accumulation. ``matmul`` runs
it alone; a fused operator calls ``matmul_mosaic_gpu_kernel.compute_tiles`` inside its own kernel,
with its own ``TileLoop``. ``experiments/local_gemm`` says how fast it is and what limits it.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu_kernel as body
from syncopate_jax.pallas_kernels import tile_loop_mosaic_gpu as tile_loop
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import (
    CLUSTER_AXES,
    COPY_BYTES,
    Limits,
    MatmulConfig,
    ranked,
)
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_operands import Operands, memory_limits


def unsupported_reason(operands: Operands, config: MatmulConfig, limits: Limits) -> str | None:
    """Why this kernel cannot compute this product with this config on this device, or None."""
    x, w, y, addend = operands.x, operands.w, operands.y, operands.addend
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"operands are {x.dtype} and {w.dtype}; both must be bfloat16 or both float16"
    if y.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the output is {y.dtype}; it must be bfloat16, float16 or float32"
    if (problem := config.problem()) is not None:
        return problem
    if limits.sms < config.cluster:
        return f"a cluster of {config.cluster} CTAs needs as many SMs; there are {limits.sms}"
    needed = config.shared_memory(x.dtype, y.dtype, None if addend is None else addend.dtype)
    if needed > limits.shared_memory:
        return (
            f"the config takes {needed} bytes of shared memory and a block has "
            f"{limits.shared_memory}; take fewer stages, as config.fit does"
        )
    for name, array in ("x", x), ("w", w), ("y", y), ("addend", addend):
        if array is not None and array.shape[1] * jnp.dtype(array.dtype).itemsize % COPY_BYTES:
            return (
                f"{name} has rows of {array.shape[1]} elements of {array.dtype}; "
                f"they must be a multiple of {COPY_BYTES} bytes"
            )
    return "; ".join(memory_limits(operands, config)) or None


def _check_shapes(operands: Operands) -> None:
    x, w, addend = operands.x, operands.w, operands.addend
    m, k, n = operands.mkn
    other_k = w.shape[1 if operands.w_transposed else 0]
    if k != other_k:
        raise InputError(
            f"matmul_mosaic_gpu: x {x.shape} contracts over {k} elements and w {w.shape} over "
            f"{other_k}; they must agree"
        )
    if addend is not None and addend.shape != (m, n):
        raise InputError(
            f"matmul_mosaic_gpu: the addend is {addend.shape}; it must be as the result, {(m, n)}"
        )


def pick_config(operands: Operands, limits: Limits, device_kind: str = "") -> MatmulConfig:
    """The best config that suits a product: tuned for the device, or a guess.

    Raises:
      UnsupportedError: none does; the message has each one's reason.
    """
    m, k, n = operands.mkn
    addend_dtype = None if operands.addend is None else operands.addend.dtype
    reasons = []
    for config in ranked(m, n, k, sms=limits.sms, device_kind=device_kind):
        fitted = config.fit(limits.shared_memory, operands.x.dtype, operands.y.dtype, addend_dtype)
        reason = unsupported_reason(operands, fitted, limits)
        if reason is None:
            return fitted
        reasons.append(f"{config.tile_m}x{config.tile_n}: {reason}")
    raise UnsupportedError("matmul_mosaic_gpu: no config suits; " + "; ".join(reasons))


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    addend: jax.Array | None = None,
    transform: Callable[[jax.Array], jax.Array] | None = None,
    x_transposed: bool = False,
    w_transposed: bool = False,
    out_dtype: Any = None,
    table: jax.Array | None = None,
    flags: jax.Array | None = None,
    config: MatmulConfig | None = None,
    num_sms: int | None = None,
    shared_memory: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """``transform(x @ w + addend)``, accumulated in float32 and rounded once.

    Args:
      x: [M, K], or [K, M] if ``x_transposed``; bfloat16 or float16.
      w: [K, N], or [N, K] if ``w_transposed``; of x's type.
      addend: [M, N], of any floating type.
      transform: elementwise function of float32 values.
      out_dtype: bfloat16, float16 or float32; x's type by default.
      table: int32 [tiles, 3]; the tiles (m, n, chunk) in the order to compute them, in units of
        ``config``'s cluster tile, each exactly once. The natural order by default.
      flags: int32 [chunks], with a table: a tile waits until its chunk's flag is at least 1.
      config: how to cut the product; by default the tuned one for the device, or a good guess. Its
        stages are reduced to those that fit.
      num_sms: multiprocessors to use; by default all of the device's.
      shared_memory: bytes of it that a block may have; by default the device's limit.
      interpret: ``plgpu.InterpretGPUParams()`` to run on a CPU.

    Returns:
      [M, N].

    Raises:
      InputError: operands do not fit each other, or the table does not fit them.
      UnsupportedError: this kernel cannot compute the product, see ``unsupported_reason``.

    Example::

      y = matmul(x, w, addend=residual, transform=jax.nn.gelu)
    """
    device = jax.local_devices()[0]
    limits = Limits.of(device, sms=num_sms, shared_memory=shared_memory)
    m, n = x.shape[1 if x_transposed else 0], w.shape[0 if w_transposed else 1]
    out = jax.ShapeDtypeStruct((m, n), out_dtype or x.dtype)
    operands = Operands(x, w, out, addend, x_transposed, w_transposed)
    _check_shapes(operands)
    if config is None:
        config = pick_config(operands, limits, device.device_kind)
    else:
        addend_dtype = None if addend is None else addend.dtype
        config = config.fit(limits.shared_memory, x.dtype, out.dtype, addend_dtype)
        if (reason := unsupported_reason(operands, config, limits)) is not None:
            raise UnsupportedError(f"matmul_mosaic_gpu: {reason}")
    tiles = config.tiles(m, n)
    if flags is not None and table is None:
        raise InputError("matmul_mosaic_gpu: flags are waited for by a table's chunks; pass table")
    if table is not None and table.shape != (math.prod(tiles), tile_loop.TABLE_COLUMNS):
        raise InputError(
            f"matmul_mosaic_gpu: table is {table.shape}; the {tiles[0]}x{tiles[1]} tiles of this "
            f"config need {(math.prod(tiles), tile_loop.TABLE_COLUMNS)}"
        )
    if 0 in operands.mkn:
        value = jnp.zeros((m, n), jnp.float32)
        value = value if addend is None else value + addend.astype(jnp.float32)
        return (value if transform is None else transform(value)).astype(out.dtype)

    workers = config.workers(m, n, limits.sms)
    optional = {"addend": addend, "table": table, "flags": flags}
    given = {name: array for name, array in optional.items() if array is not None}

    def kernel(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        *given_refs, y_ref = refs
        named = dict(zip(given, given_refs, strict=True))
        order: tile_loop.TileOrder
        if "table" in named:
            order = tile_loop.ScheduledOrder(named["table"], math.prod(tiles))
        else:
            order = tile_loop.NaturalOrder(tiles, config.group, config.minor)

        def wait(tile: tile_loop.Tile) -> None:
            tile_loop.wait_flag(named["flags"], tile.chunk)

        loop = tile_loop.TileLoop(
            order,
            lax.axis_index(body.CTA_AXIS),
            workers,
            before_tile=wait if "flags" in named else None,
        )
        refs_of = Operands(x_ref, w_ref, y_ref, named.get("addend"), x_transposed, w_transposed)
        body.compute_tiles(refs_of, config, loop, transform=transform, flat_views=not interpret)

    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(workers,),
        grid_names=(body.CTA_AXIS,),
        cluster=(config.cluster_m, config.cluster_n),
        cluster_names=CLUSTER_AXES,
        num_threads=config.warpgroups + 1,
        thread_name=body.WARPGROUP_AXIS,
        # Safe: no warpgroup reads shared memory that it wrote, but where commit_smem fences.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(x, w, *given.values())
