"""Ready operators, with gradients, for use inside ``jax.shard_map``."""

from syncopate_jax.ops.all_gather import all_gather_matmul
from syncopate_jax.ops.all_reduce import matmul_all_reduce
from syncopate_jax.ops.all_to_all import all_to_all_matmul, matmul_all_to_all
from syncopate_jax.ops.reduce_scatter import matmul_reduce_scatter

__all__ = [
    "all_gather_matmul",
    "all_to_all_matmul",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
]
