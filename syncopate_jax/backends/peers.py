"""Addresses of peer ranks, and the barrier they share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from syncopate_jax.errors import InputError, UnsupportedError

# "Typically on the order of 20-30", says JAX's guide to distributed Pallas kernels.
BARRIERS = 32


def peer_id(axis_names: Sequence[str], rank: int | jax.Array) -> dict[Any, jax.Array | int]:
    """Address of a peer for Pallas TPU, in the dictionary form of ``DeviceIdType.MESH``.

    Args:
      axis_names: mesh axes the ranks run along, slowest first.
      rank: position of the peer, 0 <= rank < product of the axis sizes; may be traced.

    Returns:
      Index along each of ``axis_names``. Axes that are left out mean this device's own
      coordinate, to both the TPU compiler and the interpreter.

    Raises:
      InputError: no axis is given.
    """
    if not axis_names:
        raise InputError("peer_id needs at least one mesh axis; a local kernel has no peers")
    coordinates: dict[Any, jax.Array | int] = {}
    for name in reversed(axis_names):
        size = lax.axis_size(name)
        coordinates[name] = rank % size if isinstance(rank, int) else lax.rem(rank, size)
        rank = rank // size if isinstance(rank, int) else lax.div(rank, size)
    return dict(reversed(coordinates.items()))


def barrier_id(axis_names: Sequence[str]) -> int:
    """Number of the barrier semaphore (``collective_id``) of a kernel over mesh axes.

    One for each set of axes of the surrounding mesh, the small sets first. Kernels over the same
    axes share it, so none of their ranks may leave before all have entered: a rank would else take
    the next kernel's signal for one of this kernel's. Kernels over different axes must not share
    one: which ranks have entered the other group's kernel, this group cannot know.

    Raises:
      UnsupportedError: the mesh has too many axes for each set to have a semaphore of its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    taking_part = tuple(name for name in axes if name in axis_names)
    sets = (found for size in range(len(axes) + 1) for found in itertools.combinations(axes, size))
    number = list(itertools.takewhile(lambda found: found != taking_part, sets))
    if len(number) >= BARRIERS:
        raise UnsupportedError(
            f"mesh axes {', '.join(taking_part)} of {', '.join(axes)}: a TPU has about {BARRIERS} "
            f"barrier semaphores, too few for every set of so many axes; use backend 'xla', or a "
            f"mesh of fewer axes"
        )
    return len(number)
