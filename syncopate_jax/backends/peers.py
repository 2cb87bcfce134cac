"""Addresses of peer ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from syncopate_jax.errors import InputError


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
