"""The plan around an all-gather's moves: who holds which shard, and that all end with the whole."""

from __future__ import annotations

from syncopate_jax.ir.columns import Columns
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.ir.shards import Shards


def gather_plan(
    name: str,
    shards: Shards,
    columns: Columns,
    tensor: str,
    dtype: str,
    produced: bool,
    channels: tuple[str, ...],
    origin: str,
) -> Plan:
    """A plan in which each rank starts with its shard of one shared tensor and must end with all.

    Raises InputError when the tensor's name or dtype is not valid.
    """
    regions = (Region(r, tensor, box, produced) for r, box in enumerate(shards.boxes()))
    whole = shards.full
    goals = (Goal(r, tensor, whole) for r in range(shards.num_ranks))
    return Plan(
        name=name,
        num_ranks=shards.num_ranks,
        tensors=(Tensor(tensor, shards.shape, dtype),),
        initial=tuple(region for region in regions if region.box.size),
        goals=tuple(goals) if whole.size else (),
        columns=columns,
        channels=channels,
        origins=(origin,),
    )


def square_divisor(count: int) -> int:
    """The largest divisor of ``count`` that is not above its square root."""
    return max(d for d in range(1, int(count**0.5) + 1) if count % d == 0)
