"""Backend ``ldst_colocated``: tiles are read and stored at peers by loads and stores."""

from __future__ import annotations

from syncopate_jax.backends import triton_backends
from syncopate_jax.backends.by_target import ByTarget
from syncopate_jax.backends.gpu_colocated import Colocated
from syncopate_jax.registry import backends

NAME = "ldst_colocated"
MOSAIC_GPU = Colocated(NAME, direct=True)
backends.register(NAME)(
    ByTarget(NAME, {"mosaic_gpu": MOSAIC_GPU, "triton": triton_backends.COLOCATED})
)
