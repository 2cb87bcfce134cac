"""What remote copies of a TPU can and cannot do, and what each refusal says."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from syncopate_jax.backends import dma_tables
from syncopate_jax.backends.interface import Work, interpret_settings
from syncopate_jax.backends.peers import peer_id
from syncopate_jax.backends.remote_dma import RemoteDma
from syncopate_jax.backends.xla import Xla
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.comm import P2P, ComputeDep
from syncopate_jax.ir.plan import Tensor
from syncopate_jax.ir.schedule import Rows
from syncopate_jax.kernel import traced_body
from syncopate_jax.kernel.axis_map import AxisMap, Binding
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.plans.all_gather_swizzle import all_gather_swizzle
from syncopate_jax.plans.broadcast import broadcast
from syncopate_jax.plans.reduce_scatter_direct import reduce_scatter_direct
from tests import interpret
from tests.backends import own_kernels
from tests.backends.works import gathering, reducing
from tests.check.small_plans import chunk, goal, plan_of, region
from tests.ops import cases


def assert_refused(work: Work, text: str) -> None:
    reason = RemoteDma().unsupported_reason(work, "tpu")
    assert reason is not None and text in reason
    with pytest.raises((UnsupportedError, InputError), match=re.escape(text)):
        dma_tables.lay_out(work)


def test_what_it_can_do() -> None:
    for work in (gathering(), gathering(split=2), reducing()):
        assert RemoteDma().unsupported_reason(work, "tpu") is None


def test_targets() -> None:
    reason = RemoteDma().unsupported_reason(gathering(), "triton")
    assert reason == (
        "remote_dma works with target 'tpu', not 'triton'; TPUs and CPUs run it with target='tpu'; "
        "on GPUs use 'tma_dedicated' or 'xla'"
    )
    reason = Xla().unsupported_reason(gathering(), "fpga")
    assert reason == "xla works with targets tpu, mosaic_gpu, triton, not 'fpga'"


def test_several_workers() -> None:
    work = gathering()
    several = dataclasses.replace(work.schedule, workers=2)
    assert_refused(
        dataclasses.replace(work, schedule=several),
        "remote_dma: a TPU core is one worker, the schedule is for 2; schedule with workers=1",
    )


def test_nothing_to_compute() -> None:
    work = gathering()
    none = np.zeros((2, 0), np.int32)
    empty = {name: Rows.of([], 2) for name in ("waits", "k_waits", "e_waits", "signals", "addends")}
    schedule = dataclasses.replace(work.schedule, num_tiles=0, order=none, **empty)
    assert_refused(
        dataclasses.replace(work, schedule=schedule),
        "remote_dma: there is nothing to compute; use backend 'xla'",
    )


def test_pulls() -> None:
    assert_refused(
        gathering(mode="pull"),
        "plan all_gather_swizzle has 2 pulls (first: rank 0 from rank 1); a TPU core can only push",
    )


def test_maxima() -> None:
    assert_refused(
        reducing(reduce="max"), "plan gather_and_scatter reduces by other than sum; use backend"
    )


def test_sums_into_what_no_tile_writes() -> None:
    work = reducing()
    nowhere = np.full_like(work.schedule.landing, -1)
    assert_refused(
        dataclasses.replace(work, schedule=dataclasses.replace(work.schedule, landing=nowhere)),
        "plan gather_and_scatter reduces into data that no tile writes: rank 0 op 1 (push y[",
    )


def test_kernels_without_an_addend() -> None:
    assert_refused(reducing(has_addend=False), "kernel product takes no addend; give it has_addend")


def adding(body: Any, dtype: str = "float32", backend: str = "xla") -> Work:
    """Partial sums of 8 rows, of which ``body`` makes two in two steps."""
    rows = pl.BlockSpec((2, 4), lambda i, k: (i, 0))
    kernel = PallasKernel(
        body=body,
        grid=(4, 2),
        operands=("x",),
        results=("y",),
        in_specs=pl.BlockSpec((2, 4), lambda i, k: (i, k)),
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct((8, 4), dtype),
        has_addend=True,
        name="adding",
    )
    plan = reduce_scatter_direct(2, (8, 4), dtype=dtype)
    return fuse(kernel, plan, {"y": "y"}, axis_name="t", backend=backend).work


def test_misuse_of_an_addend_is_no_matter_of_the_backend() -> None:
    """``auto`` would else take ``xla``, which adds up what the function makes of each partial."""

    def body(x: jax.Ref, y: jax.Ref, addend: Any = None) -> None:
        pl.when(pl.program_id(1) == 0)(lambda: y.__setitem__(..., x[...]))

        @pl.when(pl.program_id(1) == 1)
        def _() -> None:
            total = y[...] + x[...]
            y[...] = jnp.maximum(total if addend is None else total + addend(), 0)

    with pytest.raises(InputError, match=r"y changes by .* put what is made of the whole result"):
        adding(body, backend="auto")


@pytest.mark.parametrize(
    "steps,found",
    [((), "0 times in"), ((None,), "at each of 2 steps of"), ((1, 1), "2 times in"), ((1,), None)],
)
def test_an_addend_is_asked_for_once_a_tile(steps: tuple[int | None, ...], found: str) -> None:
    """Without a call the peers' sums are lost; a second waits for what does not come again."""

    def body(x: jax.Ref, y: jax.Ref, addend: Any = None) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            y[...] = jnp.zeros_like(y)

        y[...] += x[...]
        for step in steps if addend is not None else ():
            if step is None:
                y[...] += addend()
            else:
                pl.when(pl.program_id(1) == step)(lambda: y.__setitem__(..., y[...] + addend()))

    work = adding(body)
    reason = RemoteDma().unsupported_reason(work, "tpu")
    if found is None:
        assert reason is None
        return
    words = f"kernel adding calls addend() {found} the tile at grid point (0, 0); it needs one"
    assert reason is not None and reason.startswith(f"remote_dma: {words}")
    call = jax.shard_map(
        lambda x: RemoteDma().emit(work, "tpu")(x, platform="cpu", interpret=True)[0],
        mesh=cases.ranks_mesh(2),
        in_specs=jax.P(),
        out_specs=jax.P("t"),
        check_vma=False,
    )
    with pytest.raises(UnsupportedError, match=re.escape(words)):  # where compile could not trace
        jax.eval_shape(call, jax.ShapeDtypeStruct((8, 8), "float32"))


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_sums_that_float32_does_not_hold(dtype: str) -> None:
    assert_refused(
        adding(lambda x, y, addend=None: None, dtype),
        f"plan reduce_scatter_direct adds up tensor y of {dtype}, but addends are added in float32",
    )


