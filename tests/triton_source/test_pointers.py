"""Which names hold addresses."""

from __future__ import annotations

import ast

import pytest

from syncopate_jax.kernel.calls import Calls
from syncopate_jax.triton_source import pointers


class Other:
    """A module of another's, whose ``load`` gives an address."""

    @staticmethod
    def load(ptr: object) -> object:
        return ptr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("p = x_ptr + 1\nq = p\nv = tl.load(p)", {"p", "q"}),
        ("p += x_ptr", {"p"}),
        ("p: tl.tensor = 2 + x_ptr", {"p"}),
        ("n, p = 1, x_ptr + n", {"p"}),
        ("p = moved(by=2, ptr=x_ptr)", {"p"}),
        ("p = x_ptr if n else 1", {"p"}),
        ("p = other.load(x_ptr)", {"p"}),
        ("v = tl.dot(tl.load(x_ptr), w)", set()),
    ],
)
def test_addresses_follow_from_a_pointer(text: str, found: set[str]) -> None:
    block = ast.parse(text).body
    assert pointers.addresses(block, "x_ptr", Calls({"other": Other})) == {"x_ptr", *found}


def test_values_are_known_by_what_loads_them() -> None:
    tl = pytest.importorskip("triton").language
    block = ast.parse("v = language.load(x_ptr)").body
    assert pointers.addresses(block, "x_ptr", Calls({"language": tl})) == {"x_ptr"}


def corner(ptr, row, stride):  # type: ignore[no-untyped-def]
    return ptr + row * stride


def loaded(ptr, row, stride):  # type: ignore[no-untyped-def]
    spot = corner(ptr, row, stride)
    return tl.load(spot)  # noqa: F821


def both(ptr, n):  # type: ignore[no-untyped-def]
    spot = ptr + n
    return tl.load(spot), spot  # noqa: F821


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("p = corner(x_ptr, 1, stride=2)", {"p"}),
        ("v = loaded(x_ptr, 1, 2)", set()),
        ("v = loaded(row=1, stride=2, ptr=x_ptr)", set()),
        ("n = corner(y_ptr, x_ptr, 2)", {"n"}),  # whatever is added to an address is one
        ("n = loaded(y_ptr, x_ptr, 2)", set()),
        ("v, p = both(x_ptr, 1)", {"v", "p"}),
    ],
)
def test_helpers_are_looked_into(text: str, found: set[str]) -> None:
    helpers = {"corner": corner, "loaded": loaded, "both": both}
    block = ast.parse(text).body
    assert pointers.addresses(block, "x_ptr", Calls(helpers)) == {"x_ptr", *found}
