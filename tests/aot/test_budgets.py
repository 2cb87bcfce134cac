"""Every operator and GPU backend compiles to Hopper machine code within its budget, without a GPU.

So does what ``auto`` takes, at the sizes where it was measured, and the local product as tuned.
``budgets.json`` has what a kernel may take: the defaults, then by backend, by operator and by
``operator/backend`` what differs. No kernel may spill unless it is listed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.options import Launch
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu_config as config_module
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu import matmul
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig
from syncopate_jax.tune import measured
from syncopate_jax.tune.measured import Choice, Problem
from tests.aot import hopper
from tests.aot.budget import BUDGETS, budget, over
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
SIZE = 1024  # of every dimension on a rank
WIDE = {"m": 128, "n": 256}  # tiles that larger problems take
DEVICE_KIND = "NVIDIA H200"
FUSED = [entry for entry in measured._entries(DEVICE_KIND) if entry[1].backend in BACKENDS]
EXCHANGES = {
    ("all_gather", "lhs", "m", ""): ("gather_x_m", "n"),
    ("reduce_scatter", "out", "", "m"): ("scatter_m", "k"),
    ("all_reduce", "out", "", ""): ("all_reduce", "k"),
    ("all_to_all", "lhs", "k", "m"): ("to_rows", "m"),
    ("all_to_all", "out", "m", "n"): ("to_columns", "m"),
}
"""By what was measured: the case, and the letter of which a rank's product has a part."""
LOCAL = list(
    dict.fromkeys([*config_module._tuned(DEVICE_KIND).values(), *config_module.CANDIDATES])
)


def kernels(
    case: Case,
    mkn: tuple[int, int, int],
    ranks: int,
    capfd: pytest.CaptureFixture[str],
    **options: Any,
) -> list[Kernel]:
    """The kernels of an operator of whole arrays [1, m, k] and [k, n]."""
    mesh = hopper.mesh(ranks)
    fn = cases.sharded(case, mesh, target="mosaic_gpu", **options)
    m, k, n = mkn
    arguments = [
        jax.ShapeDtypeStruct(
            shape, jnp.bfloat16,
            sharding=jax.NamedSharding(mesh, cases.spec(dimension, len(shape), "t")),
        )
        for shape, dimension in (((1, m, k), case.x), ((k, n), case.w))
    ]  # fmt: skip
    return read(fn, arguments, capfd)


def read(
    fn: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    capfd: pytest.CaptureFixture[str],
) -> list[Kernel]:
    """The kernels of a function."""
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
        size = SIZE * ranks
        launch = Launch(sms=SMS)
        options = {"backend": backend, "launch": launch, "tiles": WIDE}
        found = kernels(case, (size,) * 3, ranks, capfd, **options)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("rows", [128, 64], ids="{} rows".format)
@pytest.mark.parametrize("name", ["gather_x_m", "scatter_m", "all_reduce"])
def test_small_problems(
    name: str, rows: int, ranks: int, backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their tiles have fewer columns, and 64 rows where a rank's part has no more."""
    if backend == "ldst_colocated" and name in BRINGS:
        pytest.skip("it brings no data to tiles")
    options = {"backend": backend, "launch": Launch(sms=SMS)}
    sizes = (rows * ranks, SIZE * ranks, SIZE * ranks)
    found = kernels(cases.BY_NAME[name], sizes, ranks, capfd, **options)
    assert [over(kernel, budget(name, backend)) for kernel in found] == [[]]


@pytest.mark.parametrize("problem,choice", FUSED)
def test_what_auto_takes(
    problem: Problem, choice: Choice, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the sizes at which it was measured: their k steps differ from those above."""
    name, cut = EXCHANGES[problem.form[1:-1]]
    whole = {letter: getattr(problem, letter) for letter in "mkn"}
    whole[cut] *= problem.ranks
    launch = dataclasses.replace(choice.launch, sms=SMS)
    found = kernels(
        cases.BY_NAME[name],
        (whole["m"], whole["k"], whole["n"]),
        problem.ranks,
        capfd,
        backend=choice.backend,
        split=choice.split or 1,
        launch=launch,
    )
    assert [over(kernel, budget(name, choice.backend)) for kernel in found] == [[]]


@pytest.mark.parametrize("adds", [False, True], ids=["alone", "addend"])
@pytest.mark.parametrize("config", LOCAL, ids=lambda c: f"{c.tile_m}x{c.tile_n}")
def test_local_products(
    config: MatmulConfig, adds: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """All tuned configurations and guesses of the local product."""
    whole = jax.NamedSharding(hopper.mesh(1), P())
    m, k, n = 16 * config.tile_m, 4096, 24 * config.tile_n  # several tiles a CTA: a loop
    shapes = [(m, k), (k, n), *[(m, n)] * adds]
    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=whole) for s in shapes]

    def product(x: jax.Array, w: jax.Array, addend: jax.Array | None = None) -> jax.Array:
        memory = config_module.HOPPER_SHARED_MEMORY
        return matmul(x, w, addend=addend, config=config, num_sms=SMS, shared_memory=memory)

    assert [over(kernel, BUDGETS["default"]) for kernel in read(product, arguments, capfd)] == [[]]
