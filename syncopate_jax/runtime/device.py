"""What is read from the device a program is compiled for."""

from __future__ import annotations

import jax

# Multiprocessors of an H100 or H200; where a program is made, or predicted, without the device.
HOPPER_CORES = 132


def core_count() -> int | None:
    """Multiprocessors of the GPU in use; None where no GPU is known (pass ``Launch(sms=…)``)."""
    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    if mesh_device is not None and mesh_device.num_cores is not None:
        return int(mesh_device.num_cores)
    if jax.default_backend() != "gpu":
        return None
    return int(jax.devices()[0].core_count)


def kind() -> str | None:
    """The GPU's name, as measurements are filed under; None where no GPU is known."""
    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    if mesh_device is not None:
        return mesh_device.device_kind if mesh_device.platform in ("gpu", "cuda") else None
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
