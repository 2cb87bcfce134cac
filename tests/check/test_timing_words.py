"""Words of the critical path: why a step may start before the one above it has ended."""

from __future__ import annotations

import pytest

from syncopate_jax.check.simulate import simulate
from syncopate_jax.check.timing import PathStep
from syncopate_jax.ir import presets
from syncopate_jax.registry import templates


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (PathStep(1, 2, -1, 1e-6, 3e-6), "rank 1 op 2: 1.00 to 3.00 us"),
        (PathStep(1, 2, -1, 1e-6, 3e-6, 1e-9), "rank 1 op 2: 1.00 to 3.00 us"),
        (
            PathStep(1, 2, -1, 1e-6, 3e-6, 5e-7),
            "rank 1 op 2: 1.00 to 3.00 us (issued when the step above had been sent, 0.50 us "
            "before that landed)",
        ),
        (
            PathStep(0, -1, 4, 0.0, 3e-6, 2e-6),
            "rank 0 tile 4: 0.00 to 3.00 us (begun 2.00 us before the step above ended, which it "
            "waited for inside)",
        ),
    ],
)
def test_a_step_says_why_it_overlaps(step: PathStep, words: str) -> None:
    assert str(step) == words


def test_an_operation_is_issued_while_the_one_before_it_lands() -> None:
    plan = templates.get("all_gather_swizzle")(3, (6, 4))
    first, second = simulate(plan, presets.h200_nvlink(3)).critical_path()
    assert first.early == 0
    assert second.early == pytest.approx(first.finish - second.start)
    assert second.early > 0
