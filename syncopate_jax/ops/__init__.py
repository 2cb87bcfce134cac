"""Ready operators, with gradients: inside ``jax.shard_map``, and ``matmul`` under plain ``jit``."""

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
