"""The copy engine's protocol on simulated CPU devices: meetings, copies, flags, ends, errors."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh

from syncopate_jax.errors import InputError
from syncopate_jax.native import build, copies

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

RANKS, ROWS, COLUMNS = 4, 6, 5
ROW = COLUMNS * 4


def gather(ranks: int = RANKS, **changes: Any) -> copies.Call:
    """All-gather of [ROWS, COLUMNS] float32: a chunk a peer, a flag a chunk."""
    found = []
    for dst in range(ranks):
        for distance in range(ranks):
            src = (dst + distance) % ranks
            lane = 0 if src == dst else 1 + distance % 2
            place = (0, 0, ROW, 0, src * ROWS * ROW, ROW, ROWS * ROW, 1)
            found.append(copies.Copy(dst, src, *place, src, 1, lane))
    return dataclasses.replace(copies.Call("gather", ranks, tuple(found), ranks), **changes)


def where(group: Any = 0, axis: str = "x") -> jax.Array:
    return jnp.stack([jnp.asarray(i, jnp.int32) for i in (group, lax.axis_index(axis))])


def gathered(call: copies.Call, x: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What arrived, and the flags for ``join``."""
    out = jax.ShapeDtypeStruct((call.ranks * ROWS, COLUMNS), jnp.float32)
    (buffer,), flags = copies.start(call, place, [x], [out])
    (buffer,) = copies.wait(call, flags, jnp.asarray(call.wanted())[place[1]], [buffer])
    return buffer, flags


def on_mesh(
    body: Callable[..., Any], ranks: int = RANKS, shape: tuple[int, ...] | None = None
) -> Callable[..., Any]:
    """``body`` on simulated devices; arguments and results are sharded along their first axis."""
    names = ("x",) if shape is None else ("g", "x")
    devices = np.array(jax.devices()[: int(np.prod(shape or ranks))]).reshape(shape or ranks)
    spec = jax.P(names)
    return jax.jit(
        jax.shard_map(
            body, mesh=Mesh(devices, names), in_specs=spec, out_specs=spec, check_vma=False
        )
    )


def values(seed: int, blocks: int = RANKS) -> jax.Array:
    x = np.random.default_rng(seed).normal(size=(blocks * ROWS, COLUMNS))
    return jnp.asarray(x, jnp.float32)


def test_every_rank_gets_what_the_others_have() -> None:
    def body(x: jax.Array) -> jax.Array:
        buffer, flags = gathered(gather(), x, where())
        return copies.join([buffer + lax.axis_index("x")], flags, [x])[0]

    run = on_mesh(body)
    for seed in range(100):
        x = values(seed)
        got = np.asarray(run(x)).reshape(RANKS, *x.shape)
        np.testing.assert_array_equal(got, np.stack([x + r for r in range(RANKS)]))


def test_a_call_site_in_a_loop_meets_once_a_turn() -> None:
    def body(x: jax.Array) -> jax.Array:
        def turn(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            buffer, flags = gathered(gather(), x, where())
            total = buffer.reshape(RANKS, ROWS, COLUMNS).sum(axis=0)
            (after,) = copies.join([x + total], flags, [x])
            return after, after

        return lax.scan(turn, x, length=20)[1].reshape(-1, COLUMNS)

    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (RANKS * ROWS, COLUMNS)), jnp.float32)
    got = np.asarray(on_mesh(body)(x), np.float64).reshape(RANKS, 20, ROWS, COLUMNS)
    expected = np.asarray(x, np.float64).reshape(RANKS, ROWS, COLUMNS)
    for turn in range(8):  # exact in float32 so far
        expected = expected + expected.sum(axis=0)
        np.testing.assert_array_equal(got[:, turn], expected)


def test_equal_calls_in_one_program_stay_apart() -> None:
    def body(x: jax.Array, y: jax.Array) -> jax.Array:
        a, a_flags = gathered(gather(), x, where())
        source = y + a[:ROWS]
        b, b_flags = gathered(gather(), source, where())
        (doubled,) = copies.join([a * 2], a_flags, [x])
        return copies.join([doubled + b], b_flags, [source])[0]

    run = on_mesh(body)
    for seed in range(60):
        x, y = values(seed), values(seed + 1000)
        expected = np.asarray(x) * 2 + np.asarray(y) + np.tile(np.asarray(x)[:ROWS], (RANKS, 1))
        got = np.asarray(run(x, y)).reshape(RANKS, *x.shape)
        np.testing.assert_allclose(got, np.stack([expected] * RANKS), rtol=1e-5, atol=1e-6)


def test_groups_of_ranks_meet_among_themselves() -> None:
    def body(x: jax.Array) -> jax.Array:
        buffer, flags = gathered(gather(), x, where(lax.axis_index("g")))
        return copies.join([buffer], flags, [x])[0]

    run = on_mesh(body, shape=(2, RANKS))
    x = values(3, 2 * RANKS)
    got = np.asarray(run(x)).reshape(2, RANKS, RANKS * ROWS, COLUMNS)
    halves = np.asarray(x).reshape(2, RANKS * ROWS, COLUMNS)
    np.testing.assert_array_equal(got, np.stack([halves] * RANKS, axis=1))


