"""Every operator and GPU backend compiles to Hopper machine code within its budget, without a GPU.

``budgets.json`` has what a kernel may take: the defaults, then by backend and by
``operator/backend`` what differs. No kernel may spill unless it is listed.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.options import Launch
from tests.aot import hopper
from tests.aot.hopper import Kernel
from tests.ops import cases
from tests.ops.cases import CASES, Case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hopper.missing() is not None, reason=hopper.missing() or ""),
]
BUDGETS = json.loads(Path(__file__).with_name("budgets.json").read_text())
BACKENDS = ("tma_dedicated", "ldst_dedicated", "tma_colocated", "ldst_colocated")
BRINGS = ("gather_x_m", "gather_x_k", "gather_w_k", "gather_w_n", "to_rows")
SMS = 132
SIZE = 1024  # of every dimension on a rank; large enough for the usual tiles


def budget(case: str, backend: str) -> dict[str, int]:
    """What a kernel may take, by the fields of ``hopper.Kernel``."""
    return BUDGETS["default"] | BUDGETS.get(backend, {}) | BUDGETS.get(f"{case}/{backend}", {})


def over(kernel: Kernel, allowed: dict[str, int]) -> list[str]:
    """What of a kernel is over its budget, in words."""
    found = dataclasses.asdict(kernel)
    words = [f"{name} {found[name]} of {most}" for name, most in allowed.items()
             if found[name] > most]  # fmt: skip
    return words + (["the tensor cores are serialized"] if kernel.serialized else [])


def kernels(
    case: Case, backend: str, ranks: int, capfd: pytest.CaptureFixture[str]
) -> list[Kernel]:
    mesh = hopper.mesh(ranks)
    launch = Launch(sms=SMS)
    fn = cases.sharded(case, mesh, target="mosaic_gpu", backend=backend, launch=launch)
    n = SIZE * ranks
    arguments = [
        jax.ShapeDtypeStruct(
            shape, jnp.bfloat16,
            sharding=jax.NamedSharding(mesh, cases.spec(dimension, len(shape), "t")),
        )
        for shape, dimension in (((1, n, n), case.x), ((n, n), case.w))
    ]  # fmt: skip
    capfd.readouterr()
    hopper.compiled(fn, *arguments)
    return Kernel.read("".join(capfd.readouterr()))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_within_budget(
    case: Case,
    backend: str,
    ranks: int,
    capfd: pytest.CaptureFixture[str],
    record_property: object,
) -> None:
    began = time.monotonic()
    try:
        found = kernels(case, backend, ranks, capfd)
    except UnsupportedError as error:
        assert backend == "ldst_colocated" and case.name in BRINGS, error
        assert "brings data to tiles" in str(error)
        return
    took = f"{time.monotonic() - began:.1f} s"
    assert len(found) == 1
    (kernel,) = found
    assert callable(record_property)
    row = (kernel.registers, kernel.spilled, kernel.shared_memory, took)
    record_property("kernel", (case.name, backend, ranks, *row))
    assert over(kernel, budget(case.name, backend)) == []
