"""CTAs that bring an operand in while others multiply it: interpreted, refused, lowered."""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.backends import gpu_signals
from syncopate_jax.backends.gpu_signals import Signals
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ops import stream_readers
from syncopate_jax.ops.stream_matmul import stream_matmul, tile_table
from syncopate_jax.ops.stream_readers import Arrival, Reader, Readers
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig
from tests.mosaic_interpreter.run import RaceFound, run_checked
from tests.mosaic_interpreter.turns import DeadlockFound
from tests.mosaic_interpreter.versions import needs_known_jax
from tests.ops.test_stream_matmul import normal, on_host

CONFIG = MatmulConfig(tile_n=128, stages=2)
READERS = Readers(ctas=1)
UNSEEN = r"a copy to shared memory by .*load_blocks.* is unordered with a copy to GMEM by .*Reader"
ONE = Fraction(1)
SIDES = {"x": (0, False), "w": (1, False), "w transposed": (1, True)}


def product(
    side: str,
    readers: Readers = READERS,
    mkn: tuple[int, int, int] = (328, 256, 272),
    turn: Fraction = ONE,
    stages: int = 3,
    leaving: int = 1,
) -> float:
    """The relative error of an interpreted product; raises what the interpreter finds.

    The stages are few: they come round.
    """
    streamed, transposed = SIDES[side]
    m, k, n = mkn
    x, w = normal((m, k), 0), normal((k, n), 1)
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    w = w.T if transposed else w
    axis = int(side == "w")
    operand = (x, w)[streamed]
    arrival = Arrival.of(
        readers, CONFIG, operand.shape, 2, side=streamed, axis=axis, turn=turn
    )  # fmt: skip
    count = -(-(m, n)[streamed] // 128)

    def run(x: Any, w: Any) -> Any:
        return stream_readers.matmul(
            x,
            w,
            side=streamed,
            arrival=arrival,
            readers=readers,
            table=tile_table(CONFIG.tiles(m, n), [*range(count), count], streamed),
            config=CONFIG,
            num_sms=readers.ctas + 2,
            out_dtype=jnp.float32,
            w_transposed=transposed,
            interpret=plgpu.InterpretGPUParams(),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_readers, "STAGES", stages)
        patch.setattr(stream_readers, "LEAVING", leaving)
        found = np.asarray(run_checked(run, x, w), np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@needs_known_jax
@pytest.mark.parametrize("side", SIDES)
def test_values(side: str) -> None:
    assert product(side) < 1e-6


@needs_known_jax
@pytest.mark.parametrize(
    ("readers", "turn", "stages", "leaving"),
    [
        (Readers(ctas=1, parts=1), Fraction(2), 3, 1),
        (Readers(ctas=2), Fraction(3, 2), 2, 1),
        (Readers(ctas=2, parts=2), ONE, 5, 2),
        (Readers(), ONE, stream_readers.STAGES, stream_readers.LEAVING),
    ],
    ids=["no parts", "few stages", "two leave", "as by default"],
)
def test_values_of_other_readers(
    readers: Readers, turn: Fraction, stages: int, leaving: int
) -> None:
    assert product("x", readers, turn=turn, stages=stages, leaving=leaving) < 1e-6


@needs_known_jax
def test_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Signals, "wait", lambda *args, **options: None)
    with pytest.raises(RaceFound, match=UNSEEN):
        product("x")


@needs_known_jax
def test_a_reader_that_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Signals.wait
    monkeypatch.setattr(Signals, "wait", lambda self, slot, count: wait(self, slot, count - 1))
    with pytest.raises(RaceFound, match=UNSEEN):
        product("x")


@needs_known_jax
def test_a_missing_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_signals, "fence", lambda: None)
    with pytest.raises(RaceFound, match=UNSEEN):
        product("x")


@needs_known_jax
def test_a_counter_that_is_raised_before_its_pieces_have_landed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = plgpu.wait_smem_to_gmem
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, **_: wait(n, wait_read_only=True))
    with pytest.raises(RaceFound, match=UNSEEN):
        product("x")


@needs_known_jax
def test_a_stage_that_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = plgpu.wait_smem_to_gmem
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, **_: None if n else wait(n))
    with pytest.raises(RaceFound, match=r"\(Reader\.load.*\) is unordered with a copy to GMEM by"):
        product("x", Readers(ctas=1, parts=1))


@needs_known_jax
def test_readers_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "window", 1)
    with pytest.raises(DeadlockFound, match=r"counter .* to reach 1, it is 0: wait"):
        product("x")


