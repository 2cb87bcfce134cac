"""Backend ``tma_dedicated``: some CTAs of the launch only communicate, by the copy unit."""

from __future__ import annotations

from syncopate_jax.backends.gpu_dedicated import Dedicated
from syncopate_jax.backends.gpu_tma import TmaMover
from syncopate_jax.registry import backends

backends.register("tma_dedicated")(Dedicated("tma_dedicated", TmaMover()))
