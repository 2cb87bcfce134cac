"""What is prepared for every target where partial results are added on their way."""

from __future__ import annotations

import pytest

from syncopate_jax.ops import fused
from syncopate_jax.ops.blocked import block
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options

SCATTER = Contraction("bmk", "kn", "bmn", "reduce_scatter", "out", scatter="m")


@pytest.mark.parametrize(
    "template,held", [("reduce_scatter_ring", "float32"), ("reduce_scatter_direct", "bfloat16")]
)
@pytest.mark.parametrize("target", fused.TARGETS)
def test_sums_on_the_way_are_float32(target: str, template: str, held: str) -> None:
    if target == "triton":
        pytest.importorskip("triton")
    layout = block(SCATTER, (1, 512, 64), (64, 256), 4)
    options = Options(plan=template, target=target)
    _, kernel, plan = fused.prepare(
        "reduce_scatter", layout, "bfloat16", "bfloat16", options, target=target
    )
    assert {tensor.dtype for tensor in plan.tensors} == {held}
    assert [str(out.dtype) for out in kernel.out_shape] == [held]
