"""What runs beside which k step of a product."""

from __future__ import annotations

import itertools

import pytest

from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_beside import Beside

STORES = 4


@pytest.mark.parametrize(
    ("k_steps", "looks_up", "signals", "stores", "signal", "addends"),
    [
        (112, False, False, [0, 1, 2, 3], None, 106),  # at once: nobody shares the memory's bus
        (112, False, True, [0, 21, 42, 63], 84, 106),
        (112, True, False, [2, 3, 4, 5], None, 106),
        (112, True, True, [2, 22, 43, 63], 84, 106),
        (16, False, True, [0, 3, 6, 9], 12, 12),
        (5, False, True, [0, 1, 2, 3], 4, 4),
        (5, True, True, [1, 2, 3, 4], 5, 5),
        (3, False, True, [0, 1, 2, 3], 3, 3),  # what finds no step is left for after the product
        (3, True, True, [0, 1, 2, 3], 3, 3),
    ],
)
def test_what_waits_for_memory_is_spread_over_the_next_tile(
    k_steps: int, looks_up: bool, signals: bool, stores: list[int], signal: int | None, addends: int
) -> None:
    steps = Beside(k_steps, STORES, looks_up, signals, few_registers=False)
    assert steps.store_steps == stores
    assert signal in (None, steps.signal_step)
    assert steps.addend_step == addends


@pytest.mark.parametrize("k_steps", [*range(1, 12), 64, 224])
def test_each_has_a_step_of_its_own_in_order(k_steps: int) -> None:
    for looks_up, signals, few in itertools.product((False, True), repeat=3):
        steps = Beside(k_steps, STORES, looks_up, signals, few)
        taken = [0] if steps.first_store else []
        taken += [k for k in steps.store_steps if k < k_steps]
        if signals:
            assert steps.signal_step > max(taken)
            taken += [steps.signal_step] if steps.signals_beside else []
        taken += [steps.addend_step] if steps.addend_step < k_steps else []
        assert taken == sorted(set(taken))
