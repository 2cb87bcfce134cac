"""Arguments that are arrays, as JAX takes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from syncopate_jax.errors import InputError


def as_jax(caller: str, name: str, x: Any) -> jax.Array:
    """The argument ``name`` of ``caller``; NumPy's in the dtype that JAX has for it.

    NumPy's float64 is JAX's float32 unless ``jax_enable_x64`` is set, and is taken as that without
    a warning, as ``jax.numpy`` does.

    Raises InputError for what is no array, or one that JAX has no such array for.
    """
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray):
        raise InputError(f"{caller}: {name} must be an array, found {type(x).__name__}")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{caller}: {name} is a NumPy {type(x).__name__} of dtype {x.dtype}, which JAX does "
            f"not take; give it as a plain array of one of JAX's dtypes"
        ) from error