def test_ranks_learn_the_addresses_of_what_their_kernels_touch() -> None:
    call = copies.Call("far", RANKS, (), 2, far=(0, -1, -3))  # an operand, a buffer, the flags
    buffer = jax.ShapeDtypeStruct((5,), jnp.float32)
    table = jax.ShapeDtypeStruct((3 * RANKS, 2), jnp.int32)

    def read(addresses: Any, _: Any) -> np.ndarray:
        """The first number of every rank's operand, and which flags are zero."""
        found = np.ascontiguousarray(addresses).view(np.int64).reshape(3, RANKS)
        first = [ctypes.c_float.from_address(int(a)).value for a in found[0]]
        flags = [ctypes.c_int32.from_address(int(a) + 4).value for a in found[2]]
        distinct = len(set(found.reshape(-1).tolist()))
        return np.array([*first, *flags, distinct], np.float32)

    def body(x: jax.Array) -> jax.Array:
        (_, addresses), flags = copies.start(call, where(), [x], [buffer, table])
        out = jax.ShapeDtypeStruct((2 * RANKS + 1,), jnp.float32)
        seen = jax.pure_callback(read, out, addresses, x)
        return copies.join([seen], flags, [x])[0]

    x = values(5)
    got = np.asarray(on_mesh(body)(x)).reshape(RANKS, -1)
    first = np.asarray(x).reshape(RANKS, ROWS, COLUMNS)[:, 0, 0]
    np.testing.assert_array_equal(got, [[*first, *[0] * RANKS, 3 * RANKS]] * RANKS)


def test_a_far_array_that_is_not_there_is_named() -> None:
    call = copies.Call("far", RANKS, (), 1, far=(1,))
    table = jax.ShapeDtypeStruct((RANKS, 2), jnp.int32)

    def body(x: jax.Array) -> jax.Array:
        (_,), flags = copies.start(call, where(), [x], [table])
        return copies.join([x], flags, [x])[0]

    with pytest.raises(Exception, match="far array 1 is neither an operand nor a result"):
        jax.block_until_ready(on_mesh(body)(values(0)))


def test_a_rank_that_stays_away_is_named() -> None:
    call = gather(limit_ms=500)

    def body(x: jax.Array) -> jax.Array:
        def go(x: jax.Array) -> jax.Array:
            return gathered(call, x, where())[0][:ROWS]

        return lax.cond(lax.axis_index("x") == 2, lambda x: x, go, x)

    expected = (
        r"gather: rank 2 of 4 did not come to the start of the copies within 500 ms "
        r"\(here: ranks 0, 1, 3\); every rank must make the same calls"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
        on_mesh(body)(values(0)).block_until_ready()


def test_a_rank_that_comes_too_late_is_told_who_waited_and_how_long() -> None:
    """A program that takes what the late rank made shows this error, and not that of the others."""

    def late(x: np.ndarray) -> np.ndarray:
        time.sleep(0.5)
        return np.asarray(x)

    def body(x: jax.Array) -> jax.Array:
        slow = lambda x: jax.pure_callback(late, x, x)  # noqa: E731
        x = lax.cond(lax.axis_index("x") == 0, slow, lambda x: x, x)
        return gathered(gather(limit_ms=100), x, where())[0][:ROWS]

    expected = (
        "gather: rank 0 came to the start of the copies when ranks 1, 2, 3 of 4 had waited 100 ms "
        "and given it up; every rank must make the same calls in the same order, within that time"
    )
    first = on_mesh(body)(values(0)).addressable_shards[0].data
    with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
        (first + 1).block_until_ready()


def test_two_devices_with_one_rank_are_found_out() -> None:
    def body(x: jax.Array) -> jax.Array:
        place = jnp.stack([jnp.int32(0), lax.axis_index("x") // 2])
        return gathered(gather(limit_ms=500), x, place)[0][:ROWS]

    expected = "two devices say they are rank|did not come to the start of the copies"
    with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
        on_mesh(body)(values(0)).block_until_ready()


def test_how_long_ranks_wait_is_settable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gather().limit_ms == 30_000
    monkeypatch.setenv("SYNCOPATE_MEETING_MS", "120000")
    assert gather().limit_ms == 120_000
    for wrong in ("0", "-1", "2.5", "9" * 30):
        monkeypatch.setenv("SYNCOPATE_MEETING_MS", wrong)
        with pytest.raises(
            InputError,
            match="SYNCOPATE_MEETING_MS: needs milliseconds, a whole number of 1 to 2147483647, "
            f"found '{wrong}'",
        ):
            gather()


def one(**changes: Any) -> copies.Call:
    copy = copies.Copy(0, 0, 0, 0, ROW, 0, 0, ROW, ROW, ROWS, 0, 1, 0)
    fields = {f.name for f in dataclasses.fields(copies.Copy)}
    copy = dataclasses.replace(copy, **{k: v for k, v in changes.items() if k in fields})
    call = copies.Call("one", 1, (copy,), 1, joined=False, limit_ms=300)
    return dataclasses.replace(call, **{k: v for k, v in changes.items() if k not in fields})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            one(rows=ROWS + 1),
            "a copy of rank 0's operand 0 to rank 0's result 0 leaves its buffers",
        ),
        (one(operand=3), "rank 0's operand 3 to rank 0's result 0 leaves its buffers"),
        (one(slot=7), "leaves its buffers"),
        (one(src_rank=1), "copy 0 goes from rank 1 to rank 0; there are 1"),
        (
            one(copies=tuple(one(lane=lane).copies[0] for lane in (1, 2))),
            "one: copy 1 raises flag 0 of rank 0 on lane 2, and one before it on lane 1; give all "
            "copies of a flag one lane",
        ),
        (one(lane=9), "copy 0 is on lane 9; there are 1 to 8"),
        (one(slot=-1), "one: chunk 0 did not arrive within 300 ms: its flag is 0, needs 1"),
    ],
)
def test_wrong_copies_are_refused(call: copies.Call, message: str) -> None:
    def body(x: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        (buffer,), flags = copies.start(call, copies.ALONE, [x], [out])
        return copies.wait(call, flags, jnp.ones(1, jnp.int32), [buffer])[0]

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(body)(values(0, 1)).block_until_ready()


@pytest.mark.parametrize("aliases", [None, {0: 1}], ids=["apart", "in place"])
def test_flags_start_as_they_are_given_wherever_xla_puts_them(
    aliases: dict[int, int] | None,
) -> None:
    """All of them, and the place behind them: else a flag starts as what its memory held."""
    build.load()
    call = one(copies=(), slots=9)
    given = jnp.asarray([*range(101, 101 + call.slots), *copies.ALONE], jnp.int32)

    def body(given: jax.Array, x: jax.Array) -> list[jax.Array]:
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, given)]
        return jax.ffi.ffi_call("syncopate_start", types, input_output_aliases=aliases)(
            given,
            x,
            name=call.name,
            ranks=np.int64(1),
            limit_ms=np.int64(300),
            joined=False,
            table=call.table,
            far=np.array([], np.int64),
        )

    _, found = jax.jit(body)(given, values(0, 1))
    np.testing.assert_array_equal(found, given)


