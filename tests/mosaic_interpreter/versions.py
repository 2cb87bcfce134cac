"""The versions of JAX whose private parts this interpreter was read against.

In use: the primitives of ``jax._src.pallas`` and ``jax._src.pallas.mosaic_gpu`` with their
parameters, the transforms of references, and ``interpret_pallas_call``, which is replaced.
"""

from __future__ import annotations

import jax
import pytest

READ_AT = ("0.11.2", "0.12.0.1")


def unsupported_reason(version: str = jax.__version__) -> str | None:
    """Why kernels cannot be interpreted with this JAX, or None."""
    if version in READ_AT:
        return None
    return (
        f"the interpreter of Mosaic GPU kernels was read against jax {' and '.join(READ_AT)}, "
        f"found {version}: read its private parts again and add the version to READ_AT"
    )


needs_known_jax = pytest.mark.skipif(
    unsupported_reason() is not None, reason=unsupported_reason() or ""
)
