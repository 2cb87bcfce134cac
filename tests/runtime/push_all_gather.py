"""The smallest kernel with all parts of a protocol: every rank pushes its shard to every other.

``fault`` leaves out, or misplaces, one part: what a guard has to find.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from syncopate_jax.backends import peers
from syncopate_jax.runtime import mesh
from syncopate_jax.runtime.custom_call import fused_call

FAULTS = ("", "no barrier", "no arrival", "signal for arrival", "no send wait", "wait twice")
# Declared in this order, which messages about them rely on.
SEMAPHORES = ("send", "arrive", "signal", "local")


def semaphores(ranks: int) -> dict[str, int]:
    return dict(zip(SEMAPHORES, (ranks, ranks, ranks, 1), strict=True))


def push_all_gather(
    x: jax.Array,
    axes: tuple[str, ...],
    interpret: Any = None,
    *,
    fault: str = "",
    invariant: bool = False,
    **options: Any,
) -> jax.Array:
    """Shards of all ranks along ``axes``, stacked in front: [ranks, *x.shape]."""
    ranks = mesh.ranks(axes)
    out_type = jax.ShapeDtypeStruct((ranks, *x.shape), x.dtype)
    interpret = interpret or pltpu.InterpretParams()

    def impl(x: jax.Array, *, platform: str) -> list[jax.Array]:
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        dma, regular = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
        call = pl.pallas_call(
            functools.partial(_kernel, axes, ranks, fault),
            out_shape=out_type,
            in_specs=[anywhere],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM(x.shape, x.dtype),
                *(dma((ranks,)), dma((ranks,)), regular((ranks,)), dma),
            ],
            compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
            interpret=interpret if platform == "cpu" else False,
        )
        return [call(x)]

    (gathered,) = fused_call(
        impl,
        x,
        out_types=[out_type],
        axis_names=axes,
        name="push_all_gather",
        invariant_over=axes if invariant else (),
        key=("push", axes, fault, interpret, x.shape, x.dtype.name),
        **options,
    )
    return gathered


def _kernel(
    axes: tuple[str, ...],
    ranks: int,
    fault: str,
    x: Any,
    out: Any,
    tile: Any,
    send: Any,
    arrive: Any,
    signal: Any,
    local: Any,
) -> None:
    me = lax.axis_index(axes)
    others = [lax.rem(me + d, ranks) for d in range(1, ranks)]

    def put(source: Any, to: Any, slot: int) -> Any:
        peer = peers.peer_id(axes, to)
        return pltpu.make_async_remote_copy(
            x, out.at[source], send.at[slot], arrive.at[source], device_id=peer
        )

    if fault != "no barrier":  # a peer's buffers exist only while it is in the kernel
        barrier = pltpu.get_barrier_semaphore()
        for other in others:
            pl.semaphore_signal(barrier, 1, device_id=peers.peer_id(axes, other))
        pl.semaphore_wait(barrier, ranks - 1)

    own = pltpu.make_async_copy(x, out.at[me], local)
    own.start()
    own.wait()
    for slot, other in enumerate(others):
        put(me, other, slot).start()
        if fault == "signal for arrival":  # sent is not arrived
            put(me, other, slot).wait_send()
            pl.semaphore_signal(signal.at[me], 1, device_id=peers.peer_id(axes, other))

    for source in others:
        if fault == "signal for arrival":
            pl.semaphore_wait(signal.at[source], 1)
        elif fault != "no arrival":
            put(source, source, 0).wait_recv()
        if fault == "wait twice":
            put(source, source, 0).wait_recv()
        load = pltpu.make_async_copy(out.at[source], tile, local)  # what a tile would read
        load.start()
        load.wait()
        if fault == "signal for arrival":
            put(source, source, 0).wait_recv()

    if fault not in ("no send wait", "signal for arrival"):
        for slot, other in enumerate(others):
            put(me, other, slot).wait_send()
