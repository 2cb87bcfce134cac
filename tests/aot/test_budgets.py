"""Every operator and GPU backend compiles to Hopper machine code within its budget, without a GPU.

``budgets.json`` has what a kernel may take: the defaults, then by backend, by operator and by
``operator/backend`` what differs. No kernel may spill unless it is listed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.options import Launch
from tests.aot import hopper
from tests.aot.budget import budget, over
from tests.aot.hopper import Kernel
from tests.ops import cases
from tests.ops.cases import CASES, Case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hopper.missing() is not None, reason=hopper.missing() or ""),
]
BACKENDS = ("tma_dedicated", "ldst_dedicated", "tma_colocated", "ldst_colocated")
BRINGS = ("gather_x_m", "gather_x_k", "gather_w_k", "gather_w_n", "to_rows")
SMS = 132
SIZE = 1024  # of every dimension on a rank; large enough for the usual tiles


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
    record_property: Callable[[str, object], None],
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
    row = (kernel.registers, kernel.spilled, kernel.shared_memory, took)
    record_property("kernel", (case.name, backend, ranks, *row))
    assert over(kernel, budget(case.name, backend)) == []
