"""Every operand and dimension of several products, and random reshapes between: values equal."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from syncopate_jax.rewrite.layout import Layout
from tests.rewrite.compare import mesh_of, reasons, same

SIZES = {"b": 4, "m": 6, "k": 8, "n": 10, "c": 2}
FORMULAS = (
    "mk,nk->nm",
    pytest.param("bmck,bkcn->bmn", marks=pytest.mark.slow),
    "k,kn->n",
    "m,n->mn",
)
Body = Callable[[jax.Array, jax.Array], jax.Array]


def gathers(formula: str) -> Iterator[Body]:
    """Either operand gathered along each dimension, tiled and not."""
    operands = formula.split("->")[0].split(",")
    for i, d in [(i, d) for i, own in enumerate(operands) for d in range(len(own))]:

        def tiled(*xs: jax.Array, i: int = i, d: int = d) -> jax.Array:
            part = lax.dynamic_slice_in_dim(
                xs[i], lax.axis_index("t") * (xs[i].shape[d] // 2), xs[i].shape[d] // 2, d
            )
            full = lax.all_gather(part, "t", axis=d, tiled=True)
            return jnp.einsum(formula, *(full if j == i else x for j, x in enumerate(xs)))

        def untiled(*xs: jax.Array, i: int = i, d: int = d) -> jax.Array:
            full = lax.all_gather(xs[i], "t", axis=d).reshape(
                *xs[i].shape[:d], 2 * xs[i].shape[d], *xs[i].shape[d + 1 :]
            )
            letter = operands[i][d]
            others = [
                jnp.concatenate([x, x], own.index(letter)) if letter in own and j != i else x
                for j, (x, own) in enumerate(zip(xs, operands, strict=True))
            ]
            return jnp.einsum(formula, *(full if j == i else x for j, x in enumerate(others)))

        yield tiled
        yield untiled


def exchanges(formula: str) -> Iterator[Body]:
    """Either operand or the result resharded from each dimension to each other."""
    operands, out = formula.split("->")
    for i, letters in enumerate((*operands.split(","), out)):
        for a, b in itertools.permutations(range(len(letters)), 2):

            def body(*xs: jax.Array, i: int = i, a: int = a, b: int = b) -> jax.Array:
                if i == 2:
                    return lax.all_to_all(jnp.einsum(formula, *xs), "t", a, b, tiled=True)
                moved = letters_of(formula)[i]
                x = lax.all_to_all(xs[i], "t", a, b, tiled=True)
                other = xs[1 - i]
                for d, letter in enumerate(letters_of(formula)[1 - i]):
                    if letter == moved[a]:
                        other = lax.slice_in_dim(other, 0, other.shape[d] // 2, axis=d)
                    if letter == moved[b]:
                        other = jnp.concatenate([other, other], d)
                return jnp.einsum(formula, *((x, other) if i == 0 else (other, x)))

            yield body


def sums(formula: str) -> Iterator[Body]:
    """The result reduced onto every rank, and scattered along each dimension."""
    yield lambda *xs: lax.psum(jnp.einsum(formula, *xs), "t")
    for d in range(len(formula.split("->")[1])):

        def tiled(*xs: jax.Array, d: int = d) -> jax.Array:
            out = jnp.einsum(formula, *xs)
            return lax.psum_scatter(out, "t", scatter_dimension=d, tiled=True)

        def untiled(*xs: jax.Array, d: int = d) -> jax.Array:
            out = jnp.einsum(formula, *xs)
            out = out.reshape(*out.shape[:d], 2, -1, *out.shape[d + 1 :])
            return lax.psum_scatter(out, "t", scatter_dimension=d)

        yield tiled
        yield untiled


def letters_of(formula: str) -> list[str]:
    return formula.split("->")[0].split(",")


def arrays(formula: str) -> list[jax.Array]:
    """Both operands, one of each rank stacked in front."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.standard_normal((2, *(SIZES[x] for x in letters))), jnp.float32)
        for letters in letters_of(formula)
    ]


