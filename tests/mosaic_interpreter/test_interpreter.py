"""What the interpreter of Mosaic GPU kernels sees, each on the smallest kernel that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.backends import gpu_signals
from tests.mosaic_interpreter import versions
from tests.mosaic_interpreter.run import RaceFound, interpreted, run_checked
from tests.mosaic_interpreter.turns import DeadlockFound, Turns
from tests.ops import cases

pytestmark = versions.needs_known_jax
ROWS, COLUMNS = 128, 64


def run(body: Callable[..., None], *, warpgroups: int = 1, seed: int = 0, **given: Any) -> Any:
    """``body(x, y, counters, device)`` on two devices, x counting up; y of both devices."""

    def kernel(x: Any, y: Any) -> None:
        counters = pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))
        body(x, y, counters, lax.axis_index("t"))

    made = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=plgpu.InterpretGPUParams(),
        **given,
    )
    fn = jax.shard_map(
        made, mesh=cases.ranks_mesh(2), in_specs=jax.P("t"), out_specs=jax.P("t"), check_vma=False
    )
    x = jnp.arange(2 * ROWS * COLUMNS, dtype=jnp.float32).reshape(2 * ROWS, COLUMNS)
    return x, np.asarray(run_checked(fn, x, seed=seed))


def other(device: Any) -> dict[str, Any]:
    return {"t": 1 - device}


def put(x: Any, y: Any, device: Any) -> None:
    """Stores at the peer with the warpgroup's threads."""
    plgpu.remote_ref(y, other(device))[...] = x[...]


def signal(counters: Any, device: Any) -> None:
    pl.semaphore_signal(counters.at[0], device_id=other(device))


def wait(counters: Any, count: int = 1) -> None:
    pl.semaphore_wait(counters.at[0], count, decrement=False)


def exchange(x: Any, y: Any, counters: Any, device: Any) -> None:
    put(x, y, device)
    gpu_signals.publish()
    signal(counters, device)
    wait(counters)


@pytest.mark.parametrize("seed", range(4))
def test_an_exchange_is_right_and_silent(seed: int) -> None:
    x, y = run(exchange, seed=seed)
    np.testing.assert_array_equal(y, np.roll(x, ROWS, axis=0))


def copy_exchange(only_read: bool) -> Callable[..., None]:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        def scope(smem: Any, loaded: Any) -> None:
            plgpu.copy_gmem_to_smem(x, smem, loaded)
            plgpu.barrier_wait(loaded)
            plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(y, other(device)))
            plgpu.wait_smem_to_gmem(0, wait_read_only=only_read)
            signal(counters, device)
            wait(counters)

        pl.run_scoped(scope, plgpu.SMEM((ROWS, COLUMNS), jnp.float32), plgpu.Barrier())

    return body


def test_copies_by_the_copy_unit() -> None:
    x, y = run(copy_exchange(only_read=False))
    np.testing.assert_array_equal(y, np.roll(x, ROWS, axis=0))
    with pytest.raises(RaceFound, match=r"end of the launch on device . is unordered with a copy"):
        run(copy_exchange(only_read=True))


def test_a_peer_that_has_left() -> None:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        put(x, y, device)

    with pytest.raises(RaceFound, match="the end of the launch on device"):
        run(body)


def test_a_compiled_program_tells_who_runs_it() -> None:
    def body(x: Any, y: Any) -> None:
        plgpu.remote_ref(y, other(lax.axis_index("t")))[...] = x[...]

    made = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
        interpret=plgpu.InterpretGPUParams(),
    )
    spec = jax.P("t")
    fn = jax.jit(
        jax.shard_map(
            made, mesh=cases.ranks_mesh(2), in_specs=spec, out_specs=spec, check_vma=False
        )
    )
    x = jnp.zeros((2 * ROWS, COLUMNS), jnp.float32)
    for _ in range(2):
        with interpreted() as launches:
            jax.block_until_ready(fn(x))
        assert launches.count == 1
        with pytest.raises(RaceFound, match="the end of the launch"):
            launches.check()


def test_a_signal_releases_what_was_published_only() -> None:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        put(x, y, device)
        signal(counters, device)
        wait(counters)

    with pytest.raises(RaceFound, match="is unordered with a store by device"):
        run(body)


def test_the_copy_unit_needs_a_fence_after_a_wait() -> None:
    def body(fenced: bool) -> Callable[..., None]:
        def run_body(x: Any, y: Any, counters: Any, device: Any) -> None:
            def scope(smem: Any, loaded: Any) -> None:
                exchange(x, y, counters, device)
                if fenced:
                    gpu_signals.fence()
                plgpu.copy_gmem_to_smem(y, smem, loaded)
                plgpu.barrier_wait(loaded)

            pl.run_scoped(scope, plgpu.SMEM((ROWS, COLUMNS), jnp.float32), plgpu.Barrier())

        return run_body

    assert np.isfinite(run(body(fenced=True))[1]).all()
    with pytest.raises(RaceFound, match=r"a copy to shared memory by device . CTA 0 warpgroup 0"):
        run(body(fenced=False))