@pytest.mark.parametrize(
    ("turn", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (Fraction(3, 2), [2, 1, 2]), (9, [5])]
)
@pytest.mark.parametrize("axis", [0, 1])
def test_an_arrival_has_every_piece_in_its_part(
    axis: int, turn: Fraction, sizes: list[int]
) -> None:
    shape = (600, 512) if axis == 0 else (512, 600)
    readers = Readers(parts=3)  # of 8 k steps: 2 parts
    arrival = Arrival.of(readers, CONFIG, shape, 2, side=axis, axis=axis, turn=Fraction(turn))
    chunks = len(sizes)
    assert np.diff(arrival.bounds).tolist() == sizes
    assert (arrival.parts, arrival.slots, arrival.fewest) == (2, 2 * chunks, 4 * min(sizes))
    assert arrival.piece == ((32, 256) if axis == 0 else (64, 128))  # 512 bytes wide at most
    assert (arrival.of_part, arrival.pieces) == (4, 5 * 2 * 4)
    numbers = jnp.arange(arrival.pieces + 200, dtype=jnp.int32)
    slot, row, column = map(np.asarray, jax.vmap(arrival.place)(numbers))
    slot, after = np.split(slot, [arrival.pieces])
    assert (np.diff(slot) >= 0).all()
    assert after.min() > slot[-1]
    at = np.stack([row, column])[:, : arrival.pieces]
    assert len(set(map(tuple, at.T))) == arrival.pieces
    band, part = at[axis] // 128, at[1 - axis] // 256
    chunk = np.searchsorted(arrival.bounds, band, side="right") - 1
    np.testing.assert_array_equal(slot, chunk * 2 + part)
    np.testing.assert_array_equal(chunk, jax.vmap(arrival.chunk)(jnp.asarray(band, jnp.int32)))
    for one in range(chunks):
        times = min((slot == 2 * one).sum(), 20)
        assert arrival.raised(jnp.int32(one), 20) == times


def test_readers_that_cannot_be_are_refused() -> None:
    for given, message in (
        ({"ctas": 0}, r"ctas must be in 1\.\.2147483647, found 0"),
        ({"parts": 1.5}, r"parts must be an integer, found 1.5"),
    ):
        with pytest.raises(InputError, match=f"Readers: {message}"):
            Readers(**given)
    assert type(Readers(ctas=np.int64(2)).ctas) is int  # type: ignore[arg-type]


def test_what_readers_do_not_serve_is_refused() -> None:
    x, w = on_host(normal((128, 256), 0)), normal((256, 256), 1)
    by = functools.partial(stream_matmul, backend="tma_dedicated", num_sms=8)
    for given, message in (
        ({"backend": "nope"}, "backend needs one of copy_engine, tma_dedicated, found 'nope'"),
        ({"readers": 4}, "readers needs Readers or None, found 4"),
        ({"backend": "copy_engine", "readers": Readers()}, "readers are of backend 'tma_dedi"),
    ):
        with pytest.raises(InputError, match=f"stream_matmul: {message}"):
            by(x, w, **given)
    narrow = on_host(normal((128, 252), 0)), normal((252, 256), 1)
    for arrays, given, message in (
        ((x, w), {"num_sms": 4}, "tma_dedicated: 4 of 4 multiprocessors read; none is left"),
        ((x, w), {"config": MatmulConfig(cluster_m=2)}, "tma_dedicated: .* clusters of 2 CTAs"),
        (narrow, {}, "tma_dedicated: x has rows of 252 elements of bfloat16"),
    ):
        run = jax.jit(functools.partial(by, **given)).trace(*arrays)
        with pytest.raises(UnsupportedError, match=f"stream_matmul: {message}"):
            run.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("side", SIDES)
def test_the_operand_reaches_the_kernel_where_it_is(side: str) -> None:
    streamed, transposed = SIDES[side]
    x, w = normal((512, 256), 0), normal((256, 1024), 1)
    arrays = [x, w.T if transposed else w]
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    arrays[streamed] = on_host(arrays[streamed])
    run = jax.jit(
        functools.partial(
            stream_matmul,
            w_transposed=transposed,
            backend="tma_dedicated",
            num_sms=12,
            preferred_element_type=jnp.float32,
        )
    )
    np.testing.assert_allclose(run(*arrays), expected, atol=1e-4)
    text = run.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    hosted = re.findall(r"%arg(\d): tensor<\S+> {mhlo.memory_kind = \"pinned_host\"", text)
    assert hosted == [str(streamed)]
    assert re.findall(r"custom_call @(\w+)\(%arg0, %arg1,", text) == ["mosaic_gpu_v2"]
    assert "annotate_device_placement" not in text
