"""Fine-grained overlap of computation and communication inside JAX kernels.

``compile`` fuses a local kernel with a plan; ``ops`` holds ready operators; ``overlap`` puts them
into an existing program; ``templates`` are the registered plan templates. Names are looked up on
first use, so that plans can be made, verified and simulated without waiting for JAX.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncopate_jax.compiler import compile
    from syncopate_jax.kernel.local import PallasKernel
    from syncopate_jax.registry import templates
    from syncopate_jax.rewrite.overlap import overlap

# Where a checkout is imported as it lies, from its own folder, say, plans/ and pallas_kernels/ are
# beside this package and not, as where it is installed, inside it.
_FOLDER = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_FOLDER, "plans")):
    __path__.append(os.path.dirname(_FOLDER))

_HOMES = {
    "PallasKernel": "syncopate_jax.kernel.local",
    "compile": "syncopate_jax.compiler",
    "overlap": "syncopate_jax.rewrite.overlap",
    "templates": "syncopate_jax.registry",
}

__all__ = ["PallasKernel", "compile", "overlap", "templates"]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
