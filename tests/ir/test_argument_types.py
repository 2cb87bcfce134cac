"""Arguments of the wrong type are the project's errors before a template sees them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.errors import InputError
from syncopate_jax.ir import presets
from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.plan import Tensor
from syncopate_jax.registry import templates
from syncopate_jax.synthesis.synthesize import synthesize


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


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float32, "float32"),
        (np.dtype("int8"), "int8"),
        (jnp.float16, "float16"),
        (jnp.zeros(1, jnp.bfloat16).dtype, "bfloat16"),
        (jnp.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_a_dtype_is_its_name(dtype: Any, name: str) -> None:
    """In templates, requests of plans and tensors; what is none is refused by name."""
    ring, topology = templates.get("all_gather_ring"), presets.ring(2)
    plan = ring(2, (4, 8), dtype=dtype)
    assert plan == ring(2, (4, 8), dtype=name) and type(plan.tensors[0].dtype) is str
    asked = synthesize("all_gather", topology, (4, 8), dtype=dtype)
    assert asked == synthesize("all_gather", topology, (4, 8), dtype=name)
    assert Tensor("x", (4,), dtype) == Tensor("x", (4,), name)


@pytest.mark.parametrize("dtype", [None, 4, {}, [[]]])
def test_what_is_no_dtype(dtype: Any) -> None:
    needed = "dtype must be a dtype or its name, such as 'float32', found "
    with pytest.raises(InputError, match=re.escape(f"all_gather_ring: {needed}{dtype!r}")):
        templates.get("all_gather_ring")(2, (4, 8), dtype=dtype)
    with pytest.raises(InputError, match=re.escape(f"tensor x: dtype {dtype!r} is not one of")):
        Tensor("x", (4,), dtype)


def test_names_an_argument_that_is_left_out() -> None:
    with pytest.raises(InputError, match="example: missing a required argument: 'num_ranks'; its"):
        example()  # type: ignore[call-arg]


def test_an_unknown_annotation_is_refused_at_once() -> None:
    def odd(num_ranks: float) -> None: ...

    with pytest.raises(InputError, match=r"odd: num_ranks is annotated float, needs one of int"):
        checked(odd)
