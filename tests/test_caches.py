"""What is kept of every shape that a process has seen is kept in caches with a bound."""

from __future__ import annotations

import sys
from typing import Any

import jax
import pytest

from syncopate_jax.backends import triton_call
from syncopate_jax.ops import all_gather_matmul, fused, matmul, matmul_reduce_scatter
from syncopate_jax.options import Launch
from syncopate_jax.runtime.folded import fold
from tests.ops import cases

ON_GPU = {"launch": Launch(sms=132)}
WAYS = {
    "xla": {"backend": "xla"},
    "remote_dma": {"backend": "remote_dma"},
    "mosaic_gpu": {"backend": "tma_dedicated", "target": "mosaic_gpu", **ON_GPU},
    "mosaic_gpu, colocated": {"backend": "tma_colocated", "target": "mosaic_gpu", **ON_GPU},
    "triton": {"backend": "ldst_dedicated", "target": "triton", **ON_GPU},
}


def unbounded() -> dict[str, int]:
    """How much is in every cache of the package that has no bound, by the function's name."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        for name, value in list(vars(module).items() if "syncopate_jax" in module_name else ()):
            if hasattr(value, "cache_info") and value.__module__ == module_name:
                info = value.cache_info()
                if info.maxsize is None:
                    found[f"{module_name}.{name}"] = info.currsize
    return found


def trace(rows: int, given: dict[str, Any]) -> None:
    """Operators on as many rows of a rank, folded where a GPU could run them."""
    name = "ranks" if "launch" in given else "t"
    shapes = [(1, rows, 64), (64, 128)]
    for operator in (all_gather_matmul, matmul_reduce_scatter):

        def local(x: jax.Array, w: jax.Array, operator: Any = operator) -> jax.Array:
            return operator(x, w, axis_name=name, **given)

        if "launch" in given:
            fn, ranks = fold(local, name), (2,)
        else:
            mesh, spec = cases.ranks_mesh(2), jax.P("t")
            fn = jax.shard_map(local, mesh=mesh, in_specs=jax.P(), out_specs=spec, check_vma=False)
            ranks = ()
        jax.eval_shape(fn, *(jax.ShapeDtypeStruct((*ranks, *s), "bfloat16") for s in shapes))
    jax.eval_shape(matmul, *(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes))


@pytest.mark.parametrize("way", WAYS)
def test_caches_that_grow_with_shapes_have_a_bound(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "triton":
        pytest.importorskip("triton")
        monkeypatch.setattr(triton_call, "NEEDED", ("triton",))
    trace(64, WAYS[way])
    held, remembered = unbounded(), fused.remembered.cache_info().misses
    for rows in range(80, 208, 16):
        trace(rows, WAYS[way])
    assert unbounded() == held
    assert way == "xla" or fused.remembered.cache_info().misses >= remembered + 16
