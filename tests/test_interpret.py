"""The interpreter's guards: each planted fault becomes an error that names it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from tests import interpret
from tests.runtime import push_all_gather as push

P = jax.P
RANKS = 3
X = jnp.arange(RANKS * 8 * 128, dtype=jnp.float32).reshape(RANKS * 8, 128)


def gather(params, fault=""):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:RANKS]), ("x",))

    def body(x):
        return push.push_all_gather(x, ("x",), params, fault=fault)

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))


def run(mode, fault, **options):
    fn = gather(interpret.params(mode), fault)
    options.setdefault("timeout", 5.0)
    return interpret.run_guarded(fn, X, semaphores=push.semaphores(RANKS), **options)


def test_a_correct_kernel_is_silent_in_both_modes():
    for late in (None, 0, RANKS - 1):
        late_copies, eager_copies = interpret.in_both_modes(
            gather, X, semaphores=push.semaphores(RANKS), late=late
        )
        expected = np.tile(X.reshape(RANKS, 8, 128), (RANKS, 1, 1))
        np.testing.assert_array_equal(late_copies, expected)
        np.testing.assert_array_equal(eager_copies, expected)


@pytest.mark.parametrize("mode", interpret.MODES)
def test_a_deadlock_names_who_waits_and_the_process_goes_on(mode):
    with pytest.raises(interpret.DeadlockFound) as caught:
        run(mode, "wait twice", timeout=1.0)
    message = str(caught.value)
    assert "no device made a step for 1.0 s" in message
    for rank in range(RANKS):  # each waits for its right neighbour's chunk, the first it waits for
        source = (rank + 1) % RANKS
        assert f"device {rank} waits for arrive[{source}] to reach 4096, it is 0" in message
    assert "push_all_gather.py" in message
    np.testing.assert_array_equal(run(mode, "")[:RANKS], X.reshape(RANKS, 8, 128))


@pytest.mark.parametrize("mode", interpret.MODES)
def test_sent_is_not_arrived(mode):
    """Why a put's own semaphore, not a signal after the put, announces a chunk on a TPU."""
    with pytest.raises(
        interpret.RaceFound, match=r"race\(s\); the first:\nRACE DETECTED"
    ) as caught:
        run(mode, "signal for arrival")
    assert str(caught.value).count("push_all_gather.py") == 2


def test_a_read_before_arrival():
    with pytest.raises(interpret.RaceFound, match="RACE DETECTED"):
        run("eager", "no arrival")
    with pytest.raises(
        interpret.LeftoverCount,
        match=r"a copy to device 1 that raises arrive\[0\] there was never waited for \(.*push_all",
    ):
        run("on_wait", "no arrival")


@pytest.mark.parametrize("mode", interpret.MODES)
def test_a_count_left_over(mode):
    with pytest.raises(
        interpret.LeftoverCount, match=r"device \d left the kernel with send\[\d\] at 4096, not 0"
    ):
        run(mode, "no send wait")


def test_a_missing_entry_barrier_shows_when_one_device_is_late():
    with pytest.raises(jax.errors.JaxRuntimeError, match="KeyError"):
        run("eager", "no barrier", late=1)
    np.testing.assert_array_equal(run("eager", "")[:RANKS], X.reshape(RANKS, 8, 128))


def test_races_of_an_earlier_kernel_are_not_lost():
    """JAX starts its record of races anew with each kernel."""
    racy, clean = (gather(interpret.params("eager"), fault) for fault in ("no arrival", ""))
    with pytest.raises(interpret.RaceFound):
        interpret.run_guarded(lambda x: (racy(x), clean(x)), X)


def test_guards_are_taken_off_again():
    before = vars(interpret.shared_memory.SharedMemory).copy()
    run("eager", "")
    assert vars(interpret.shared_memory.SharedMemory) == before


def test_params_ask_for_all_that_a_run_can_show():
    params = interpret.params("eager")
    assert (params.dma_execution_mode, params.detect_races) == ("eager", True)
    assert dataclasses.replace(params, detect_races=False).vector_clock_size == 512
