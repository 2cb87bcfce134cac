"""Products beside CTAs that read an operand in host memory compile to Hopper machine code."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from syncopate_jax.ops import stream_readers
from syncopate_jax.ops.stream_matmul import tile_table
from syncopate_jax.ops.stream_readers import Arrival, Readers
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig
from syncopate_jax.runtime import custom_call
from tests.aot import hopper
from tests.aot.budget import BUDGETS, over
from tests.aot.hopper import Kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hopper.missing() is not None, reason=hopper.missing() or ""),
]
CONFIG = MatmulConfig()
M, K, N = 8192, 4096, 14336


@pytest.mark.parametrize("readers", [Readers(), Readers(ctas=2, parts=8)], ids=["4", "2"])
@pytest.mark.parametrize(
    ("side", "transposed"), [(0, False), (1, True), (1, False)], ids=["x", "w", "w [K, N]"]
)
def test_within_budget_and_read_in_place(
    side: int, transposed: bool, readers: Readers, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = jax.NamedSharding(hopper.mesh(1), P())
    shapes = [(M, K), (N, K) if transposed else (K, N)]
    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=whole) for s in shapes]
    axis = int(side == 1 and not transposed)
    tiles = CONFIG.tiles(M, N)
    turn = Fraction(128, tiles[1 - side])
    arrival = Arrival.of(readers, CONFIG, shapes[side], 2, side=side, axis=axis, turn=turn)

    def product(x: Any, w: Any) -> Any:
        operands = [x, w]
        operands[side] = custom_call.in_place(operands[side])
        return stream_readers.matmul(
            *operands,
            side=side,
            arrival=arrival,
            readers=readers,
            table=tile_table(tiles, arrival.bounds, side),
            config=CONFIG,
            num_sms=132,
            out_dtype=jnp.bfloat16,
            w_transposed=transposed,
        )

    capfd.readouterr()
    text = hopper.compiled(product, *arguments, hosted=[side]).as_text()
    (kernel,) = Kernel.read("".join(capfd.readouterr()))
    assert over(kernel, BUDGETS["default"]) == []
    names = ["x", "w"]
    hosted = re.findall(r"%(\w+)\.1 = \S+:S\(5\)} parameter", text)
    assert hosted == [names[side]]
    assert len(re.findall(r"custom-call\(%x\.1, %w\.1, .*mosaic_gpu_v2", text)) == 1