def test_a_join_needs_its_start() -> None:
    def body(x: jax.Array) -> jax.Array:
        flags = jnp.zeros(1, jnp.int32) + x[0, 0].astype(jnp.int32)
        return copies.join([x * 2], flags, [x])[0]

    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match="a join on device 0 has no start of the same run; give it the flags that start "
        "returned, or, where a call failed before, mend that one first",
    ):
        jax.jit(body)(values(0, 1)).block_until_ready()


def test_the_cost_of_calls_is_counted() -> None:
    def body(x: jax.Array) -> jax.Array:
        buffer, flags = gathered(gather(), x, where())
        return copies.join([buffer], flags, [x])[0]

    run = on_mesh(body)
    run(values(0)).block_until_ready()
    copies.take_cost()
    run(values(1)).block_until_ready()
    cost = copies.take_cost()
    assert (cost["start_calls"], cost["join_calls"]) == (RANKS, RANKS)
    assert 0 < cost["start_work_us"] <= cost["start_most_us"]
    assert copies.take_cost()["start_calls"] == 0


@given(st.data())
def test_rows_of_a_box_are_the_box(data: st.DataObject) -> None:
    box = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    ends = []
    for _ in range(2):
        corner = [data.draw(st.integers(0, 2)) for _ in box]
        shape = [a + n + data.draw(st.integers(0, 2)) for a, n in zip(corner, box, strict=True)]
        ends.append((shape, corner))
    (src_shape, src_at), (dst_shape, dst_at) = ends
    src = np.random.default_rng(0).integers(1, 2**15, src_shape).astype(np.int16)
    dst, expected = np.zeros(dst_shape, np.int16), np.zeros(dst_shape, np.int16)

    def inside(corner: list[int]) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(corner, box, strict=True))

    expected[inside(dst_at)] = src[inside(src_at)]
    from_bytes, to_bytes = src.reshape(-1).view(np.uint8), dst.reshape(-1).view(np.uint8)
    for a, a_pitch, b, b_pitch, width, rows in copies.box_rows(2, *ends, box):
        for row in range(rows):
            start, stop = a + row * a_pitch, b + row * b_pitch
            to_bytes[stop : stop + width] = from_bytes[start : start + width]
    np.testing.assert_array_equal(dst, expected)


def test_contiguous_boxes_are_one_row() -> None:
    shape = (4, 6, 8)
    assert copies.box_rows(2, (shape, (1, 0, 0)), (shape, (0, 0, 0)), (2, 6, 8)) == [
        (96, 192, 0, 192, 192, 1)
    ]
    assert copies.box_rows(2, (shape, (0, 0, 2)), (shape, (0, 0, 0)), (4, 6, 4)) == [
        (4, 16, 0, 16, 8, 24)
    ]


def test_a_box_outside_its_array_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"a box of \(2, 3\) at \(1, 1\) leaves its destination of \(2, 4\)"
    ):
        copies.box_rows(4, ((4, 4), (0, 0)), ((2, 4), (1, 1)), (2, 3))
