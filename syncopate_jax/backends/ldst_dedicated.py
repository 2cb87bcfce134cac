"""Backend ``ldst_dedicated``: some CTAs of the launch only communicate, by loads and stores."""

from __future__ import annotations

from syncopate_jax.backends.gpu_dedicated import Dedicated
from syncopate_jax.backends.gpu_ldst import LdstMover
from syncopate_jax.registry import backends

backends.register("ldst_dedicated")(Dedicated("ldst_dedicated", LdstMover()))
