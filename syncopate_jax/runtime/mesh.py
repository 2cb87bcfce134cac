"""Ranks on a device mesh: which axes a fused call may use, and the addresses of its peers.

A rank is a position along one or several mesh axes, first axis slowest, as ``lax.axis_index``
counts it. A peer is addressed by mesh coordinates and never by ``device.id``, so that meshes over
some of the devices, or over devices in any order, need no special case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType

from syncopate_jax.errors import InputError, MeshError


def axis_tuple(axis_name: str | tuple[str, ...], *, caller: str) -> tuple[str, ...]:
    """Axis names as a tuple; raises InputError on none, on repeats and on what is no name."""
    names: Any = (axis_name,) if isinstance(axis_name, str) else axis_name
    if (
        not isinstance(names, tuple)
        or not names
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) != len(names)
    ):
        raise InputError(
            f"{caller}: axis_name must be a mesh axis name or a tuple of different ones, "
            f"found {axis_name!r}"
        )
    return tuple(names)


def require_bound(axis_names: Sequence[str], *, caller: str, launches: bool = True) -> None:
    """Check that a call may communicate over mesh axes at the point where it is traced.

    Args:
      axis_names: mesh axes that the call communicates over; empty for a local kernel.
      caller: name of the operator, for messages.
      launches: whether it launches a kernel, which spans every device of the mesh; what is made of
        JAX's own collectives does not.

    Raises:
      MeshError: an axis is not bound, or the surrounding ``shard_map`` left axes: none may be left
        to a call that launches a kernel, and none that is explicit to any.
    """
    if is_folded(axis_names):
        return
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(mesh.manual_axes)
    missing = [name for name in axis_names if name not in manual]
    if missing:
        bound = ", ".join(map(repr, manual)) or "none"
        raise MeshError(
            f"{caller} communicates over mesh axis {', '.join(map(repr, missing))}, which is not "
            f"bound here (bound: {bound}); call it inside jax.shard_map over a mesh with that axis"
        )
    left = [name for name in mesh.axis_names if name not in manual]
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = [n for n in left if kinds[n] == AxisType.Explicit and mesh.shape[n] > 1]
    if manual and explicit:
        raise MeshError(
            f"{caller} was called in a jax.shard_map that is manual over {', '.join(manual)} only; "
            f"types speak of axis {', '.join(map(repr, explicit))}, which must be manual too, or "
            f"of AxisType.Auto"
        )
    if launches and manual and left:
        raise MeshError(
            f"{caller} was called in a jax.shard_map that is manual over {', '.join(manual)} only; "
            f"one launch spans all devices, so axis {', '.join(map(repr, left))} must be manual "
            "too: leave out axis_names= and name every mesh axis in the specs, or use backend "
            "'xla' (of a kernel of your own: with its reference)"
        )


def is_folded(axis_names: Sequence[str]) -> bool:
    """Whether the ranks are rows of a ``jax.vmap`` with an axis name, all on one device."""
    mesh = jax.sharding.get_abstract_mesh()
    if not axis_names or any(name in mesh.axis_names for name in axis_names):
        return False
    try:
        ranks(axis_names)
    except NameError:
        return False
    return True


def ranks(axis_names: Sequence[str]) -> int:
    """Number of ranks along mesh axes bound by the surrounding ``shard_map``."""
    return math.prod(lax.axis_size(name) for name in axis_names)


def size() -> int:
    """Devices of the mesh in use."""
    return int(jax.sharding.get_abstract_mesh().size)


def platform() -> str:
    """Platform the surrounding program will run on: ``cpu``, ``tpu`` or ``gpu``.

    Read from the devices of the mesh in use, because they, unlike the default backend, are also
    right when a program is compiled for devices that this host does not have.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
