"""Keeps the memory in which tensor descriptors of a Triton kernel lie.

jaxlib takes it from the driver's memory pool at every launch and returns it behind the kernel. By
default the pool gives all of it back to the system whenever somebody waits for the device, so that
the next launch takes longer; see experiments/triton.
"""

from __future__ import annotations

import ctypes
import functools

import jax

KEPT = 64 << 20  # bytes; a launch of 132 programs with three descriptors takes 50 KiB
_THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD of cuda.h
_LIBRARY = "libcuda.so.1"


@functools.cache
def keep(kept: int = KEPT) -> bool:
    """Has the pools of this process's GPUs keep up to ``kept`` bytes, or more if they do already.

    Only the speed of launches depends on it.

    Returns:
      Whether all do; False where the driver has no such pools.
    """
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    devices = [d for d in jax.local_devices() if d.platform == "gpu"]
    return all([_keep(driver, device.local_hardware_id, kept) for device in devices])


def _keep(driver: ctypes.CDLL, ordinal: int, kept: int) -> bool:
    device, pool, now = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    steps = (
        lambda: driver.cuDeviceGet(ctypes.byref(device), ordinal),
        lambda: driver.cuDeviceGetDefaultMemPool(ctypes.byref(pool), device),
        lambda: driver.cuMemPoolGetAttribute(pool, _THRESHOLD, ctypes.byref(now)),
    )
    if any(step() for step in steps):  # of which the first to fail ends it
        return False
    wanted = ctypes.c_uint64(max(kept, now.value))
    return driver.cuMemPoolSetAttribute(pool, _THRESHOLD, ctypes.byref(wanted)) == 0