def test_another_order_of_dimensions() -> None:
    work = gathering()
    turned = AxisMap((Binding("x", "x", (1, 0)),))
    assert_refused(dataclasses.replace(work, axis_map=turned), "tensor x is bound with dims (1, 0)")


def test_tiles_that_straddle_chunks() -> None:
    """Rank 0 keeps three rows of eight, under tiles of two."""
    sent = chunk("y[3:8,0:6]")
    plan = plan_of(
        [P2P(0, 0, 1, sent, sent, deps=(ComputeDep(0, sent),))],
        [],
        initial=[region(0, "y[0:8,0:6]", True)],
        goals=[goal(0, "y[0:3,0:6]", 0), goal(1, "y[3:8,0:6]", 0)],
        tensors=(Tensor("y", (8, 6), "float32", per_rank=True),),
    )
    kernel = own_kernels.product(8, 3, 6, 2, has_addend=True)
    assert_refused(
        fuse(kernel, plan, {"y": "out"}, axis_name="t", backend="xla").work,
        "rank 0: tile 1 of out straddles the edge of a chunk; choose tiles that end where chunks",
    )


def test_one_program_serves_every_rank() -> None:
    layout = dma_tables.lay_out(gathering())
    assert layout.table.shape[0] == 2 and layout.table.dtype == np.int32
    assert (layout.table[0] != layout.table[1]).any()
    again = dma_tables.lay_out(gathering())
    assert np.array_equal(layout.table, again.table)


def test_a_work_is_laid_out_once() -> None:
    work = gathering()
    assert RemoteDma().unsupported_reason(work, "tpu") is None
    layout = dma_tables.lay_out(work)
    assert dma_tables.lay_out(work) is layout
    assert dma_tables.lay_out(gathering()) is not layout


def broadcasting(ranks: int = 3) -> Work:
    plan = broadcast(ranks, (6, 4), dtype="float32", split=2)
    return fuse(own_kernels.scale(6, 4), plan, {"x": "x"}, axis_name="t", backend="xla").work


