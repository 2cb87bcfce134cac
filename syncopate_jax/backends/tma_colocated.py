"""Backend ``tma_colocated``: tiles are stored at peers, or read from them, by the copy unit."""

from __future__ import annotations

from syncopate_jax.backends.gpu_colocated import Colocated
from syncopate_jax.registry import backends

backends.register("tma_colocated")(Colocated("tma_colocated", direct=False))
