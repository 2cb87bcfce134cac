"""What runs beside which k step of a product."""

from __future__ import annotations

import itertools

import pytest

from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_beside import Beside, least_steps

STORES = 4


@pytest.mark.parametrize(
    ("k_steps", "looks_up", "signals", "sends", "adds", "stores", "stored", "signalled", "addends"),
    [
        (112, False, False, False, False, [0, 1, 2, 3], None, None, None),  # nobody shares the bus
        (112, True, False, False, False, [2, 3, 4, 5], None, None, None),
        (112, True, True, False, True, [2, 3, 4, 5], 10, 15, 106),  # others send what is stored
        (8, True, True, False, True, [2, 3, 4, 5], 6, 7, 7),
        (112, True, True, True, False, [2, 25, 48, 71], 98, 103, None),
        (112, True, True, True, True, [2, 23, 44, 65], 93, 98, 106),
        (64, True, True, True, False, [2, 14, 26, 38], 56, 61, None),
        (64, True, True, True, True, [2, 12, 22, 32], 48, 53, 58),
        (16, True, True, True, True, [2, 4, 6, 8], 12, 13, 13),
        (8, True, True, True, True, [2, 3, 4, 5], 6, 7, 7),
    ],
)
def test_what_waits_for_memory_is_spread_over_the_next_tile(
    k_steps: int,
    looks_up: bool,
    signals: bool,
    sends: bool,
    adds: bool,
    stores: list[int],
    stored: int | None,
    signalled: int | None,
    addends: int | None,
) -> None:
    steps = Beside(k_steps, 4, STORES, looks_up, signals, sends, adds)
    assert steps.store_steps == stores
    assert stored in (None, steps.stored_step)
    assert signalled in (None, steps.signal_step)
    assert addends in (None, steps.addend_step)


@pytest.mark.parametrize(
    ("stores", "k_steps"),
    [
        (stores, k_steps)
        for stores in (1, STORES, 8, 16)  # narrow ones of the widest part: 8 or 16
        for k_steps in [*range(least_steps(stores), least_steps(stores) + 12), 64, 224]
    ],
)
@pytest.mark.parametrize("stages", [2, 4, 6])
def test_each_has_a_step_of_its_own_in_order(stores: int, k_steps: int, stages: int) -> None:
    for looks_up, signals, sends, adds in itertools.product((False, True), repeat=4):
        steps = Beside(k_steps, stages, stores, looks_up, signals, sends and signals, adds)
        assert steps.stagger >= 1
        latest = [k + steps.stagger - 1 for k in steps.store_steps]
        taken = [0] if looks_up else []
        for first, last in zip(steps.store_steps, latest, strict=True):
            taken += sorted({first, last})
        taken += [steps.stored_step] if signals else []
        taken += [steps.addend_step] if adds else []
        assert taken == sorted(set(taken)) and taken[-1] < k_steps
        if signals:
            # Loading waits for what those who multiply say beside a step that is loaded before,
            # and signals before it waits for peers, who wait for such signals.
            assert steps.stored_step < steps.signal_step
            assert steps.signal_step <= (steps.addend_step if adds else k_steps)