def test_ranks_leave_together_where_one_hears_nothing() -> None:
    """The root of a broadcast could else be in the next kernel before a peer is in this one."""
    assert dma_tables.lay_out(broadcasting()).leave_together
    assert not dma_tables.lay_out(gathering()).leave_together
    assert not dma_tables.lay_out(reducing()).leave_together


@pytest.mark.parametrize("mode", interpret.MODES)
def test_a_broadcast_leaves_no_semaphore_counting(mode: str) -> None:
    operator = dataclasses.replace(
        fuse(own_kernels.scale(6, 4), broadcasting().schedule.plan, {"x": "x"}, axis_name="t"),
        backend=RemoteDma(),
    )
    x, s = np.arange(24, dtype="f").reshape(6, 4), np.arange(6, dtype="f")[:, None]
    fn = jax.shard_map(
        lambda x, s: operator(x[0], s)[0],
        mesh=cases.ranks_mesh(3),
        in_specs=(jax.P("t"), jax.P()),
        out_specs=jax.P("t"),
    )
    held = np.stack([x, 0 * x, 0 * x])  # only the root has it
    token = interpret_settings.set(interpret.params(mode))
    try:
        run = jax.jit(fn)
        y = interpret.run_guarded(run, held, s, late=2)
    finally:
        interpret_settings.reset(token)
    chex.assert_trees_all_close(y, np.tile(x * s, (3, 1)))


def test_a_body_that_asks_which_step_of_a_reduction_it_is_at() -> None:
    """Rank 1 starts with its own columns, the second block, and weighs it as the second."""

    def body(x: jax.Ref, y: jax.Ref) -> None:
        k = pl.program_id(1)

        @pl.when(k == 0)
        def _() -> None:
            y[...] = jnp.zeros_like(y)

        y[...] += x[...] * (1 + 2 * k + 10 * pl.program_id(0))

    kernel = PallasKernel(
        body,
        grid=(2, 2),
        operands=("x",),
        results=("y",),
        in_specs=pl.BlockSpec((4, 2), lambda i, k: (i, k)),
        out_specs=pl.BlockSpec((4, 2), lambda i, k: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 2), jnp.float32),
    )
    plan = all_gather_swizzle(2, (8, 4), dtype="float32", axis=1)
    operator = fuse(kernel, plan, {"x": "x"}, axis_name="t", backend="remote_dma")
    fn = jax.shard_map(
        lambda x: operator(x)[0],
        mesh=cases.ranks_mesh(2),
        in_specs=jax.P(None, "t"),
        out_specs=jax.P("t"),
    )
    x = np.arange(32, dtype="f").reshape(8, 4)
    scale = 1 + 10 * np.repeat([0, 1], 4)[:, None]
    wanted = x[:, :2] * scale + x[:, 2:] * (scale + 2)
    np.testing.assert_array_equal(jax.jit(fn)(x), np.tile(wanted, (2, 1)))


def test_a_body_that_cannot_be_walked_in_another_order() -> None:
    """At compile, if the body can be traced there, so that auto takes xla; else at the call."""

    def body(x: jax.Ref, s: jax.Ref, y: jax.Ref) -> None:
        y[...] = jnp.zeros_like(y)
        if s.dtype != jnp.uint8 and not guessed:
            raise TypeError("bytes were expected")

        @pl.when(pl.program_id(1) == 1)
        def _() -> None:
            y[...] = x[...]

    kernel = PallasKernel(
        body,
        grid=(2, 2),
        operands=("x", "s"),
        results=("y",),
        in_specs=[
            pl.BlockSpec((4, 2), lambda i, k: (i, k)),
            pl.BlockSpec((4, 2), lambda i, k: (0, 0)),
        ],
        out_specs=pl.BlockSpec((4, 2), lambda i, k: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 2), jnp.float32),
        name="picks",
    )
    plan = all_gather_swizzle(2, (8, 4), dtype="float32", axis=1)
    refusal = "kernel picks: what the body does where pl.program_id(1) is first or last depends on"
    guessed = True
    operator = fuse(kernel, plan, {"x": "x"}, axis_name="t")
    assert operator.backend.name == "xla" and refusal in operator.passed_over["remote_dma"]
    guessed = False
    operator = fuse(kernel, plan, {"x": "x"}, axis_name="t")
    assert operator.backend.name == "remote_dma"
    fn = jax.shard_map(
        lambda x, s: operator(x, s)[0],
        mesh=cases.ranks_mesh(2),
        in_specs=(jax.P(None, "t"), jax.P()),
        out_specs=jax.P("t"),
    )
    with pytest.raises(UnsupportedError, match=re.escape(refusal)):
        jax.jit(fn)(np.ones((8, 4), "f"), np.ones((4, 2), "uint8"))


