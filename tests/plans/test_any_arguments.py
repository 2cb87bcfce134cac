"""Every template takes or refuses any value of any argument, and names what it refuses."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from syncopate_jax.errors import InputError
from syncopate_jax.registry import templates

# What fits no argument, and what fits some but is out of range.
WRONG: tuple[Any, ...] = (
    "m", ["m"], None, np.int64(-1), 1.5, float("nan"), 2**31 - 1, 2**40, -5, (), {}, object(),
    ((1,), (2,)), [[1, 2], [3]], b"x",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted({*templates.names()} - {"broadcast", "collective"}))
def test_plans_that_no_memory_holds_are_refused_at_once(name: str) -> None:
    with pytest.raises(InputError, match=r"the plan would list \d{9,} operations.*use fewer ranks"):
        templates.get(name)(16_384, (16_384, 8))


@pytest.mark.parametrize("name", templates.names())
def test_any_value_is_taken_or_refused_by_name(name: str) -> None:
    refused = 0
    for argument in inspect.signature(templates.get(name)).parameters:
        for value in WRONG:
            try:
                templates.get(name)(**{"num_ranks": 2, "shape": (4, 6), argument: value})
            except InputError as error:
                assert argument in str(error), (argument, value)
                refused += 1
    assert refused >= 100
