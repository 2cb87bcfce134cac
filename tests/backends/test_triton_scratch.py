"""Descriptors' memory stays with the driver's pool; where there is none, nothing is lost."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import jax
import pytest

from syncopate_jax.backends import triton_scratch


class Driver:
    """What ``keep`` calls of the driver; ``missing`` fails."""

    def __init__(self, kept: int, missing: str = ""):
        self.kept, self.missing = kept, missing

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return int(self.missing == "device")

    def cuDeviceGetDefaultMemPool(self, pool: Any, device: Any) -> int:
        pool._obj.value = 70 + device.value
        return int(self.missing == "pool")

    def cuMemPoolGetAttribute(self, pool: Any, attribute: int, value: Any) -> int:
        assert (pool.value, attribute) == (72, 4)
        value._obj.value = self.kept
        return 0

    def cuMemPoolSetAttribute(self, pool: Any, attribute: int, value: Any) -> int:
        assert (pool.value, attribute) == (72, 4)
        self.kept = value._obj.value
        return 0


@pytest.mark.parametrize(
    ("before", "missing", "after"),
    [(0, "", 64 << 20), (1 << 40, "", 1 << 40), (0, "device", 0), (0, "pool", 0)],
)
def test_a_pool_keeps_as_much_as_descriptors_take(
    before: int, missing: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(before, missing)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    device = types.SimpleNamespace(platform="gpu", local_hardware_id=2)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert triton_scratch.keep.__wrapped__() is (not missing)
    assert driver.kept == after


def test_without_a_driver_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_scratch, "_LIBRARY", "libnowhere.so.1")
    assert triton_scratch.keep.__wrapped__() is False
