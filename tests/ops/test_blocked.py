"""Blocked layouts hold the same numbers, and tiles are chosen to fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncopate_jax.ops import fused
from syncopate_jax.ops.blocked import Blocked, block
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.pallas_kernels.matmul_tpu import split_groups

SPECS = [
    Contraction("bmk", "kn", "bmn", "all_gather", "lhs", gather="m"),
    Contraction("bmk", "kn", "bmn", "all_gather", "lhs", gather="k"),
    Contraction("bmk", "kn", "bmn", "all_gather", "rhs", gather="k"),
    Contraction("bmk", "kn", "bmn", "all_gather", "rhs", gather="n"),
    Contraction("bmk", "kn", "bmn", "reduce_scatter", "out", scatter="m"),
    Contraction("bmk", "kn", "bmn", "reduce_scatter", "out", scatter="n"),
    Contraction("bmk", "kn", "bmn", "all_reduce", "out"),
]
SPECS += [s.lhs_gradient() for s in SPECS[:6]] + [s.rhs_gradient() for s in SPECS[:6]]


def whole(spec: Contraction, sizes: dict[str, int], place: str) -> tuple[int, ...]:
    return tuple(sizes[x] for x in getattr(spec, place))


def shards(spec: Contraction, array: np.ndarray, place: str, ranks: int) -> list[np.ndarray]:
    """The local operands, from an array that holds every rank's part of the exchange."""
    if place != spec.place or not spec.gather:
        return [array] * ranks
    return np.split(array, ranks, axis=getattr(spec, place).index(spec.gather))


@given(
    st.sampled_from(SPECS),
    st.integers(1, 4),
    st.fixed_dictionaries({x: st.integers(1, 3) for x in "bmkn"}),
)
def test_reshapes_hold_the_same_products(
    spec: Contraction, ranks: int, sizes: dict[str, int]
) -> None:
    """What tiles see of the exchanged operand is the transposed whole, in blocks.

    Where blocks are both gathered and scattered the operators' own tests compare values.
    """
    for letter in {spec.gather, spec.scatter} - {""}:
        sizes = sizes | {letter: sizes[letter] * ranks}
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, whole(spec, sizes, p)) for p in ("lhs", "rhs"))
    local = {"lhs": shards(spec, a, "lhs", ranks), "rhs": shards(spec, b, "rhs", ranks)}
    layout = block(spec, local["lhs"][0].shape, local["rhs"][0].shape, ranks)
    for found in (layout, layout.ungrouped()):
        assert_same_products(spec, found, local, np.einsum(formula(spec), a, b), ranks)


def formula(spec: Contraction) -> str:
    return f"{spec.lhs},{spec.rhs}->{spec.out}"


def assert_same_products(
    spec: Contraction,
    layout: Blocked,
    local: dict[str, list[np.ndarray]],
    wanted: np.ndarray,
    ranks: int,
) -> None:
    """Runs the exchange and the kernel's einsum in blocked letters, and compares."""
    letters = {p: "".join(split_groups(getattr(layout, p))) for p in ("lhs", "rhs", "out")}
    seen: dict[str, list[np.ndarray]] = {}
    for place in ("lhs", "rhs"):
        parts = [x.reshape(layout.operand_shape(place)) for x in local[place]]
        if place == layout.place:
            joined = np.concatenate(parts, axis=layout.gather)
            assert joined.shape == layout.plan_shape
            parts = [joined] * ranks
        seen[place] = parts
    for rank in range(ranks):
        a, b = seen["lhs"][rank], seen["rhs"][rank]
        extents = layout.extents
        a, b = (x.reshape([extents[y] for y in letters[p]]) for p, x in (("lhs", a), ("rhs", b)))
        found = "".join(y for y in letters["out"] if y in letters["lhs"] + letters["rhs"])
        out = np.einsum(f"{letters['lhs']},{letters['rhs']}->{found}", a, b)
        assert np.array_equal(unblocked(spec, layout, out, found), wanted)


def unblocked(spec: Contraction, layout: Blocked, out: np.ndarray, letters: str) -> np.ndarray:
    """The kernel's result with blocks put before their letters and joined with them."""
    order, shape = [], []
    for letter in spec.out:
        size = 1
        for b in ("G", "S"):
            owner = spec.gather if b == "G" else (spec.scatter or layout.split)
            if b in letters and owner == letter:
                order.append(letters.index(b))
                size *= layout.extents[b]
        order.append(letters.index(letter))
        shape.append(size * layout.extents[letter])
    rest = [i for i in range(len(letters)) if i not in order]
    return out.transpose(*rest, *order).reshape(shape)


LAYOUT = block(SPECS[0], (1, 12, 10), (10, 7), 2)


def test_tiles_divide_what_is_reduced() -> None:
    largest = {"m": 8, "n": 8, "k": 4}
    tiles = fused.choose_tiles(LAYOUT, largest, {}, 8)
    assert tiles == {"m": 8, "n": 7, "k": 2}  # of 12 a rank, cut by the edge; 7; 10 in fives


@pytest.mark.parametrize(
    ("letter", "extent", "tile"),
    [
        ("k", 1792, 256),  # a multiple of 128 lanes, not the 448 that divides it too
        ("k", 576, 576),  # no such divisor: all of it
        ("k", 2 * 8191, 2),  # nor could that be one block
        ("n", 17280, 128),
        ("n", 576, 256),  # cut by the edge
        ("m", 1000, 200),  # a multiple of 8 rows
        ("m", 1016, 256),
        ("m", 100, 100),
    ],
)
def test_tiles_fill_the_registers_of_a_tpu(letter: str, extent: int, tile: int) -> None:
    sizes = tuple((x, extent if x == letter else n) for x, n in LAYOUT.sizes)
    layout = dataclasses.replace(LAYOUT, sizes=sizes)
    assert fused.choose_tiles(layout, fused.LARGEST_TILE, {}, 8)[letter] == tile


def test_tiles_that_are_asked_for() -> None:
    largest = {"m": 8, "n": 8, "k": 4}
    assert fused.choose_tiles(LAYOUT, largest, {"m": 5, "n": 100}, 8)["m"] == 5
    assert fused.choose_tiles(LAYOUT, largest, {"n": 100}, 8)["n"] == 7
    assert fused.choose_tiles(LAYOUT, largest, {"k": 3}, 8)["k"] == 2  # 3 does not divide 10


def test_a_prime_extent_is_cut_raggedly() -> None:
    prime = block(SPECS[0], (1, 13, 10), (10, 7), 2)
    assert fused.choose_tiles(prime, {"m": 8, "n": 8, "k": 8}, {}, 8)["m"] == 8


@pytest.mark.parametrize("extent", range(1, 40))
def test_tiles_always_fit(extent: int) -> None:
    layout = dataclasses.replace(
        LAYOUT, sizes=tuple((x, extent if x in "mnk" else 1) for x, _ in LAYOUT.sizes)
    )
    tiles = fused.choose_tiles(layout, {"m": 8, "n": 16, "k": 32}, {}, 8)
    assert extent % tiles["k"] == 0
    assert all(1 <= size <= extent for size in tiles.values())
