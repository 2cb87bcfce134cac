"""Prepares JAX before any test imports it, and skips, with a reason, what this machine cannot run.

JAX runs on eight simulated CPU devices. On a machine with GPUs, `JAX_PLATFORMS=cuda,cpu` in the
environment asks for them; the tests marked `gpu` and `multigpu` then run.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import pytest
from hypothesis import settings

DEVICES = 8

# One deadline for all: pytest's. Hypothesis's own would count a first call's compilation.
settings.register_profile("syncopate", deadline=None, print_blob=True)
settings.register_profile("syncopate-ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("syncopate-ci" if os.environ.get("CI") else "syncopate")


def prepare(environ: MutableMapping[str, str]) -> None:
    """Sets what JAX reads once, at import or at first use; keeps what the user has set."""
    flag = "--xla_force_host_platform_device_count"
    flags = environ.get("XLA_FLAGS", "")
    if flag not in flags:
        environ["XLA_FLAGS"] = f"{flags} {flag}={DEVICES}".strip()
    # XLA sizes its thread pool by it. The interpreters park a thread per simulated warpgroup or
    # core, and with one thread per real core they wait for each other for ever.
    environ.setdefault("NPROC", "16")
    environ.setdefault("JAX_PLATFORMS", "cpu")


prepare(os.environ)


def skip_reason(item: pytest.Item, gpus: int, platforms: str) -> str | None:
    """Says why a machine with `gpus` CUDA GPUs cannot run the item; None where it can."""
    needed = 1 if item.get_closest_marker("gpu") else 0
    if several := item.get_closest_marker("multigpu"):
        needed = several.kwargs.get("n", several.args[0] if several.args else 2)
    if gpus >= needed:
        return None
    return f"{item.nodeid} needs {needed} CUDA GPU(s), found {gpus} (JAX_PLATFORMS={platforms})"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [i for i in items if i.get_closest_marker("gpu") or i.get_closest_marker("multigpu")]
    if not wanting:
        return
    import jax

    gpus = sum(device.platform == "gpu" for device in jax.devices())
    for item in wanting:
        if reason := skip_reason(item, gpus, os.environ["JAX_PLATFORMS"]):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header() -> str:
    """Names the versions in the log: CI runs the same suite on two of them."""
    import jax
    import jaxlib

    return f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, on {os.environ['JAX_PLATFORMS']}"
