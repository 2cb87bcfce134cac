"""Ready operators, with gradients: inside ``jax.shard_map``, and ``matmul`` under plain ``jit``.

Operators are offered here by what they are registered as, so that a new one is a file beside these.
"""

import importlib
import importlib.util
import pkgutil
from typing import Any

from syncopate_jax import registry
from syncopate_jax.ops.all_gather import all_gather_matmul
from syncopate_jax.ops.all_reduce import matmul_all_reduce
from syncopate_jax.ops.all_to_all import all_to_all_matmul, matmul_all_to_all
from syncopate_jax.ops.reduce_scatter import matmul_reduce_scatter
from syncopate_jax.ops.sharded import matmul

__all__ = [
    "all_gather_matmul",
    "all_to_all_matmul",
    "matmul",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
]


def __getattr__(name: str) -> Any:
    """An operator that is registered, but not imported above."""
    is_module = importlib.util.find_spec(f"{__name__}.{name}") is not None
    if not is_module and name in registry.operators.names():
        for entry in pkgutil.iter_modules(__path__):
            module = importlib.import_module(f"{__name__}.{entry.name}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
