"""Backend ``ldst_colocated``: tiles are stored at peers from registers."""

from __future__ import annotations

from syncopate_jax.backends.gpu_colocated import Colocated
from syncopate_jax.registry import backends

backends.register("ldst_colocated")(Colocated("ldst_colocated", direct=True))
