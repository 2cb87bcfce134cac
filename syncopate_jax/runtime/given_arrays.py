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
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("its mask would be lost")
        # The dtype is said: JAX 0.11 may take that of before a change of jax_enable_x64.
        return jnp.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
    except TypeError as error:
        raise InputError(
            f"{caller}: {name} is a NumPy {type(x).__name__} of dtype {x.dtype}, which JAX does "
            f"not take; give it as a plain array of one of JAX's dtypes"
        ) from error
