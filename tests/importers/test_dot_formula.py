"""Formulas of contractions, and dimension numbers that do not fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from syncopate_jax.errors import InputError
from syncopate_jax.importers.dot_formula import dot_formula
from syncopate_jax.importers.hlo_ops import HloOp

KEYS = ("lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims", "rhs_batch_dims")


def formula(numbers: Any, *shapes: tuple[int, ...]) -> str:
    dot = HloOp("d", "dot", (), (), "e", 1, ints=dict(zip(KEYS, numbers, strict=False)))
    return dot_formula(dot, shapes)


def test_formulas() -> None:
    assert formula(((1,), (0,)), (2, 3), (3, 4)) == "ba,ac->bc"
    assert formula(((2,), (2,), (0,), (0,)), (5, 2, 3), (5, 4, 3)) == "acb,adb->acd"


@pytest.mark.parametrize(
    ("numbers", "shapes", "message"),
    [
        (((1,), (0,)), ((2, 3),), "contraction d: needs two operands of 1 to 8 dimensions"),
        (((1,), (0,)), ((2, 3), ()), "found [[2, 3], []]"),
        (((1,), (0,)), ((2,) * 9, (2,)), "needs two operands of 1 to 8 dimensions"),
        (((1,), ()), ((2, 3), (3, 4)), "contracting dimensions [1] and [] do not fit"),
        (((1,), (2,)), ((2, 3), (3, 4)), "contracting dimensions [1] and [2] do not fit"),
        (((1,), (-1,)), ((2, 3), (3, 3)), "contracting dimensions [1] and [-1] do not fit"),
        (((1,), (1,)), ((2, 3), (3, 4)), "contracting dimensions [1] and [1] do not fit"),
        (((1,), (0,), (0,), (1,)), ((2, 3), (3, 4)), "batch dimensions [0] and [1] do not fit"),
        (((1, 1), (0, 1)), ((2, 3), (3, 3)), "a dimension is named twice in [1, 1]"),
    ],
)
def test_what_does_not_fit(numbers: Any, shapes: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        formula(numbers, *shapes)
