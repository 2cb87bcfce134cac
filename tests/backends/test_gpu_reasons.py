"""What the in-kernel GPU backends refuse, and what they say."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ops import all_gather_matmul, matmul_reduce_scatter
from syncopate_jax.options import Launch
from syncopate_jax.registry import templates
from syncopate_jax.runtime.folded import fold


def trace(operator: Any, x: tuple[int, ...], w: tuple[int, ...], **given: Any) -> None:
    """Traces an operator on rows of ranks; ``x`` and ``w`` are one rank's shapes."""
    given = {"target": "mosaic_gpu", "launch": Launch(sms=132)} | given
    dtype = given.pop("dtype", jnp.bfloat16)
    ranks, platform = given.pop("ranks", 2), given.pop("platform", "cuda")
    arrays = (jax.ShapeDtypeStruct((ranks, *shape), dtype) for shape in (x, w))
    fn = fold(lambda x, w: operator(x, w, axis_name="ranks", **given), "ranks")
    jax.jit(fn).trace(*arrays).lower(lowering_platforms=(platform,))


def refused(text: str, error: type[Exception] = UnsupportedError) -> Any:
    return pytest.raises(error, match=re.escape(text))


@pytest.mark.parametrize(
    ("operator", "x", "w", "given", "text"),
    [
        (
            all_gather_matmul,
            (128, 64),
            (64, 128),
            {"backend": "tma_dedicated", "dtype": jnp.float32},
            "the tensor cores multiply bfloat16 or float16, found float32",
        ),
        (
            all_gather_matmul,
            (128, 68),
            (68, 128),
            {"backend": "tma_dedicated"},
            "rows of lhs are 136 bytes; the copy unit needs a multiple of 16",
        ),
        (
            all_gather_matmul,
            (128, 64),
            (64, 136),
            {"backend": "tma_colocated"},
            "need a multiple of 32 bytes",
        ),
        (
            all_gather_matmul,
            (128, 64),
            (64, 128),
            {"backend": "tma_dedicated", "launch": Launch(sms=132, communicating=0)},
            "needs at least 1 CTA of a rank to communicate and 1 to compute, found 0 and 66",
        ),
        (
            all_gather_matmul,
            (128, 64),
            (64, 128),
            {"backend": "tma_dedicated", "launch": Launch(sms=8)},
            "found 4 and 0",
        ),
        (
            all_gather_matmul,
            (128, 64),
            (64, 128),
            {"backend": "tma_colocated", "plan": "all_gather_ring", "ranks": 3},
            "on nvlink) forwards what it received; a tile reads from the owner",
        ),
    ],
)
def test_reason(operator: Any, x: Any, w: Any, given: dict[str, Any], text: str) -> None:
    with refused(text):
        trace(operator, x, w, **given)


def test_stores_from_registers_need_whole_tiles() -> None:
    with refused("tiles of 128 do not divide 200, and a store from registers is not clipped"):
        trace(matmul_reduce_scatter, (400, 64), (64, 256), backend="ldst_colocated")


def test_every_channel_needs_a_warpgroup_that_copies() -> None:
    """Else nobody does what is on it, and nothing waits for that."""
    usual, shape = templates.get("all_gather_swizzle"), (2, 1, 512, 64)
    plan = usual(2, shape, dtype="bfloat16", axis=0, split=4, split_axis=2, tensor="x")
    lists = [
        [dataclasses.replace(op, channel=f"port{i}") for i, op in enumerate(plan.ops(rank))]
        for rank in range(2)
    ]
    plan = build_plan("ports", 2, plan.tensors, plan.initial, plan.goals, lists)
    few, enough = (Launch(sms=132, communicating=n) for n in (1, 2))
    given = {"backend": "tma_dedicated", "plan": plan}
    with refused("has 4 channels, each of which needs a warpgroup that copies"):
        trace(all_gather_matmul, (1, 512, 64), (64, 128), launch=few, **given)
    trace(all_gather_matmul, (1, 512, 64), (64, 128), launch=enough, **given)


def test_the_number_of_multiprocessors_must_be_known() -> None:
    with refused("on CPUs and TPUs use backend 'remote_dma' or 'xla'", InputError):
        trace(all_gather_matmul, (128, 64), (64, 128), backend="tma_dedicated", launch=None)


def test_other_platforms_are_told_what_they_can_use() -> None:
    """Not a target, whose kernels the backend has none of."""
    text = "runs on CUDA GPUs, this program is for cpu; on CPUs and TPUs use backend 'remote_dma' "
    with refused(text):
        shapes = (128, 64), (64, 128)
        trace(all_gather_matmul, *shapes, backend="tma_dedicated", platform="cpu")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"sms": 0}, "launch: sms needs at least 1, found 0"),
        ({"communicating": -1}, "launch: communicating needs at least 0, found -1"),
        ({"watchdog_us": -5}, "launch: watchdog_us needs at least 0, found -5"),
        ({"late_us": 10**7}, "launch: late_us needs at most 1000000, a second, found 10000000"),
    ],
)
def test_launches_are_checked(given: dict[str, int], text: str) -> None:
    with refused(text, InputError):
        Launch(**given)


def test_kernels_for_devices_do_not_fold() -> None:
    with refused("this backend needs a device a rank: use jax.shard_map, or a backend that folds"):
        trace(
            all_gather_matmul, (128, 64), (64, 128), backend="remote_dma", target="tpu", launch=None
        )
