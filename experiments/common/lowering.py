"""Programs lowered for a GPU where there is none: most of what fails at first contact fails so."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.runtime import device

KIND, CORES = "NVIDIA H200", device.HOPPER_CORES


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Operators choose as they do on an H200."""
    with (
        mock.patch.object(device, "kind", lambda: KIND),
        mock.patch.object(device, "core_count", lambda: CORES),
    ):
        yield


def lowered(name: str, fn: Callable[..., Any], shapes: Sequence[Any]) -> dict[str, Any]:
    """A row of results: that ``fn`` lowers for CUDA and how long that takes, or what it raised.

    ``refused`` is what a backend says it cannot do, on a GPU too.
    """
    begun = time.perf_counter()
    row: dict[str, Any] = {"program": name}
    try:
        with as_on_gpu():
            jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
            text = jitted.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    except UnsupportedError as error:
        return row | {"refused": str(error)[-300:]}
    except Exception as error:
        return row | {"lowers": False, "failed": f"{type(error).__name__}: {error}"[:300]}
    kernels = text.count("custom_call @mosaic_gpu") + text.count("custom_call @triton_kernel_call")
    return row | {
        "lowers": True,
        "kernels": kernels,
        "seconds": round(time.perf_counter() - begun, 1),
    }
