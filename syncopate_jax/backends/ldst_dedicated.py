"""Backend ``ldst_dedicated``: some CTAs of the launch only communicate, by loads and stores."""

from __future__ import annotations

from syncopate_jax.backends import triton_backends
from syncopate_jax.backends.by_target import ByTarget
from syncopate_jax.backends.gpu_dedicated import Dedicated
from syncopate_jax.backends.gpu_ldst import LdstMover
from syncopate_jax.registry import backends

NAME = "ldst_dedicated"
MOSAIC_GPU = Dedicated(NAME, LdstMover())
backends.register(NAME)(
    ByTarget(NAME, {"mosaic_gpu": MOSAIC_GPU, "triton": triton_backends.DEDICATED})
)