def test_a_wait_brings_what_its_count_needs_and_no_more() -> None:
    """Two warpgroups signal; who waits for one of them does not know of both."""

    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        wg = lax.axis_index("wg")
        half = pl.ds(wg * (ROWS // 2), ROWS // 2)
        plgpu.remote_ref(y, other(device)).at[half][...] = x[half, :]
        gpu_signals.publish()
        signal(counters, device)
        pl.when(wg == 0)(lambda: wait(counters, 1))

    with pytest.raises(RaceFound, match="the end of the launch"):
        run(body, warpgroups=2)


def test_all_ctas_run_at_once() -> None:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        first = lax.axis_index("cta") == 0
        pl.when(first)(lambda: wait(counters))

        @pl.when(jnp.logical_not(first))
        def _() -> None:
            put(x, y, device)
            gpu_signals.publish()
            signal(counters, device)

    x, y = run(body, grid=(2,), grid_names=("cta",))
    np.testing.assert_array_equal(y, np.roll(x, ROWS, axis=0))


def test_a_deadlock_names_who_waits_for_what() -> None:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        put(x, y, device)
        signal(counters, device)
        wait(counters, 2)

    text = (
        r"no warpgroup can go on:\n.*counter \[0\] of device 0 to reach 2, it is 1: wait by device "
        r"0 CTA 0 warpgroup 0 at .*test_interpreter"
    )
    with pytest.raises(DeadlockFound, match=text):
        run(body)


def test_a_barrier_that_nobody_arrives_at() -> None:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        pl.run_scoped(plgpu.barrier_wait, plgpu.Barrier(num_arrivals=2))

    with pytest.raises(DeadlockFound, match="phase 1, 0 of 2 arrived"):
        run(body)


def test_phases_that_come_round() -> None:
    def late(x: Any, y: Any, counters: Any, device: Any) -> None:
        def scope(barrier: Any) -> None:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        pl.run_scoped(scope, plgpu.Barrier())

    def missed(x: Any, y: Any, counters: Any, device: Any) -> None:
        def scope(barrier: Any) -> None:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
            for _ in range(3):
                plgpu.barrier_arrive(barrier)

        pl.run_scoped(scope, plgpu.Barrier())

    with pytest.raises(AssertionError, match=r"waits for phase 1 of barrier .* has completed 2"):
        run(late)
    with pytest.raises(AssertionError, match=r"completed phase 4, but device . .* waited for 1"):
        run(missed)


def test_the_end_while_the_copy_unit_reads() -> None:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        def scope(smem: Any) -> None:
            smem[...] = jnp.zeros((ROWS, COLUMNS), jnp.float32)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, y)

        pl.run_scoped(scope, plgpu.SMEM((ROWS, COLUMNS), jnp.float32))

    with pytest.raises(AssertionError, match="the copy unit may still read its shared memory"):
        run(body)


def test_shared_memory_is_committed_before_it_is_copied() -> None:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        def scope(smem: Any) -> None:
            smem[...] = jnp.zeros((ROWS, COLUMNS), jnp.float32)
            plgpu.copy_smem_to_gmem(smem, y)
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(scope, plgpu.SMEM((ROWS, COLUMNS), jnp.float32))

    with pytest.raises(RaceFound, match=r"a copy to GMEM .* is unordered with a store by"):
        run(body)


def test_a_store_outside() -> None:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        y[pl.ds(64 * (device + 1), 128), :] = x[...]

    with pytest.raises(IndexError, match=r"a store by device . .* is outside of argument 1"):
        run(body)


def test_a_false_promise_of_a_multiple() -> None:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        y[...] = x[...]
        pl.semaphore_signal(counters.at[pl.multiple_of(device, 2)])

    with pytest.raises(AssertionError, match="1 said to be a multiple of 2 by device 1"):
        run(body)


def test_a_peer_that_is_not_there() -> None:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        plgpu.remote_ref(y, {"t": device + 2})[...] = x[...]

    with pytest.raises(AssertionError, match=r"peer address .* t has 2"):
        run(body)


def test_what_is_not_known_is_refused_by_name() -> None:
    def body(x: Any, y: Any, counters: Any, device: Any) -> None:
        @plgpu.inline_mgpu()
        def text(ctx: Any) -> None:
            """Nothing."""

        text()

    name = r"test_what_is_not_known_is_refused_by_name, whose meaning is not known; add it to"
    with pytest.raises(NotImplementedError, match=name):
        run(body)
    with pytest.raises(NotImplementedError, match=r"a cluster of CTAs \(2,\)"):
        run(exchange, cluster=(2,), cluster_names=("c",))


def test_versions() -> None:
    assert [versions.unsupported_reason(v) for v in versions.READ_AT] == [None, None]
    reason = versions.unsupported_reason("0.13.0")
    assert reason is not None
    assert "was read against jax 0.11.2 and 0.12.0.1, found 0.13.0" in reason


def test_turns_repeat() -> None:
    def order(seed: int) -> list[int]:
        found: list[int] = []
        turns = Turns(seed)

        def body(number: int) -> None:
            for _ in range(5):
                found.append(number)
                turns.give_way()

        turns.run([(str(i), lambda i=i: body(i)) for i in range(3)])  # type: ignore[misc]
        return found

    assert order(1) == order(1)
    assert order(1) != order(2)
