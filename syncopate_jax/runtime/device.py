"""What is read from the device a program is compiled for."""

from __future__ import annotations

import jax


def core_count() -> int | None:
    """Multiprocessors of the GPU in use; None where no GPU is known (pass ``Launch(sms=…)``)."""
    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    if mesh_device is not None and mesh_device.num_cores is not None:
        return int(mesh_device.num_cores)
    if jax.default_backend() != "gpu":
        return None
    return int(jax.devices()[0].core_count)