def in_a_loop(x: jax.Ref, y: jax.Ref, addend: Any = None) -> None:
    y[...] = x[...]
    if addend is not None:
        jax.lax.fori_loop(0, 1, lambda _, __: y.__setitem__(..., y[...] + addend()), None)


def on_values(x: jax.Ref, y: jax.Ref, addend: Any = None) -> None:
    y[...] = x[...]
    if addend is not None:
        pl.when(x[0, 0] > 0)(lambda: y.__setitem__(..., y[...] + addend()))


def in_some_tiles(x: jax.Ref, y: jax.Ref, addend: Any = None) -> None:
    y[...] = x[...]
    if addend is not None:
        first = (pl.program_id(0) == 0) & (pl.program_id(1) == 1)
        pl.when(first)(lambda: y.__setitem__(..., y[...] + addend()))


@pytest.mark.parametrize(
    "body,found",
    [
        (in_a_loop, "in a loop"),
        (on_values, "under a condition on values"),
        (in_some_tiles, "0 times in the tile at grid point (1, 0)"),
    ],
)
def test_an_addend_that_is_not_surely_asked_for_once(body: Any, found: str) -> None:
    reason = RemoteDma().unsupported_reason(adding(body), "tpu")
    assert reason is not None
    assert f"kernel adding calls addend() {found}; it needs one call a tile" in reason


def test_a_body_that_raises() -> None:
    """All dtypes are known, so it is no matter of a wrong guess; auto takes xla."""

    def body(x: jax.Ref, y: jax.Ref) -> None:
        if x.dtype != jnp.int8:
            raise KeyError("no table for this type")

    block = pl.BlockSpec((2, 4), lambda i: (i, 0))
    given = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    kernel = PallasKernel(body, (4,), ("x",), ("y",), block, block, given, name="looks_up")
    plan = all_gather_swizzle(2, (8, 4), dtype="float32")
    reason = fuse(kernel, plan, {"x": "x"}, axis_name="t").passed_over["remote_dma"]
    assert reason.startswith("the body of kernel looks_up raises KeyError on blocks Ref")
    assert reason.endswith("'no table for this type'")


def test_a_fault_in_reading_a_body_is_none_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for a dtype that was guessed wrong."""

    def broken(*_: Any, **__: Any) -> None:
        raise IndexError("a fault of the reader")

    monkeypatch.setattr(traced_body, "check_state", broken)
    with pytest.raises(IndexError, match="a fault of the reader"):
        RemoteDma().unsupported_reason(gathering(), "tpu")


def test_addresses_of_peers() -> None:
    mesh = jax.make_mesh((2, 3), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2,
                         devices=jax.devices()[:6])  # fmt: skip

    def seen() -> Any:
        assert peer_id(("a", "b"), 4) == {"a": 1, "b": 1}
        assert peer_id(("b", "a"), 4) == {"b": 2, "a": 0}
        assert list(peer_id(("b", "a"), 4)) == ["b", "a"]
        assert peer_id(("b",), 2) == {"b": 2}
        with pytest.raises(InputError, match="peer_id needs at least one mesh axis"):
            peer_id((), 0)
        traced = peer_id(("a", "b"), jax.lax.axis_index(("a", "b")))
        return jax.numpy.stack([traced["a"], traced["b"]])[None]

    fn = jax.shard_map(seen, mesh=mesh, in_specs=(), out_specs=jax.P(("a", "b")), check_vma=False)
    assert np.asarray(jax.jit(fn)()).tolist() == [[a, b] for a in range(2) for b in range(3)]


def test_ranks_of_other_processes_are_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for them for ever."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    case = cases.BY_NAME["gather_x_m"]
    fused = cases.sharded(case, cases.ranks_mesh(2), backend="remote_dma")
    with pytest.raises(UnsupportedError, match="this program has 2 processes: use backend 'xla'"):
        jax.jit(fused).lower(*cases.operands(1, 8, 16, 24)[:2])
