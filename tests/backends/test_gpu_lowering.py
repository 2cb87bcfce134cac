"""Every operator and in-kernel GPU backend becomes one Hopper kernel, on a host without a GPU."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.options import Launch
from syncopate_jax.registry import operators
from syncopate_jax.runtime.folded import fold
from tests.ops import cases
from tests.ops.cases import BY_NAME, CASES, Case

BACKENDS = ("tma_dedicated", "ldst_dedicated", "tma_colocated", "ldst_colocated")
SMS = 132
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "collective_permute")


def options(backend: str, **launch: Any) -> dict[str, Any]:
    return {"target": "mosaic_gpu", "backend": backend, "launch": Launch(sms=SMS, **launch)}


def brings(case: Case) -> bool:
    """Whether the exchange comes before the product."""
    return operators.get(case.operator.__name__).place != "out"


def arrays(ranks: int, *, batch: int = 1, m: int = 256, k: int = 128, n: int = 256) -> Any:
    shapes = (batch, m * ranks, k * ranks), (k * ranks, n * ranks), (batch, m * ranks, n * ranks)
    return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)


def lowered(fn: Any, *args: Any) -> tuple[str, Counter[str]]:
    """The program for a GPU, and how often each operation occurs in it."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = Counter(re.findall(r"stablehlo\.(\w+)", text))
    found["kernel"] = len(re.findall(r"custom_call @mosaic_gpu_v2", text))
    return text, found


def check_kernel(case: Case, backend: str, ranks: int, **changes: Any) -> None:
    fn = cases.sharded(case, cases.ranks_mesh(ranks), **options(backend))
    if backend == "ldst_colocated" and brings(case):
        with pytest.raises(UnsupportedError, match="brings data to tiles"):
            lowered(fn, *arrays(ranks, **changes)[:2])
        return
    text, found = lowered(fn, *arrays(ranks, **changes)[:2])
    assert found["kernel"] == 1
    assert not any(found[name] for name in COLLECTIVES)
    wanted = ",".join(map(str, range(ranks)))
    assert f'xla_replica_ids = "{wanted}"' in text


@each_backend
@each_case
def test_one_kernel_on_a_mesh(case: Case, backend: str) -> None:
    check_kernel(case, backend, 4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8])
@each_backend
@each_case
def test_one_kernel_on_smaller_and_larger_meshes(case: Case, backend: str, ranks: int) -> None:
    check_kernel(case, backend, ranks)


@pytest.mark.parametrize("name", ["gather_x_m", "scatter_m"])
def test_leading_dimensions(name: str) -> None:
    check_kernel(BY_NAME[name], "tma_dedicated", 2, batch=3)


@pytest.mark.parametrize("name", ["gather_x_m", "scatter_m"])
@pytest.mark.parametrize("backend", ["tma_dedicated", "ldst_dedicated", "tma_colocated"])
def test_ranks_along_two_axes(name: str, backend: str) -> None:
    axes = ("y", "x")
    mesh = jax.make_mesh((2, 2), axes, (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    fn = cases.sharded(BY_NAME[name], mesh, axes, **options(backend))
    text, found = lowered(fn, *arrays(4)[:2])
    assert found["kernel"] == 1
    assert 'xla_replica_ids = "0,1,2,3"' in text


def folded(case: Case, **given: Any) -> Any:
    return fold(
        lambda x, w: case.operator(x, w, axis_name="ranks", **case.options, **given), "ranks"
    )


def local_arrays(case: Case, ranks: int, **sizes: int) -> Any:
    """Operands as rows: what each rank holds."""
    found = []
    for whole, dimension in zip(arrays(ranks, **sizes), (case.x, case.w, case.out), strict=True):
        shape = list(whole.shape)
        if dimension is not None:
            shape[dimension] //= ranks
        found.append(jax.ShapeDtypeStruct((ranks, *shape), whole.dtype))
    return found


@pytest.mark.parametrize("backend", ["tma_dedicated", "tma_colocated"])
@each_case
def test_folded_ranks_share_one_launch(case: Case, backend: str) -> None:
    text, found = lowered(folded(case, **options(backend)), *local_arrays(case, 3)[:2])
    assert found["kernel"] == 1
    assert not any(found[name] for name in COLLECTIVES)
    assert "xla_replica_ids" not in text


@pytest.mark.parametrize("name", ["gather_x_m", "scatter_m", "to_rows"])
def test_folded_gradients_are_kernels_too(name: str) -> None:
    case = BY_NAME[name]

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y = case.operator(x, w, axis_name="ranks", **case.options, **options("tma_dedicated"))
        return (y.astype(jnp.float32) ** 2).sum()

    fn = fold(jax.grad(loss, (0, 1)), "ranks")
    _, found = lowered(fn, *local_arrays(case, 2)[:2])
    assert found["kernel"] == 3


def test_a_shared_weight_has_no_rank_axis() -> None:
    case = BY_NAME["gather_x_m"]
    fn = fold(
        lambda x, w: case.operator(x, w, axis_name="ranks", **options("tma_dedicated")),
        "ranks",
        in_axes=(0, None),
    )
    x, w, _ = arrays(2)
    x = jax.ShapeDtypeStruct((2, 1, 256, 256), x.dtype)
    text, found = lowered(fn, x, w)
    assert found["kernel"] == 1
    assert "tensor<2x256x512xbf16>" not in text


@pytest.mark.parametrize("backend", ["tma_dedicated", "tma_colocated"])
@pytest.mark.parametrize("name", ["gather_x_m", "scatter_m"])
def test_watched_kernels(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is a host callback, which cannot be lowered for a platform that is not there."""
    records = []
    monkeypatch.setattr(
        "syncopate_jax.backends.gpu_kernel.raise_given_up",
        lambda record, *_: records.append(record.shape),
    )
    case, given = BY_NAME[name], options(backend, watchdog_us=1000, late_us=50)
    fn = cases.sharded(case, cases.ranks_mesh(2), **given)
    assert lowered(fn, *arrays(2)[:2])[1]["kernel"] == 1
    assert lowered(folded(case, **given), *local_arrays(case, 3)[:2])[1]["kernel"] == 1
    assert records == [(1, 6), (3, 6)]