def together(bodies: list[Body], check_vma: bool) -> Callable[..., Any]:
    """All bodies in one program, each on one rank's slice."""

    def body(x: jax.Array, w: jax.Array) -> Any:
        outs = [body(x[0], w[0]) for body in bodies]
        return [
            lax.pcast(out, "t", to="varying")[None] if is_same(out) else out[None] for out in outs
        ]

    def is_same(x: jax.Array) -> bool:
        return check_vma and not jax.typeof(x).manual_axis_type.varying

    return jax.shard_map(
        body, mesh=mesh_of(2), in_specs=(P("t"), P("t")), out_specs=P("t"), check_vma=check_vma
    )


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("group", [gathers, exchanges, sums])
def test_every_operand_and_dimension(formula: str, group: Callable[[str], Iterator[Body]]) -> None:
    bodies = list(group(formula))
    if not bodies:
        pytest.skip(f"{formula} has no such pair")
    report = same(together(bodies, check_vma=formula != "mk,nk->nm"), *arrays(formula))
    assert (len(report.replaced), reasons(report)) == (len(bodies), [])


@pytest.mark.slow
@pytest.mark.parametrize("group", [gathers, exchanges, sums])
def test_fused_kernels_do_them_too(group: Callable[[str], Iterator[Body]]) -> None:
    """A few with batch and several contracted letters, in interpreted kernels."""
    formula = "bmck,bkcn->bmn"
    bodies = random.Random(1).sample(list(group(formula)), 2)
    report = same(together(bodies, True), *arrays(formula), backend="remote_dma")
    assert (len(report.replaced), reasons(report)) == (2, [])


def chain(seed: int) -> Body:
    """A gather, random reshapes, transposes, casts, biases and activations, and a dot."""
    rng = np.random.default_rng(seed)
    axis = int(rng.integers(3))
    kinds = rng.choice(["transpose", "merge", "split", "act", "scale"], size=4)

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        draw = np.random.default_rng(seed)
        h = lax.all_gather(x + seed, "t", axis=axis, tiled=True)  # each its own
        for kind in kinds:
            if kind == "transpose":
                h = h.transpose(draw.permutation(h.ndim))
            elif kind == "merge" and h.ndim > 1:
                d = int(draw.integers(h.ndim - 1))
                h = h.reshape(*h.shape[:d], h.shape[d] * h.shape[d + 1], *h.shape[d + 2 :])
            elif kind == "split":
                d = int(draw.integers(h.ndim))
                parts = [n for n in (2, 3, 4) if h.shape[d] % n == 0]
                if parts:
                    n = int(draw.choice(parts))
                    h = h.reshape(*h.shape[:d], n, h.shape[d] // n, *h.shape[d + 1 :])
            elif kind == "act":
                h = jax.nn.silu(h) * 2.0
            else:
                h = h * 0.5 + 0.1
        d = int(draw.integers(h.ndim))
        return jnp.tensordot(h, jnp.ones((h.shape[d], 3)) * w[0, 0] / h.shape[d], axes=[[d], [0]])

    return body


@pytest.mark.slow
def test_random_chains_between() -> None:
    bodies = [chain(seed) for seed in range(10)]
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((2, 4, 6, 2)), jnp.float32)
    report = same(together(bodies, True), x, jnp.ones((2, 1, 1)))
    assert len(report.replaced) + len(report.left) == 10
    assert len(report.replaced) >= 6
    assert all("does not survive the reshape" in reason for reason in reasons(report))


def test_a_layout_by_its_factors() -> None:
    """A gathered dimension of 2 ranks' 3 rows each, joined with others and split again."""
    layout = Layout.of((6, 4), {0: (3, "gather")})
    assert (layout.inside, layout.outside, layout.moved()) == ((6, 4), (3, 4), {0})
    joined = layout.transpose((1, 0)).reshape((24,))
    assert joined is not None
    assert (joined.inside, joined.outside) == ((24,), (12,))
    split = joined.reshape((4, 2, 3))
    assert split is not None
    assert (split.inside, split.outside, split.moved()) == ((4, 2, 3), (4, 1, 3), {1})
    assert joined.reshape((4, 3, 2)) is None
    assert joined.reshape((5, 5)) is None
