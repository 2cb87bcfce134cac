"""Arguments of the wrong type are the project's errors before a template sees them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from syncopate_jax.errors import InputError
from syncopate_jax.ir.argument_types import checked


@checked
def example(
    num_ranks: int, sizes: Sequence[int] = (), *, name: str | None = None, on: bool = True
) -> tuple[object, ...]:
    return num_ranks, sizes, name, on


def test_passes_on_what_fits() -> None:
    assert example(np.int64(2), [np.int32(3)], on=np.bool_(False)) == (2, [3], None, False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_ranks": "2"}, r"example: num_ranks must be an integer, found '2'"),
        ({"num_ranks": None}, r"example: num_ranks must be an integer, found None"),
        ({"num_ranks": 16_385}, r"example: num_ranks must be at most 16384, found 16385"),
        ({"sizes": "34"}, r"example: sizes must be a sequence of integers, found '34'"),
        ({"sizes": (1.5,)}, r"example: sizes must be a sequence of integers, found \(1\.5,\)"),
        ({"name": 5}, r"example: name must be a string, or None, found 5"),
        ({"splits": 2}, r"example: .*'splits'; its arguments are num_ranks, sizes, name, on"),
        ({"on": 1, "name": "mine"}, r"mine: on must be True or False, found 1"),
    ],
)
def test_names_argument_and_value(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        example(**{"num_ranks": 2, **wrong})


def test_names_an_argument_that_is_left_out() -> None:
    with pytest.raises(InputError, match="example: missing a required argument: 'num_ranks'; its"):
        example()  # type: ignore[call-arg]


def test_an_unknown_annotation_is_refused_at_once() -> None:
    def odd(num_ranks: float) -> None: ...

    with pytest.raises(InputError, match=r"odd: num_ranks is annotated float, needs one of int"):
        checked(odd)
